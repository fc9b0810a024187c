"""The page of several seeds: the mean of each metric over the seeds, and the differences that are significant.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from nonet.deploy.report.charts import draw_forest_plot
from nonet.deploy.report.page import load_template
from nonet.deploy.report.scores import (
    format_name,
    format_number,
    iterate_differences,
    select_headline_metrics,
)
from nonet.deploy.report.tables import ReportTable, TableCell, build_difference_table
from nonet.deploy.report.verdicts import collect_findings

_TONES = {1: ("good", "▲"), 0: ("even", "●"), -1: ("bad", "▼")}


def render_seeds_page(pooled: Mapping[str, Any]) -> str:
    """Render the whole page of a pooled result.

    Args:
        pooled: The result that `nonet run --seeds` combines (deploy/after/seeds.py).

    Returns:
        The HTML text.
    """
    report = to_report(pooled)
    paired = list(iterate_differences(report))
    shown = [difference for difference in paired if difference.metric in select_headline_metrics(report)]
    seeds = pooled["seeds"]
    return load_template("seeds.html").render(
        name=pooled.get("name") or "runs",
        subtitle=f"{len(seeds)} seeds ({', '.join(map(str, seeds))}) · {pooled['events']:,} test events each",
        seeds=seeds,
        findings=[(*_TONES[finding.tone], finding.text) for finding in collect_findings(report)],
        scores=_build_mean_table(pooled),
        each=_build_seed_table(pooled),
        forest=Markup(draw_forest_plot(shown)) if shown else "",
        differences=build_difference_table(paired),
        command=pooled.get("command"),
    )


def to_report(pooled: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a pooled result to the form of a run's report, with means as scores."""
    means = {
        name: {metric: row["mean"] for metric, row in by_metric.items()}
        for name, by_metric in pooled["subjects"].items()
    }
    stages = {name: means.pop(name) for name in pooled["stages"]}
    return {"baselines": means, "stages": stages, "paired": pooled["paired"]}


def _build_mean_table(pooled: Mapping[str, Any]) -> ReportTable:
    """Build the table of each subject's mean and standard deviation by metric."""
    subjects = pooled["subjects"]
    metrics = _list_metrics(pooled)
    best = {metric: max(row[metric]["mean"] for row in subjects.values()) for metric in metrics}
    rows = [
        [
            TableCell(format_name(name), "stage" if name in pooled["stages"] else "baseline"),
            *(
                TableCell(
                    format_number(row[metric]["mean"]),
                    f"± {format_number(row[metric]['sd'])}",
                    bold=row[metric]["mean"] == best[metric] > 0,
                    share=row[metric]["mean"] / best[metric] if best[metric] > 0 else None,
                )
                for metric in metrics
            ),
        ]
        for name, row in subjects.items()
    ]
    return ReportTable(["", *metrics], rows, "Every catalogue item scored, mean over the seeds")


def _build_seed_table(pooled: Mapping[str, Any]) -> ReportTable:
    """Build the table of each subject's metrics for every seed."""
    metrics = _list_metrics(pooled)
    rows = [
        [
            TableCell(format_name(name), f"seed {seed}"),
            *(format_number(row[metric]["values"][at]) for metric in metrics),
        ]
        for name, row in pooled["subjects"].items()
        for at, seed in enumerate(pooled["seeds"])
    ]
    return ReportTable(["", *metrics], rows)


def _list_metrics(pooled: Mapping[str, Any]) -> list[str]:
    return list(next(iter(pooled["subjects"].values())))

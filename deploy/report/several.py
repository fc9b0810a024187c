"""The page of several seeds: the mean of each metric over the seeds, and the differences that are significant.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from nonet.deploy.report.charts import forest_plot
from nonet.deploy.report.page import template
from nonet.deploy.report.scores import differences, headline_metrics, label, number
from nonet.deploy.report.tables import Cell, Table, difference_table
from nonet.deploy.report.verdicts import findings

_TONES = {1: ("good", "▲"), 0: ("even", "●"), -1: ("bad", "▼")}


def seeds_page(pooled: Mapping[str, Any]) -> str:
    """Render the whole page of a pooled result.

    Args:
        pooled: The result that `nonet run --seeds` combines (deploy/after/seeds.py).

    Returns:
        The HTML text.
    """
    report = as_report(pooled)
    paired = list(differences(report))
    shown = [difference for difference in paired if difference.metric in headline_metrics(report)]
    seeds = pooled["seeds"]
    return template("seeds.html").render(
        name=pooled.get("name") or "runs",
        subtitle=f"{len(seeds)} seeds ({', '.join(map(str, seeds))}) · {pooled['events']:,} test events each",
        seeds=seeds,
        findings=[(*_TONES[finding.tone], finding.text) for finding in findings(report)],
        scores=_means(pooled),
        each=_each(pooled),
        forest=Markup(forest_plot(shown)) if shown else "",
        differences=difference_table(paired),
        command=pooled.get("command"),
    )


def as_report(pooled: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a pooled result to the form of a run's report, with means as scores."""
    means = {
        name: {metric: row["mean"] for metric, row in by_metric.items()}
        for name, by_metric in pooled["subjects"].items()
    }
    stages = {name: means.pop(name) for name in pooled["stages"]}
    return {"baselines": means, "stages": stages, "paired": pooled["paired"]}


def _means(pooled: Mapping[str, Any]) -> Table:
    """Build the table of each subject's mean and standard deviation by metric."""
    subjects = pooled["subjects"]
    metrics = _metrics(pooled)
    best = {metric: max(row[metric]["mean"] for row in subjects.values()) for metric in metrics}
    rows = [
        [
            Cell(label(name), "stage" if name in pooled["stages"] else "baseline"),
            *(
                Cell(
                    number(row[metric]["mean"]),
                    f"± {number(row[metric]['sd'])}",
                    bold=row[metric]["mean"] == best[metric] > 0,
                    share=row[metric]["mean"] / best[metric] if best[metric] > 0 else None,
                )
                for metric in metrics
            ),
        ]
        for name, row in subjects.items()
    ]
    return Table(["", *metrics], rows, "Every catalogue item scored, mean over the seeds")


def _each(pooled: Mapping[str, Any]) -> Table:
    """Build the table of each subject's metrics for every seed."""
    metrics = _metrics(pooled)
    rows = [
        [Cell(label(name), f"seed {seed}"), *(number(row[metric]["values"][at]) for metric in metrics)]
        for name, row in pooled["subjects"].items()
        for at, seed in enumerate(pooled["seeds"])
    ]
    return Table(["", *metrics], rows)


def _metrics(pooled: Mapping[str, Any]) -> list[str]:
    return list(next(iter(pooled["subjects"].values())))

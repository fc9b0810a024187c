"""The page of a run with several seeds: the mean of each metric over the seeds, and the paired differences.

The functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nonet.deploy.report.charts import draw_forest_plot
from nonet.deploy.report.page import load_template
from nonet.deploy.report.scores import (
    format_name,
    format_number,
    is_lower_better,
    iterate_differences,
    select_headline_metrics,
)
from nonet.deploy.report.tables import ReportTable, TableCell, build_difference_table
from nonet.deploy.report.verdicts import collect_findings

_TONES = {1: ("good", "▲"), 0: ("even", "●"), -1: ("bad", "▼")}  # (CSS class, sign) by a finding's tone


def render_seeds_page(pooled: Mapping[str, Any]) -> str:
    """Render the whole page of a pooled result.

    Args:
        pooled: The combined result of all seeds (`deploy.after.seeds`).

    Returns:
        The HTML text.
    """
    report = to_report(pooled)
    differences = list(iterate_differences(report))
    headline_metrics = select_headline_metrics(report)
    headline_differences = [difference for difference in differences if difference.metric in headline_metrics]
    seeds = pooled["seeds"]
    return load_template("seeds.html").render(
        name=pooled.get("name") or "runs",
        subtitle=f"{len(seeds)} seeds ({', '.join(map(str, seeds))}) · {pooled['events']:,} test events each",
        seeds=seeds,
        findings=[(*_TONES[finding.tone], finding.text) for finding in collect_findings(report)],
        scores=_build_mean_table(pooled),
        each=_build_seed_table(pooled),
        forest=Markup(draw_forest_plot(headline_differences)) if headline_differences else "",
        differences=build_difference_table(differences),
        command=pooled.get("command"),
    )


def to_report(pooled: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a pooled result to the form of a run's report, with means as scores."""
    means = {
        name: {metric: row["mean"] for metric, row in by_metric.items()}
        for name, by_metric in pooled["subjects"].items()
    }
    stages = {name: means.pop(name) for name in pooled["stages"]}
    return {
        "baselines": means,
        "stages": stages,
        "paired": pooled["paired"],
        "lower_is_better": pooled.get("lower_is_better"),
    }


def _build_mean_table(pooled: Mapping[str, Any]) -> ReportTable:
    """Build the table of each subject's mean and standard deviation by metric."""
    subjects = pooled["subjects"]  # scores by metric of each baseline and stage
    metrics = _list_metrics(pooled)
    means = {
        metric: [scores[metric]["mean"] for scores in subjects.values() if scores[metric]["mean"] is not None]
        for metric in metrics
    }
    rows = [
        [
            TableCell(format_name(name), "stage" if name in pooled["stages"] else "baseline"),
            *(
                _make_mean_cell(scores[metric], means[metric], is_lower_better(pooled, metric))
                for metric in metrics
            ),
        ]
        for name, scores in subjects.items()
    ]
    return ReportTable(["", *metrics], rows, "Test events, mean over the seeds")


def _make_mean_cell(
    score: Mapping[str, Any], means: Sequence[float], lower_is_better: bool
) -> TableCell | str:
    """Make the cell of one subject's mean; the best of all `means` is bold, and a bar shows the ratio to the highest."""
    mean = score["mean"]
    if mean is None:  # The labels do not define the metric.
        return "–"
    highest = max(means)
    return TableCell(
        format_number(mean),
        f"± {format_number(score['sd'])}",
        bold=mean == (min(means) if lower_is_better else highest) > 0,
        share=mean / highest if highest > 0 else None,
    )


def _build_seed_table(pooled: Mapping[str, Any]) -> ReportTable:
    """Build the table of each subject's metrics for every seed."""
    metrics = _list_metrics(pooled)
    rows = [
        [
            TableCell(format_name(name), f"seed {seed}"),
            *(format_number(scores[metric]["values"][index]) for metric in metrics),
        ]
        for name, scores in pooled["subjects"].items()
        for index, seed in enumerate(pooled["seeds"])
    ]
    return ReportTable(["", *metrics], rows)


def _list_metrics(pooled: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics, which are the same for all subjects."""
    return list(next(iter(pooled["subjects"].values())))

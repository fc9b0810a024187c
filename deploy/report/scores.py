"""The scores of a report as rows, one for each evaluated subject (a baseline or a stage), and their paired differences.

All functions are pure functions of the contents of report.json (docs/explanation/design.md, section 4). Any part of it may
be missing; its rows are then left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

HEADLINES = ("recall@10", "ndcg@10")  # the metrics that the report's sentences mention


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """The scores of one stage or baseline.

    Attributes:
        name: The name of the stage or baseline, such as "finetune".
        kind: "stage" or "baseline".
        scores: Scores by metric.
        metrics: Names of all metrics, including those that the test events do not define.
    """

    name: str
    kind: str
    scores: dict[str, float]
    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two subjects in one metric, over the same users.

    Attributes:
        left: The first subject.
        right: The second subject.
        metric: The metric.
        diff: The score of `left` minus that of `right`.
        low: The lower bound of the 95 % interval, from a bootstrap over users.
        high: The upper bound of the interval.
        lower_is_better: Whether lower values of the metric are better.
    """

    left: str
    right: str
    metric: str
    diff: float
    low: float
    high: float
    lower_is_better: bool = False

    @property
    def direction(self) -> int:
        """1 or -1 if the interval excludes 0, else 0 (not significant)."""
        return int(self.low > 0) - int(self.high < 0)

    @property
    def gain(self) -> int:
        """1 if `left` is significantly better, -1 if it is significantly worse, else 0."""
        return -self.direction if self.lower_is_better else self.direction


def format_name(name: str) -> str:
    """Format a name for readers: transition_counter becomes "transition counter", rl becomes "RL"."""
    return "RL" if name == "rl" else name.replace("_", " ")


def format_number(value: Any, digits: int = 4, sign: bool = False) -> str:
    """Format a number.

    Args:
        value: The number; a missing or non-finite one becomes a dash.
        digits: Number of decimals.
        sign: Whether to show the sign of positive numbers.
    """
    if not _is_number(value):
        return "–"
    if not round(value, digits):
        return f"{0.0:.{digits}f}"
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def format_aligned(value: float | None, width: int, sign: bool = False) -> str:
    """Format a number with four decimals for a column of a terminal; one that is not defined becomes "-"."""
    if value is None or math.isnan(value):
        return f"{'-':>{width}}"
    return f"{value:>{'+' if sign else ''}{width}.4f}"


def select_scores(
    report: Mapping[str, Any], *, split: str = "test", search: str = "exhaustive", events: str = "all"
) -> list[ScoreRow]:
    """Select one kind of scores of the baselines and stages, in the report's order.

    Args:
        report: The contents of report.json.
        split: "test", "valid" or "shuffled" (test events, with events of equal time shuffled).
        search: "exhaustive" (all items scored), "beam", or "model alone" (without a memory's votes).
        events: "all", "target" (events that match the finetuning target) or the name of a segment.

    Returns:
        Baselines, then stages; those without scores of this kind are left out.
    """
    rows = []
    for name, kind in list_subjects(report):
        scores = _get_nested(report, "detail", name, split, search, events)
        if not scores and (split, search, events) == ("test", "exhaustive", "all"):
            scores = _get_nested(report, "baselines" if kind == "baseline" else "stages", name)
        if scores:
            numbers = {metric: float(value) for metric, value in scores.items() if _is_number(value)}
            rows.append(ScoreRow(name, kind, numbers, tuple(scores)))
    return rows


def list_metrics(rows: list[ScoreRow]) -> list[str]:
    """Return the metrics of all rows, in order of first appearance."""
    return list(dict.fromkeys(metric for row in rows for metric in row.metrics))


def list_subjects(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, "baseline" or "stage") of every evaluated subject, baselines first."""
    baselines = [(name, "baseline") for name in report.get("baselines") or {}]
    return baselines + [(name, "stage") for name in report.get("stages") or {}]


def iterate_differences(report: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield every paired difference in the report's order; those with a missing number are left out."""
    names = {name for name, _ in list_subjects(report)}
    for pair, values_by_metric in (report.get("paired") or {}).items():
        left, right = _split_pair(pair, names)
        for metric, values_by_key in (values_by_metric or {}).items():
            values = [values_by_key.get(key) for key in ("diff", "low", "high")]
            if all(_is_number(value) for value in values):
                yield Difference(
                    left, right, metric, *values, lower_is_better=is_lower_better(report, metric)
                )


def is_lower_better(report: Mapping[str, Any], metric: str) -> bool:
    """Return whether lower values of a metric are better."""
    return metric in (report.get("lower_is_better") or ())


def select_headline_metrics(report: Mapping[str, Any]) -> list[str]:
    """Return the metrics that the report's sentences mention: recall@10 and ndcg@10 if available, else the first two."""
    metrics = list(dict.fromkeys(difference.metric for difference in iterate_differences(report)))
    metrics = metrics or list(dict.fromkeys(metric for row in select_scores(report) for metric in row.scores))
    return [metric for metric in HEADLINES if metric in metrics] or metrics[:2]


def list_compared_tasks(report: Mapping[str, Any]) -> list[str]:
    """Return the tasks of a click model besides its target that subjects were compared in, such as "order" of auc@order."""
    headlines = select_headline_metrics(report)
    parts = (difference.metric.partition("@") for difference in iterate_differences(report))
    return list(dict.fromkeys(task for name, _, task in parts if task and name in headlines))


def _split_pair(pair: str, names: set[str]) -> tuple[str, str]:
    """Split a key "left-right" into two of `names`, which may contain hyphens, else at the first hyphen."""
    hyphens = [index for index, character in enumerate(pair) if character == "-"]
    for index in hyphens:
        if pair[:index] in names and pair[index + 1 :] in names:
            return pair[:index], pair[index + 1 :]
    left, _, right = pair.partition("-")
    return left, right


def _get_nested(report: Mapping[str, Any], *path: str) -> Any:
    """Return the value at a path of keys; None if a key is missing."""
    value: Any = report
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

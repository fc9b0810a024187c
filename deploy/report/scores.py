"""A report's numbers in the shape that people read: one row a baseline or stage, one column a metric.

Pure functions of report.json's dictionary (docs/explanation/design.md, section 7); any part of it may be missing, and then there
is no row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

HEADLINES = ("recall@10", "ndcg@10")


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """Whose scores these are ("finetune"), whether it is a stage or a baseline, and its scores by metric."""

    name: str
    kind: str
    scores: dict[str, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """left - right in one metric, with the 95 % interval of a paired bootstrap over users."""

    left: str
    right: str
    metric: str
    diff: float
    low: float
    high: float

    @property
    def direction(self) -> int:
        """1 or -1 where the interval leaves out 0, else 0: not significant."""
        return int(self.low > 0) - int(self.high < 0)


def label(name: str) -> str:
    """A name as people read it: transition_counter -> transition counter, rl -> RL."""
    return "RL" if name == "rl" else name.replace("_", " ")


def number(value: Any, digits: int = 4, sign: bool = False) -> str:
    """A number with fixed digits; a dash for what is missing or not finite."""
    if not _is_number(value):
        return "–"
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def stage_table(
    report: Mapping[str, Any], *, split: str = "test", search: str = "exhaustive", events: str = "all"
) -> list[ScoreRow]:
    """Baselines, then stages, in the report's order; those without scores of this kind are left out.

    split test | valid, search exhaustive | beam, events all | target (those that match the finetuning
    target).
    """
    rows = []
    for name, kind in names(report):
        scores = _at(report, "detail", name, split, search, events)
        if not scores and (split, search, events) == ("test", "exhaustive", "all"):
            scores = _at(report, "baselines" if kind == "baseline" else "stages", name)
        scores = {metric: float(value) for metric, value in (scores or {}).items() if _is_number(value)}
        if scores:
            rows.append(ScoreRow(name, kind, scores))
    return rows


def metrics_of(rows: list[ScoreRow]) -> list[str]:
    """The metrics that any row has, in order of first appearance."""
    return list(dict.fromkeys(metric for row in rows for metric in row.scores))


def names(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, "baseline" | "stage") of everything that was evaluated."""
    baselines = [(name, "baseline") for name in report.get("baselines") or {}]
    return baselines + [(name, "stage") for name in report.get("stages") or {}]


def differences(report: Mapping[str, Any]) -> Iterator[Difference]:
    """Every paired difference, in the report's order; those with a missing number are left out."""
    known = {name for name, _ in names(report)}
    for pair, metrics in (report.get("paired") or {}).items():
        left, right = _split_pair(pair, known)
        for metric, values_by_key in (metrics or {}).items():
            values = [values_by_key.get(key) for key in ("diff", "low", "high")]
            if all(_is_number(value) for value in values):
                yield Difference(left, right, metric, *values)


def headline_metrics(report: Mapping[str, Any]) -> list[str]:
    """The metrics that words are about: recall@10 and ndcg@10 where there are such, else the first two."""
    metrics = list(dict.fromkeys(difference.metric for difference in differences(report)))
    metrics = metrics or metrics_of(stage_table(report))
    return [metric for metric in HEADLINES if metric in metrics] or metrics[:2]


def _split_pair(pair: str, known: set[str]) -> tuple[str, str]:
    cuts = [at for at, character in enumerate(pair) if character == "-"]
    for at in cuts:
        if pair[:at] in known and pair[at + 1 :] in known:
            return pair[:at], pair[at + 1 :]
    left, _, right = pair.partition("-")
    return left, right


def _at(report: Mapping[str, Any], *path: str) -> Any:
    value: Any = report
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

"""The curves of a run: metrics.jsonl as one series for each stage and metric.

If several ranks report a step, throughputs are summed and all other metrics averaged. If a step was
reported twice because the run was resumed, the last report is used.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nonet.atomic import open_file

# Curves whose names contain one of these are shown; the others are in a collapsed section.
_IMPORTANT = ("loss", "validation", "held-out", "reward", "kl", "rows/s", "rows_per_s", "events/s")


@dataclass(slots=True)
class Curve:
    """One metric of one stage.

    Attributes:
        stage: The stage's name; "" for metrics outside of stages.
        name: The metric's name.
        unit: The metric's unit.
        reports: Values by (step, role, rank), as the ranks reported them.
    """

    stage: str
    name: str
    unit: str = ""
    reports: dict[tuple[float, str, int], float] = field(default_factory=dict)

    @property
    def points(self) -> list[tuple[float, float]]:
        """Points (step, value) in order of steps, combined over ranks."""
        values_by_step: dict[float, list[float]] = {}
        for (step, _, _), value in self.reports.items():
            values_by_step.setdefault(step, []).append(value)
        is_throughput = "/s" in self.unit or "/s" in self.name or self.name.endswith("_per_s")
        return [
            (step, sum(values) / (1 if is_throughput else len(values)))
            for step, values in sorted(values_by_step.items())
        ]

    @property
    def important(self) -> bool:
        """Whether the curve is shown by default: losses, rewards, KL and throughput."""
        return any(word in self.name for word in _IMPORTANT)


def read_curves(path: Path) -> tuple[list[Curve], int]:
    """Read the curves of a metrics file.

    Args:
        path: The file, which may be missing.

    Returns:
        Curves in order of appearance, and the number of unreadable lines (a killed process may leave a
        partial last line).

    Raises:
        ConfigError: The path is no regular file.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return [], 0
    with io.TextIOWrapper(file, encoding="utf-8", errors="replace") as lines:
        return collect_curves(lines)


def collect_curves(lines: Iterable[str]) -> tuple[list[Curve], int]:
    """Collect curves from JSON lines.

    Args:
        lines: The lines of metrics.jsonl.

    Returns:
        Curves in order of appearance, and the number of nonempty lines that are no metrics records.
    """
    curves: dict[tuple[str, str], Curve] = {}  # by (stage, metric)
    unread = 0
    for line in lines:
        record = _parse_record(line)
        if record is None:
            unread += bool(line.strip())
            continue
        if str(record["name"]).startswith("machine "):  # sums, from which the report computes shares
            continue
        key = (str(record.get("stage") or ""), str(record["name"]))
        curve = curves.setdefault(key, Curve(*key, str(record.get("unit") or "")))
        curve.reports[record["step"], str(record.get("role")), record["rank"]] = record["value"]
    return list(curves.values()), unread


def _parse_record(line: str) -> dict[str, Any] | None:
    """Parse a line as a metrics record, with step, value and rank as numbers; None if it is not one or not finite."""
    try:
        record = json.loads(line)
        record["step"], record["value"] = float(record["step"]), float(record["value"])
        record["rank"] = int(record.get("rank") or 0)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    is_finite = math.isfinite(record["value"]) and math.isfinite(record["step"])
    return record if "name" in record and is_finite else None

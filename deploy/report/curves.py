"""The curves of a run: metrics.jsonl, one series for each stage and name.

Where several ranks report a step, throughputs are summed and everything else is averaged; where a step was
reported twice, because the run was resumed, the last report counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FIRST = ("loss", "validation", "held-out", "reward", "kl", "rows/s", "rows_per_s", "events/s")


@dataclass(slots=True)
class Curve:
    """One metric of one stage: `points` (step, value), by step."""

    stage: str
    name: str
    unit: str = ""
    reports: dict[tuple[float, str, int], float] = field(default_factory=dict)

    @property
    def points(self) -> list[tuple[float, float]]:
        """(step, value), ranks put together."""
        steps: dict[float, list[float]] = {}
        for (step, _, _), value in self.reports.items():
            steps.setdefault(step, []).append(value)
        added = "/s" in self.unit or "/s" in self.name or self.name.endswith("_per_s")
        return [(step, sum(values) / (1 if added else len(values))) for step, values in sorted(steps.items())]

    @property
    def important(self) -> bool:
        """Whether a reader should see it without asking: losses, rewards, kl and throughput."""
        return any(word in self.name for word in _FIRST)


def read_curves(path: Path) -> tuple[list[Curve], int]:
    """Curves in order of appearance, and how many lines could not be read: a kill tears the last."""
    if not path.exists():
        return [], 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        return collect(lines)


def collect(lines: Iterable[str]) -> tuple[list[Curve], int]:
    """The curves of JSON lines, and how many lines were no metrics records."""
    curves: dict[tuple[str, str], Curve] = {}
    unread = 0
    for line in lines:
        record = _record(line)
        if record is None:
            unread += bool(line.strip())
            continue
        if str(record["name"]).startswith("machine "):  # sums, which the report divides
            continue
        key = (str(record.get("stage") or ""), str(record["name"]))
        curve = curves.setdefault(key, Curve(*key, str(record.get("unit") or "")))
        curve.reports[record["step"], str(record.get("role")), int(record.get("rank") or 0)] = record["value"]
    return list(curves.values()), unread


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        record["step"], record["value"] = float(record["step"]), float(record["value"])
    except (ValueError, TypeError, KeyError):
        return None
    return record if "name" in record and math.isfinite(record["value"]) else None

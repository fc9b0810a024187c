"""What was predicted of a run beside what was measured, as a section of its page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from nonet.deploy.report.markup import note, row_name, section, table


def receipt(report: Mapping[str, Any]) -> str:
    """The section, a row a stage; empty where nothing was predicted."""
    found = report.get("receipt") or {}
    rows = [
        [
            row_name(name),
            _cell(f"{stage['predicted_rows_per_s']:,.0f}"),
            _cell(f"{stage['measured_rows_per_s']:,.0f}"),
            _cell(f"{stage['error']:+.0%}"),
            _cell(", ".join(f"{part} {value:.3g} ms" for part, value in stage["parts_ms"].items())),
        ]
        for name, stage in (found.get("stages") or {}).items()
    ]
    if not rows:
        return ""
    told = note(
        "Rows a second as the planner predicted them, and the median of the stage's calls; a step's predicted parts. "
        f"Costs: {found['source']}, {found.get('runs_learned', 0)} runs learned.{_doubts(found['stages'])}"
    )
    return section(
        "Predicted and measured", told + table(["stage", "predicted", "measured", "error", "a step"], rows)
    )


def _doubts(stages: Mapping[str, Any]) -> str:
    """What the calibration did not learn, and why."""
    return "".join(
        f" Not learned from {name}: {stage['learned']}."
        for name, stage in stages.items()
        if stage.get("learned", "yes") != "yes"
    )


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"

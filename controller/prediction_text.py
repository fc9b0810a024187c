"""A prediction as a person reads it: every stage's speed, where its step goes, who waits, what moves and what it holds."""

from __future__ import annotations

from nonet.controller.ledger import gigabytes
from nonet.controller.predict import Prediction, StagePrediction


def prediction_text(found: Prediction) -> str:
    """Lines a stage, and the whole."""
    lines = ["predicted"]
    for stage in found.stages:
        lines += [f"  {stage.stage:<10} {_speed(stage)}", f"  {'':<10} {_step(stage)}"]
    if found.evaluate_s:
        lines.append(f"  {'evaluate':<10} adds {found.evaluate_s:.1f} s")
    return "\n".join(
        [
            *lines,
            f"  {found.wall_s:.0f} s in all, {found.start_s:.0f} s of it starting; costs: {found.source}",
        ]
    )


def _speed(stage: StagePrediction) -> str:
    unit = "users/s" if stage.kind == "rl" else "rows/s"
    return f"{stage.rows_per_s:,.0f} {unit}, {stage.steps} steps in {stage.wall_s:.1f} s"


def _step(stage: StagePrediction) -> str:
    parts = ", ".join(f"{part} {1e3 * seconds:.3g} ms" for part, seconds in stage.parts.items())
    idle = ", ".join(f"{group} {share:.0%}" for group, share in stage.idle.items() if share > 0.005)
    hidden = f", of it {1e3 * stage.hidden_s:.3g} ms beside the rest by staleness" if stage.hidden_s else ""
    moved = f"; {gigabytes(stage.bytes_a_step)} a step between processes" if stage.bytes_a_step else ""
    return f"a step: {parts}{hidden}{moved}; holds {gigabytes(stage.memory_bytes)}" + (
        f"; idle: {idle}" if idle else ""
    )

"""The receipt: what was predicted of a run beside what was measured, and what the error teaches the calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.controller import calibration
from nonet.controller.plan import Plan
from nonet.controller.predict import DataFacts, predict
from nonet.controller.scenario import Scenario
from nonet.errors import ConfigError


def make_receipt(
    scenario: Scenario,
    plan: Plan,
    facts: DataFacts,
    rows: Mapping[str, int],
    wall_s: Mapping[str, float],
) -> dict[str, Any]:
    """{"source", "stages": {name: {predicted and measured rows/s and seconds, parts, idle, bytes, memory}}}; teaches the
    calibration where there is one. {"note": why} where the cost model does not cover the run.
    """
    costs = calibration.load()
    try:
        predicted = predict(scenario, plan, facts, costs)
    except ConfigError as error:
        return {"note": str(error), "stages": {}}
    stages, errors = {}, {}
    for stage in predicted.stages:
        seconds, done = wall_s.get(stage.stage, 0.0), rows.get(stage.stage, 0)
        if not (seconds and done):
            continue
        measured = done / seconds
        stages[stage.stage] = {
            "predicted_rows_per_s": round(stage.rows_per_s, 1),
            "measured_rows_per_s": round(measured, 1),
            "error": round(stage.rows_per_s / measured - 1, 4),
            "predicted_s": round(stage.wall_s, 2),
            "measured_s": round(seconds, 2),
            "parts_ms": {part: round(1e3 * value, 2) for part, value in stage.parts.items()},
            "idle": {group: round(share, 3) for group, share in stage.idle.items()},
            "bytes_a_step": stage.bytes_a_step,
            "memory_bytes": stage.memory_bytes,
        }
        errors.setdefault(stage.kind, []).append(stage.rows_per_s / measured)
    if stages and costs is not calibration.NOMINAL:
        means = {kind: _geometric(found) for kind, found in errors.items()}
        calibration.save(costs.learned(means))
    return {"source": predicted.source, "runs_learned": costs.runs, "stages": stages}


def facts_of(data: Mapping[str, Any]) -> DataFacts:
    """What the tokenise stage found, as a prediction wants it."""
    spread = {"spread": data["train_spread"]} if "train_spread" in data else {}
    return DataFacts(data["users"], data["trained_events"], **spread, targeted=data.get("trained_share", {}))


def receipt_text(receipt: Mapping[str, Any]) -> str:
    """Lines for the end of a run: predicted beside measured; empty without a prediction."""
    lines = [
        f"{name:<12} predicted {found['predicted_rows_per_s']:>9,.0f} rows/s  measured "
        f"{found['measured_rows_per_s']:>9,.0f}  ({found['error']:+.0%})"
        for name, found in receipt.get("stages", {}).items()
    ]
    return "\n".join([*lines, f"costs: {receipt['source']}"]) if lines else ""


def _geometric(values: list[float]) -> float:
    product = 1.0
    for value in values:
        product *= value
    return product ** (1 / len(values))

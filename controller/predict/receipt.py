"""The receipt: what was predicted of a run beside what was measured, and what the error teaches the calibration.

Measured is the median over a stage's calls, from the run's own metrics: a stall, a resumed step or a first slow call is noise
and no error of the plan. Only a finished run has a receipt; a stage with too few calls, too uneven ones, or an error
beyond reason is shown and teaches nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nonet.controller.plan import Plan
from nonet.controller.predict import calibration
from nonet.controller.predict.prediction import DataFacts, StagePrediction, predict
from nonet.controller.scenario import Scenario
from nonet.errors import ConfigError

_FEWEST = 5  # calls that a median is taken of
_UNEVEN = 0.5  # middle half of the calls' rows/s over their median, from which a run was disturbed


def make_receipt(
    scenario: Scenario, plan: Plan, facts: DataFacts, rates: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """{"source", "stages": {name: {predicted and measured rows/s, seconds, parts, idle, bytes, memory, "learned"}}}; teaches the
    calibration where there is one. {"note": why} where the cost model does not cover the run. rates: of every call, by stage.
    """
    costs = calibration.load()
    try:
        predicted = predict(scenario, plan, facts, costs)
    except ConfigError as error:
        return {"note": str(error), "stages": {}}
    stages, errors = {}, {}
    for stage in predicted.stages:
        positive_rates = [rate for rate in rates.get(stage.stage, ()) if rate > 0]
        if not positive_rates:
            continue
        measured = statistics.median(positive_rates)
        doubt = _doubt(positive_rates, stage.rows_per_s / measured)
        stages[stage.stage] = _line(stage, measured) | {"learned": doubt or "yes"}
        if not doubt:
            errors.setdefault(stage.kind, []).append(stage.rows_per_s / measured)
    if errors and costs is not calibration.NOMINAL:
        means = {kind: statistics.geometric_mean(kind_errors) for kind, kind_errors in errors.items()}
        calibration.save(costs.learned(means))
    return {"source": predicted.source, "runs_learned": costs.runs, "stages": stages}


def measured_rates(metrics: Path) -> dict[str, list[float]]:
    """rows/s of every call by stage, from a run's metrics.jsonl; a step written twice by a resume counts once."""
    values_by_stage: dict[str, dict[int, float]] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill; its step was run and written again
            continue
        if record["name"] == "rows/s":
            values_by_stage.setdefault(record["stage"], {})[record["step"]] = record["value"]
    return {stage: list(values.values()) for stage, values in values_by_stage.items()}


def facts_of(data: Mapping[str, Any]) -> DataFacts:
    """What the tokenise stage found, as a prediction wants it."""
    spread = {"spread": data["train_spread"]} if "train_spread" in data else {}
    prompts = sum(data["held_out"].get(name, 0) for name in ("valid", "test"))
    shares = data.get("trained_share", {})
    return DataFacts(
        data["users"], data["trained_events"], **spread, targeted=shares, items=data["items"], asked=prompts
    )


def receipt_text(receipt: Mapping[str, Any]) -> str:
    """Lines for the end of a run: predicted beside measured; empty without a prediction."""
    stages = receipt.get("stages", {})
    lines = [
        f"{name:<12} predicted {row['predicted_rows_per_s']:>9,.0f} rows/s  measured "
        f"{row['measured_rows_per_s']:>9,.0f}  ({row['error']:+.0%})"
        for name, row in stages.items()
    ]
    doubts = [
        f"not learned from {name}: {row['learned']}"
        for name, row in stages.items()
        if row.get("learned", "yes") != "yes"
    ]
    return "\n".join([*lines, *doubts, f"costs: {receipt['source']}"]) if lines else ""


def _line(stage: StagePrediction, measured: float) -> dict[str, Any]:
    return {
        "predicted_rows_per_s": round(stage.rows_per_s, 1),
        "measured_rows_per_s": round(measured, 1),
        "error": round(stage.rows_per_s / measured - 1, 4),
        "predicted_s": round(stage.wall_s, 2),
        "measured_s": round(stage.rows / measured, 2),
        "parts_ms": {part: round(1e3 * value, 2) for part, value in stage.parts.items()},
        "idle": {group: round(share, 3) for group, share in stage.idle.items()},
        "bytes_a_step": stage.bytes_a_step,
        "memory_bytes": stage.memory_bytes,
    }


def _doubt(rates: Sequence[float], error: float) -> str:
    """Why a stage's error is not one to learn from, "" where it is."""
    if len(rates) < _FEWEST:
        return f"{len(rates)} calls, {_FEWEST} are the least"
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
    if (high - low) / middle > _UNEVEN:
        return f"its calls differ too much (middle half {low:,.0f} to {high:,.0f} rows/s): the node was busy"
    if not calibration.sound(error):
        times = max(error, 1 / error) if math.isfinite(error) and error > 0 else math.inf
        return f"off by {times:.3g} times: look before you trust it"
    return ""

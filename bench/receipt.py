"""The receipt: predicted rows/s of twelve placements of the quickstart beside what they do on this machine.

One calibration, one run of the default placement to learn from, then every variant trains a shortened quickstart (an epoch
of pretraining, some RL steps) twice, in two rounds of opposite order; its rows/s is the median over chunks of both rounds.
All share one Ray and one set of artifacts. The default is in both rounds twice: the difference of the two is the noise.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from nonet.controller import calibration
from nonet.controller.plan import plan
from nonet.controller.predict import DataFacts, predict
from nonet.controller.search import with_roles

_SHORT = ["stages.pretrain.epochs=1", "stages.rl.steps=12", "checkpoint.every=1000"]
_SKIPPED = 2  # chunks and steps that warm up
Rates = dict[str, list[float]]


def _roles(trainers: int, rollout: int = 0, embedding: int = 0) -> dict[str, Any]:
    """0: fused."""
    roles: dict[str, Any] = {"trainer": {"workers": trainers}} if trainers > 1 else {}
    roles |= {"rollout": {"workers": rollout}} if rollout else {}
    return roles | ({"embedding": {"workers": embedding}} if embedding else {})


VARIANTS = {
    "fused": _roles(1),
    "rollout apart": _roles(1, rollout=1),
    "2 rollouts apart": _roles(1, rollout=2),
    "embedding apart": _roles(1, embedding=1),
    "2 shards apart": _roles(1, embedding=2),
    "all apart": _roles(1, rollout=1, embedding=1),
    "2 trainers": _roles(2),
    "2 trainers, rollout apart": _roles(2, rollout=1),
    "2 trainers, 2 rollouts apart": _roles(2, rollout=2),
    "2 trainers, embedding apart": _roles(2, embedding=1),
    "2 trainers, 2 shards apart": _roles(2, embedding=2),
    "2 trainers, all apart": _roles(2, rollout=1, embedding=1),
}


def receipt(rounds: int = 2) -> dict[str, Any]:
    """Predicted and measured rows/s of every variant; their median error, rank correlation, and what the choice loses."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # the user's own calibration stays as it is
        costs, facts, measured, again = _measured(Path(folder), rounds)
    rows = [_row(name, costs, facts, measured[name]) for name in VARIANTS]
    ratios = _ratios(rows)
    for stage, values in again.items():
        ratios[f"A/A noise of {stage}"] = abs(
            statistics.median(values) / statistics.median(measured["fused"][stage]) - 1
        )
    return {"rows": rows, "ratio": ratios}


def _measured(folder: Path, rounds: int) -> tuple[Any, DataFacts, dict[str, Rates], Rates]:
    from nonet.deploy.measures import calibrate
    from nonet.workers.group import ensure_ray

    ensure_ray()
    costs = calibrate(lambda line: print(line, flush=True))
    facts, first = _run(folder, "learnt from", {})
    costs = _learnt(costs, facts, first)
    names = list(VARIANTS)
    found: dict[str, Rates] = {name: {} for name in names}
    again: Rates = {}
    for number in range(rounds):
        for name in [*names, "fused again"] if number % 2 == 0 else ["fused again", *reversed(names)]:
            _, rates = _run(folder, f"{name} {number}", VARIANTS.get(name, {}))
            into = found.get(name, again)
            for stage, values in rates.items():
                into.setdefault(stage, []).extend(values)
    return costs, facts, found, again


def _run(folder: Path, name: str, roles: dict[str, Any]) -> tuple[DataFacts, Rates]:
    """Train the short quickstart with these roles: rows/s of every chunk (pretrain) and step (rl)."""
    from nonet.controller.receipt import facts_of
    from nonet.controller.recorder import Recorder
    from nonet.controller.run_folder import RunFolder
    from nonet.controller.scenario import LIBRARY
    from nonet.controller.session import Session
    from nonet.controller.stages import run_stage

    run, made = RunFolder(folder / name.replace(" ", "-").replace(",", "")), folder / "made"
    if made.exists():
        (run.path / "results").mkdir(parents=True)
        shutil.copy(made / "tokenise.json", run.path / "results")
    began = time.perf_counter()
    with Session(_scenario(roles), folder=LIBRARY, run=run) as session:
        if not made.exists():
            made.mkdir()
            shutil.copy(run.path / "results" / "tokenise.json", made)
        recorder = Recorder(run.path, run.id)
        rates = {}
        for stage in session.stages:
            run_stage(session, stage, recorder, lambda: False)
        recorder.close()
        facts = facts_of(session.facts["data"])
    for line in run.metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["name"] == "rows/s":
            rates.setdefault(record["stage"], []).append(record["value"])
    rates = {stage: values[_SKIPPED:] for stage, values in rates.items()}
    told = ", ".join(f"{stage} {statistics.median(values):,.0f} rows/s" for stage, values in rates.items())
    print(f"{name}: {told} ({time.perf_counter() - began:.0f} s)", flush=True)
    return facts, rates


def _scenario(roles: dict[str, Any]) -> Any:
    from nonet.controller.scenario import load_scenario

    whole = load_scenario("quickstart", _SHORT)[0]
    stages = {name: body for name, body in whole.stages.items() if name != "finetune"}
    return with_roles(whole.model_copy(update={"stages": stages}), roles)


def _predicted(roles: dict[str, Any], facts: DataFacts, costs: Any) -> dict[str, float]:
    from nonet.controller.cluster import this_machine

    scenario = _scenario(roles)
    found = predict(scenario, plan(scenario, this_machine()), facts, costs)
    return {stage.stage: stage.rows_per_s for stage in found.stages}


def _learnt(costs: Any, facts: DataFacts, rates: Rates) -> calibration.Calibration:
    """What one run of the default placement teaches."""
    wanted = _predicted({}, facts, costs)
    kinds = {"pretrain": "supervised", "rl": "rl"}
    return costs.learned({kinds[s]: wanted[s] / statistics.median(values) for s, values in rates.items()})


def _row(name: str, costs: Any, facts: DataFacts, rates: Rates) -> dict[str, Any]:
    predicted = _predicted(VARIANTS[name], facts, costs)
    row: dict[str, Any] = {"variant": name}
    for stage, values in rates.items():
        row |= {f"{stage} predicted": predicted[stage], f"{stage} measured": statistics.median(values)}
    row["seconds predicted"], row["seconds measured"] = (
        _whole(row, facts, how) for how in ("predicted", "measured")
    )
    return row


def _whole(row: dict[str, Any], facts: DataFacts, how: str) -> float:
    """Seconds of the shipped quickstart's ten epochs and 60 RL steps of 64 users at these rates."""
    return 10 * facts.trained_events / row[f"pretrain {how}"] + 60 * 64 / row[f"rl {how}"]


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    ratios = {}
    for stage in ("pretrain", "rl"):
        errors = [abs(row[f"{stage} predicted"] / row[f"{stage} measured"] - 1) for row in rows]
        ratios[f"median error of rows/s, {stage}"] = statistics.median(errors)
        ratios[f"rank correlation, {stage}"] = _spearman(
            [row[f"{stage} predicted"] for row in rows], [row[f"{stage} measured"] for row in rows]
        )
    both = [abs(row[f"{s} predicted"] / row[f"{s} measured"] - 1) for row in rows for s in ("pretrain", "rl")]
    ratios["median error of rows/s"] = statistics.median(both)
    seconds = [[row[f"seconds {how}"] for row in rows] for how in ("predicted", "measured")]
    ratios["rank correlation of the whole"] = _spearman(*seconds)
    chosen = min(rows, key=lambda row: row["seconds predicted"])
    ratios["seconds of the choice / of the best measured"] = chosen["seconds measured"] / min(seconds[1])
    return ratios


def _spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; values within a thousandth of each other share their rank."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: list[float]) -> list[float]:
    return [
        sum(other < value * 0.999 for other in values)
        + (sum(abs(o / value - 1) <= 1e-3 for o in values) - 1) / 2
        for value in values
    ]

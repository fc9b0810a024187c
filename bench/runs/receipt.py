"""The receipt: predicted rows/s of twelve placements of the quickstart beside what they do on this machine.

One calibration, one run of the default placement to learn from, then every variant trains a shortened quickstart (an epoch
of pretraining, some RL steps) twice, in two rounds of opposite order; its rows/s is the upper quartile over chunks of both
rounds, for neighbours on the machine only ever slow a chunk down. All share one Ray and one set of artifacts. The default
is in both rounds twice: the difference of the two is the noise.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nonet.controller.plan import plan
from nonet.controller.predict import DataFacts, calibration, predict, with_roles
from nonet.timing import Times

_SHORT = ["stages.pretrain.epochs=1", "stages.rl.steps=20", "checkpoint.every=1000"]
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


def receipt(rounds: int = 2, folder: Path | None = None, most_s: float = 1e9) -> dict[str, Any]:
    """Predicted and measured rows/s of every variant; their median error, rank correlation, and what the choice loses.

    folder, most_s   keep what was measured, and stop after so long: asked again, it goes on; no rows until all are there
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as fresh:
            return receipt(rounds, Path(fresh), most_s)
    os.environ["XDG_CACHE_HOME"] = str(folder)  # the user's own calibration stays as it is
    # Ray's workers yield to everybody else by default: not while they are timed
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
    if not _measure(folder, rounds, time.monotonic() + most_s):
        return {"rows": [], "ratio": {}}
    return _judged(folder, rounds)


def _measure(folder: Path, rounds: int, until: float) -> bool:
    """Run what is not yet measured, an answer a file; whether all is."""
    from nonet.deploy.doctor import calibrate
    from nonet.workers.runtime import ensure_ray

    ensure_ray()
    if not calibration.path().exists():
        calibration.save(calibrate(lambda line: print(line, flush=True)))
    for name, roles in _asked(rounds):
        if time.monotonic() > until:
            return False
        if not (folder / f"{name}.json").exists():
            (folder / f"{name}.json").write_text(json.dumps(_run(folder, name, roles)), encoding="utf-8")
    return True


def _asked(rounds: int) -> list[tuple[str, dict[str, Any]]]:
    """Every run by name: the one to learn from, then the rounds, every other one backwards."""
    variants = [("learnt from", {})]
    for number in range(rounds):
        names = [*VARIANTS, "fused again"]
        variants += [
            (f"{n} {number}", VARIANTS.get(n, {})) for n in (names if number % 2 == 0 else names[::-1])
        ]
    return variants


def _judged(folder: Path, rounds: int) -> dict[str, Any]:
    def result(name: str) -> dict[str, Any]:
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))

    def rates(name: str) -> Rates:
        parts = [result(f"{name} {number}")["rates"] for number in range(rounds)]
        return {stage: [value for part in parts for value in part[stage]] for stage in parts[0]}

    facts = DataFacts(**result("learnt from")["facts"])
    costs = _learnt(calibration.load(), facts, result("learnt from")["rates"])
    rows = [_row(name, costs, facts, rates(name)) for name in VARIANTS]
    ratios, again = _ratios(rows), rates("fused again")
    for stage, values in rates("fused").items():
        ratios[f"A/A noise of {stage}"] = abs(_quiet(again[stage]) / _quiet(values) - 1)
    return {"rows": rows, "ratio": ratios}


def _quiet(values: list[float]) -> float:
    """The upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")[2]


def _run(folder: Path, name: str, roles: dict[str, Any]) -> dict[str, Any]:
    """Train the short quickstart with these roles: {"facts" of the data, "rates": rows/s of every chunk or step}."""
    from nonet.controller.predict import facts_of
    from nonet.controller.record import Recorder, RunFolder
    from nonet.controller.scenario import LIBRARY
    from nonet.controller.session import Session
    from nonet.controller.stages import run_stage

    run, made = RunFolder(folder / "runs" / name.replace(" ", "-").replace(",", "")), folder / "made"
    shutil.rmtree(run.path, ignore_errors=True)
    if made.exists():
        (run.path / "results").mkdir(parents=True)
        run.write_facts(json.loads((made / "tokenise.json").read_text(encoding="utf-8")))
    with Times() as taken, Session(_scenario(roles), folder=LIBRARY, run=run) as session:
        recorder = Recorder(run.path, run.id)
        rates: Rates = {}
        for stage in session.stages:
            run_stage(session, stage, recorder, lambda: False)
        recorder.close()
        facts = facts_of(session.facts["data"])
    if not made.exists():  # only a run that ended well leaves its artifacts to the others
        made.mkdir()
        (made / "tokenise.json").write_text(json.dumps(run.read_facts()), encoding="utf-8")
    for line in run.metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["name"] == "rows/s":
            rates.setdefault(record["stage"], []).append(record["value"])
    rates = {stage: values[_SKIPPED:] for stage, values in rates.items()}
    speeds = ", ".join(f"{stage} {_quiet(values):,.0f} rows/s" for stage, values in rates.items())
    print(f"{name}: {speeds} ({taken.last_s:.0f} s)", flush=True)
    return {"facts": asdict(facts), "rates": rates}


def _scenario(roles: dict[str, Any]) -> Any:
    from nonet.controller.scenario import load_scenario
    from nonet.controller.stages import Reinforced

    whole = load_scenario("quickstart", _SHORT)[0]
    stages = {name: body for name, body in whole.stages.items() if name != "finetune"}
    rl = whole.stages["rl"]
    assert isinstance(rl, Reinforced)
    one_reward = {"rewards": {"hit": rl.rewards["hit"]}}
    stages["rl"] = rl.model_copy(update=one_reward)
    quiet = {"evaluator": {"fuse": "trainer"}}  # nothing is evaluated here; fewer processes start
    return with_roles(whole.model_copy(update={"stages": stages}), {**roles, **quiet})


def _predicted(roles: dict[str, Any], facts: DataFacts, costs: Any) -> dict[str, float]:
    from nonet.controller.cluster import this_machine

    scenario = _scenario(roles)
    prediction = predict(scenario, plan(scenario, this_machine()), facts, costs)
    return {stage.stage: stage.rows_per_s for stage in prediction.stages}


def _learnt(costs: Any, facts: DataFacts, rates: Rates) -> calibration.Calibration:
    """What one run of the default placement teaches."""
    predicted = _predicted({}, facts, costs)
    kinds = {"pretrain": "supervised", "rl": "rl"}
    return costs.learned({kinds[s]: predicted[s] / _quiet(values) for s, values in rates.items()})


def _row(name: str, costs: Any, facts: DataFacts, rates: Rates) -> dict[str, Any]:
    predicted = _predicted(VARIANTS[name], facts, costs)
    row: dict[str, Any] = {"variant": name}
    for stage, values in rates.items():
        row |= {f"{stage} predicted": predicted[stage], f"{stage} measured": _quiet(values)}
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

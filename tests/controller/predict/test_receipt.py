from __future__ import annotations

import json

import pytest

from nonet.controller.cluster.view import ClusterView, Node
from nonet.controller.plan.planner import plan
from nonet.controller.predict import calibration
from nonet.controller.predict.calibration import NOMINAL
from nonet.controller.predict.prediction import DataFacts, predict
from nonet.controller.predict.receipt import make_receipt, measured_rates, receipt_text
from nonet.controller.scenario.scenario import load_scenario
from nonet.random import rng

FACTS = DataFacts(users=671, trained_events=82691, spread=1.7, targeted={"finetune": 0.48})
TOTAL = {"CPU": 2.0, "memory": 16e9}
SCENARIO = load_scenario("quickstart")[0]
PLAN = plan(SCENARIO, ClusterView((Node("n", TOTAL, dict(TOTAL)),)))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def rates(slower: float, calls: int = 20, noise: float = 0.05, seed: int = 7) -> dict[str, list[float]]:
    """Calls of a node that is so much slower than nominal."""
    found = predict(SCENARIO, PLAN, FACTS, NOMINAL)
    spread = rng(seed, "calls").uniform(1 - noise, 1 + noise, calls)
    return {stage.stage: [stage.rows_per_s / slower * float(x) for x in spread] for stage in found.stages}


def receipt(found: dict[str, list[float]]) -> dict:
    return make_receipt(SCENARIO, PLAN, FACTS, found)


def test_without_a_calibration_there_is_a_receipt_and_nothing_to_teach(cache):
    first = receipt(rates(3.0))
    assert first["stages"]["rl"]["error"] == pytest.approx(2.0, rel=0.05)
    assert not calibration.path().exists()
    assert "predicted" in receipt_text(first)


def test_the_second_runs_error_is_what_the_second_run_differs_from_the_first(cache):
    calibration.save(NOMINAL)
    first, second = (receipt(rates(3.0, seed=seed)) for seed in (1, 2))
    for stage in ("pretrain", "rl"):
        assert abs(first["stages"][stage]["error"]) > 1.8
        assert abs(second["stages"][stage]["error"]) < 0.05


def test_one_odd_run_among_three_moves_the_calibration_no_further_than_the_others_differ(cache):
    calibration.save(NOMINAL)
    for slower in (3.0, 3.1):
        receipt(rates(slower, noise=0))
    receipt(rates(12.0, noise=0))  # a neighbour took most of the node, evenly
    assert 3.0 <= calibration.load().factor("rl") <= 3.1 * (1 + 1e-9)
    assert receipt(rates(3.05, noise=0))["stages"]["rl"]["error"] == pytest.approx(0, abs=0.05)


def test_a_run_with_uneven_calls_or_too_few_or_an_absurd_error_teaches_nothing_and_says_so(cache):
    calibration.save(NOMINAL)
    before = calibration.path().read_bytes()
    for found, why in (
        (rates(3.0, noise=0.9), "differ too much"),
        (rates(3.0, calls=4), "4 calls, 5 are the least"),
        (rates(30.0), "off by 30 times"),
    ):
        told = receipt(found)
        assert why in told["stages"]["rl"]["learned"]
        assert f"not learned from rl: {told['stages']['rl']['learned']}" in receipt_text(told)
        assert calibration.path().read_bytes() == before


def test_a_stall_in_a_few_calls_changes_neither_what_was_measured_nor_what_is_learned(cache):
    calibration.save(NOMINAL)
    calm = rates(2.0, calls=21, noise=0)
    stalled = {stage: [1e-3] * 4 + values[4:] for stage, values in calm.items()}
    told = receipt(stalled)
    assert told["stages"]["rl"]["learned"] == "yes"
    assert calibration.load().factor("rl") == pytest.approx(2.0)


def test_only_the_newest_runs_count(cache):
    calibration.save(NOMINAL)
    for _ in range(9):
        receipt(rates(1.2, noise=0))
    for _ in range(7):  # the node got other memory
        receipt(rates(2.0, noise=0))
    kept = calibration.load()
    assert kept.runs == 16
    assert kept.factor("rl") == pytest.approx(2.0)
    assert all(len(errors) == 7 for errors in kept.seen.values())


def test_rates_come_from_the_runs_own_metrics_and_a_repeated_or_torn_step_counts_once(tmp_path):
    def record(step: int, value: float, name: str = "rows/s") -> str:
        return json.dumps({"stage": "rl", "step": step, "name": name, "value": value})

    lines = [record(1, 10.0), record(1, 3.0, "loss"), record(2, 20.0), '{"stage": "rl", "st', record(2, 25.0)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert measured_rates(tmp_path / "metrics.jsonl") == {"rl": [10.0, 25.0]}

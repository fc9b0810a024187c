from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nonet.controller.cluster.view import ClusterView, Node
from nonet.controller.plan.planner import plan
from nonet.controller.predict import calibration
from nonet.controller.predict.calibration import NOMINAL, LinearCost
from nonet.controller.predict.cost_model import (
    Shape,
    StepCost,
    UnitCosts,
    depth_cost,
    fit,
    history_cost,
    train_cost,
)
from nonet.controller.predict.plan_search import with_roles, with_staleness
from nonet.controller.predict.prediction import DataFacts, predict
from nonet.controller.scenario.scenario import load_scenario
from nonet.errors import ConfigError

FACTS = DataFacts(users=671, trained_events=82691, spread=1.7, targeted={"finetune": 0.48})


def machine(cores: float) -> ClusterView:
    total = {"CPU": cores, "memory": 32e9}
    return ClusterView((Node("n", total, dict(total)),))


def predicted(cores: float = 2.0, costs=NOMINAL, staleness: int = 0, **roles):
    scenario = with_staleness(with_roles(load_scenario("quickstart")[0], roles), staleness)
    found = predict(scenario, plan(scenario, machine(cores)), FACTS, costs)
    return {stage.stage: stage for stage in found.stages}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_flops_are_those_that_torch_counts():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from nonet.deploy.doctor.reference_steps import probe_batch, probe_model

    model, _, _, sids = probe_model(64, 2)
    batch, rows = probe_batch(sids, 4, 30)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        state = model.states(batch, rows)
    counted = counter.get_total_flops()  # the fused attention kernel is not among them, nor in the work
    sparse = 2 * (4 * 30 + 4) * 32 * 64
    assert history_cost(Shape(64, 2, 3, 64), 4 * 31).flops + sparse == counted
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        position, cuts = torch.arange(120)[:, None], torch.tensor([0, len(state)])
        list(model.depth.teacher_forced_logits(state, cuts, position, batch.sid, [torch.arange(120)] * 3))
    assert depth_cost(Shape(64, 2, 3, 64), 120, 120).flops == pytest.approx(
        counter.get_total_flops(), rel=0.05
    )


def test_rates_are_found_again_and_never_negative():
    true = UnitCosts(1e-3, 2e-4, 3e-11, 2e-10)
    shapes = [(64, 3, 800), (64, 1, 800), (64, 3, 200), (128, 2, 400), (32, 3, 800), (32, 5, 100)]
    works = [train_cost(Shape(width, layers, 3, 64), t, t, 3) for width, layers, t in shapes]
    found = fit([(work, true.seconds(work)) for work in works])
    assert found.columns() == pytest.approx(true.columns(), rel=1e-3)
    assert min(fit([(StepCost(1, 3, 1e9, 1e8), 0.1), (StepCost(1, 3, 2e9, 1e8), 0.05)]).columns()) >= 0


def test_more_trainers_on_enough_cores_are_faster_and_on_one_core_are_not():
    one, two = predicted(2.0)["rl"], predicted(2.0, trainer={"workers": 2})["rl"]
    assert two.rows_per_s > 1.3 * one.rows_per_s
    crowded = predicted(1.0, trainer={"workers": 2})["rl"]
    assert crowded.rows_per_s < predicted(1.0)["rl"].rows_per_s


def test_what_is_apart_pays_for_its_wire_and_says_how_much():
    fused, apart = predicted()["pretrain"], predicted(embedding={"workers": 1})["pretrain"]
    assert "exchange" not in fused.parts
    assert apart.step_s - fused.step_s == pytest.approx(apart.parts["exchange"])
    assert apart.bytes_a_step > fused.bytes_a_step == 0
    assert 0 < apart.idle["embedding"] < 1
    rl = predicted(rollout={"workers": 1})["rl"]
    assert rl.parts["publish"] > predicted()["rl"].parts["publish"]
    assert rl.idle["rollout"] + rl.parts["rollout"] / rl.step_s == pytest.approx(1)


def test_staleness_hides_the_shorter_side_of_a_step_where_there_are_cores_and_nothing_where_not():
    apart = with_roles(load_scenario("quickstart")[0], {"rollout": {"workers": 1}})

    def rl(threads: int, staleness: int):
        scenario = with_staleness(apart, staleness)
        return predict(scenario, plan(scenario, machine(8.0), threads=threads), FACTS, NOMINAL).stages[-1]

    assert rl(1, 0).hidden_s == 0
    assert rl(8, 1).hidden_s == 0, "both sides want all eight cores"
    found = rl(1, 1)
    before = found.parts["rollout"] + found.parts["reward"]
    after = sum(found.parts.get(part, 0.0) for part in ("update", "lookup", "exchange", "reduce"))
    assert found.hidden_s == pytest.approx(min(before, after) * (2 - NOMINAL.slowdown("decode", 2, 2, 8)))
    assert found.step_s == pytest.approx(sum(found.parts.values()) - found.hidden_s)
    with pytest.raises(ConfigError, match="wants a rollout with weights of its own"):
        predicted(2.0, staleness=1)


def test_two_busy_ranks_pay_what_crowding_costs_and_threads_beyond_the_cores_wait():
    def costs(*points):
        return replace(NOMINAL, crowded={"update": points})

    crowded = costs((2.0, 1.5))
    assert crowded.slowdown("update", 1, 2, 2) == 1
    assert crowded.slowdown("update", 2, 2, 2) == 1.5
    assert crowded.slowdown("update", 3, 3, 2) == pytest.approx(1.5 * 1.5)
    assert crowded.slowdown("update", 2, 2, 1) == 2, "on one core nobody computes beside another"
    assert crowded.slowdown("decode", 2, 2, 2) == 1, "not measured"
    assert costs((2.0, 1.1), (8.0, 1.7)).slowdown("update", 5, 5, 8) == pytest.approx(1.4)
    two = {"trainer": {"workers": 2}}
    update = [predicted(2.0, c, **two)["rl"].parts["update"] for c in (costs((2.0, 1.0)), crowded)]
    assert update[1] == pytest.approx(1.5 * update[0])


def test_threads_that_cost_more_than_they_bring_make_a_stage_slower():
    threads = {"train": ((2.0, 0.8),), "update": ((2.0, 1.0),), "decode": ((2.0, 1.25),)}
    costs = replace(NOMINAL, threads=threads)
    assert costs.speed("train", 1) == 1
    assert costs.speed("train", 8) == 0.8, "beyond what was measured, as the last"
    assert costs.speed("decode", 1.5) == pytest.approx(1.125)
    scenario = with_roles(load_scenario("quickstart")[0], {"evaluator": {"fuse": "trainer"}})
    one, two = (
        {
            s.stage: s.parts
            for s in predict(scenario, plan(scenario, machine(2.0), threads=n), FACTS, costs).stages
        }
        for n in (1, 2)
    )
    assert two["pretrain"]["compute"] == pytest.approx(one["pretrain"]["compute"] / 0.8)
    assert two["rl"]["update"] == pytest.approx(one["rl"]["update"])
    assert two["rl"]["rollout"] == pytest.approx(one["rl"]["rollout"] / 1.25)


def test_rows_on_several_ranks_are_read_by_all_to_all_in_rl_as_well():
    assert "exchange" not in predicted()["rl"].parts
    two = predicted(trainer={"workers": 2})["rl"]
    dear = replace(NOMINAL, exchange=LinearCost(0.1, 0.0))
    assert predicted(costs=dear, trainer={"workers": 2})["rl"].parts["exchange"] == pytest.approx(0.1)
    assert 0 < two.parts["exchange"] < 0.1


def test_evaluating_beside_the_trainer_costs_less_than_in_its_process_and_least_on_cores_to_spare():
    asked = DataFacts(671, 82691, 1.7, items=3496, asked=4026)

    def whole(cores: float, **roles) -> float:
        scenario = with_roles(load_scenario("quickstart")[0], roles)
        return predict(scenario, plan(scenario, machine(cores), threads=1), asked, NOMINAL).evaluate_s

    fused = {"evaluator": {"fuse": "trainer"}}
    assert whole(2.0) < whole(1.0, **fused) == whole(2.0, **fused)
    assert whole(2.0) == pytest.approx(whole(2.0, **fused) / 3)
    assert whole(2.0) < whole(2.0, trainer={"workers": 2}) < whole(2.0, **fused)


def test_rows_and_steps_are_those_the_run_will_have():
    found = predicted()
    assert (found["pretrain"].steps, found["pretrain"].rows) == (840, 826910)
    assert (
        found["finetune"].rows == round(0.48 * 82691 * 2 + 1e-9)
        or abs(found["finetune"].rows - 0.96 * 82691) <= 1
    )
    assert (found["rl"].steps, found["rl"].rows) == (60, 3840)
    assert all(stage.memory_bytes > 0 for stage in found.values())


def test_what_the_model_does_not_cover_is_said_instead_of_guessed():
    from nonet.controller.cluster.view import read_view

    big = Path(__file__).parents[3] / "examples" / "clusters" / "64x8.yaml"
    scenario = load_scenario("nightly-feed")[0]
    with pytest.raises(ConfigError, match="no prediction for model hf"):
        predict(scenario, plan(scenario, read_view(big)), FACTS, NOMINAL)
    for change in ("model.block: hstu", "model.depth: attention"):
        scenario = load_scenario("quickstart", [change.replace(": ", "=")])[0]
        with pytest.raises(ConfigError, match=f"no prediction for {change}"):
            predict(scenario, plan(scenario, machine(2.0)), FACTS, NOMINAL)


def test_a_calibration_is_kept_read_and_refused_when_it_is_none(cache):
    assert calibration.load() is NOMINAL
    calibration.save(NOMINAL.learned({"rl": 2.0}))
    assert calibration.load().factor("rl") == pytest.approx(2.0)
    assert calibration.load().crowded == NOMINAL.crowded
    calibration.path().write_text(json.dumps({"format": 0}))
    with pytest.raises(ConfigError, match="doctor --calibrate"):
        calibration.load()

from __future__ import annotations

from pathlib import Path

import pytest

from nonet.controller.cluster.view import ClusterView, Node, read_view
from nonet.controller.plan.planner import plan
from nonet.controller.scenario.scenario import load_scenario

BIG = Path(__file__).parents[3] / "examples" / "clusters" / "64x8.yaml"


def work(*changes: str) -> dict:
    made = plan(load_scenario("nightly-feed", list(changes))[0], read_view(BIG))
    return {stage.name: stage for stage in made.work}


def test_a_step_of_pretraining_is_six_flops_a_parameter_and_token():
    pretrain = work()["pretrain"]
    assert pretrain.steps == 20_000
    (trainer,) = pretrain.flops
    assert (trainer.group, trainer.resource, trainer.devices) == ("trainer", "GPU", 32)
    assert trainer.count == pytest.approx(6 * 0.596e9 * 2e6)


def test_weights_cross_once_a_rollout_worker_and_not_at_all_where_they_are_shared():
    moves = {what: count for what, count, _ in work()["rl"].moves}
    assert moves["dense weights"] == pytest.approx(64 * 2 * 0.596e9)
    assert moves["dense gradients"] == pytest.approx(31 * 2 * 2 * 0.596e9)
    fused = work(
        "roles={trainer: {pool: gpu, workers: 32}}", "stages.rl.users=256", "stages.rl.rollout.staleness=0"
    )["rl"]
    assert "dense weights" not in {what for what, _, _ in fused.moves}
    assert len(fused.flops) == 1


def test_a_stage_with_groups_of_its_own_is_counted_on_those():
    found = work("stages.rl.roles={trainer: {pool: gpu, workers: 64}}")
    assert found["pretrain"].flops[0].devices == 32
    assert found["rl"].flops[0].devices == 64


def test_a_plan_on_cpu_says_nothing_of_devices():
    total = {"CPU": 2.0, "memory": 16e9}
    text = plan(load_scenario("quickstart")[0], ClusterView((Node("n", total, dict(total)),))).format_text()
    assert "TFLOP" not in text
    assert "Ascend" not in text


def test_a_plan_says_what_its_memory_leaves_out():
    notes = plan(load_scenario("nightly-feed")[0], read_view(BIG)).notes
    copied = load_scenario("nightly-feed", ["sparse.replica_bytes=4TB"])[0]
    assert any(
        "1.5 TB, 8 of them on npu-00, which has 1 TB" in note for note in plan(copied, read_view(BIG)).notes
    )
    assert any("4 kept checkpoints take 6.03 TB" in note for note in notes)
    assert any("what rl.reward.ctr keep on their devices" in note for note in notes)

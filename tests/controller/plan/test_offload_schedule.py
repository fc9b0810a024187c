from __future__ import annotations

import pytest
from views import RL, gpu_nodes, scenario

from nonet.controller.cluster.view import ClusterView, Node
from nonet.controller.plan.offload_schedule import OffloadMove, OffloadSchedule, list_phases
from nonet.controller.plan.planner import plan
from nonet.errors import PlacementError

QWEN = {"use": "hf", "path": "s3://models/Qwen3-0.6B", "precision": "bf16"}
TOGETHER = {"trainer": {"pool": "gpu"}, "rollout": {"collocate": "trainer"}}


def made(gigabytes: int):
    grpo = {"algorithm": {"use": "grpo"}, "rollout": {"use": "beam", "width": 16}}
    stages = {"pretrain": {"epochs": 1}, "rl": {**RL, "users": 64, **grpo}}
    return plan(
        scenario(model=QWEN, roles=TOGETHER, stages=stages), gpu_nodes(1, memory_bytes=gigabytes * 10**9)
    ).ledger


def test_groups_that_fit_together_never_move():
    ledger = made(80)
    turns = OffloadSchedule(ledger, "trainer")
    assert [turns.enter(*at) for at in list_phases(ledger, "trainer")] == [[], [], [], [], []]


def test_groups_that_take_turns_are_offloaded_before_the_other_comes_back():
    ledger = made(16)
    turns = OffloadSchedule(ledger, "trainer")
    moves = {at: turns.enter(*at) for at in list_phases(ledger, "trainer")}
    assert moves["rl", "rollout"] == [OffloadMove("trainer", "offload"), OffloadMove("rollout", "resume")]
    back = [move for found in moves.values() for move in found if move == OffloadMove("trainer", "resume")]
    assert back, "the trainer comes back for its update"
    for found in moves.values():
        assert [move.what for move in found] == sorted(move.what for move in found)
    for at in list_phases(ledger, "trainer"):
        turns.enter(*at)
        line = next(line for line in ledger.lines if (line.stage, line.phase, line.place) == (*at, "trainer"))
        assert line.needed <= int(0.92 * 16e9)
        assert turns.offloaded == set(line.offloaded)


def test_a_phase_the_ledger_does_not_know_is_refused():
    with pytest.raises(PlacementError, match="no phase rl/dance; it has pretrain/train, rl/rollout"):
        OffloadSchedule(made(16), "trainer").enter("rl", "dance")


# Bytes of the ring's decoder: 16 wide, one layer; 1.08 MB of weights, of which 1.05 are the depth decoder's hash.
DECODER = {
    "model": {"use": "sid_decoder", "width": 16, "layers": 1, "heads": 2},
    "data": {"interactions": "x.parquet", "history": 8},
    "tokenizer": {"use": "rq_kmeans", "levels": 2, "codes": 6},
    "sparse": {"tables": {"item": {"dim": 8}, "user": {"dim": 8}}},
    "stages": {
        "pretrain": {"epochs": 1, "batch": {"users": 10}},
        "rl": {**RL, "algorithm": {"use": "grpo"}, "rollout": {"use": "beam", "width": 4}},
    },
}


def on_cpu(memory: str, roles: dict):
    pools = {"small": {"memory": memory}, "cpu": {}}
    return plan(scenario(**DECODER, pools=pools, roles=roles), cpu_node())


def cpu_node() -> ClusterView:
    total = {"CPU": 4.0, "memory": 16e9}
    return ClusterView((Node("n", total, dict(total)),))


COLLOCATED = {"trainer": {"pool": "small"}, "rollout": {"collocate": "trainer"}}


def test_a_pool_that_says_its_memory_makes_a_bundle_on_cpu_a_device():
    assert not on_cpu("20MB", COLLOCATED).ledger.list_offloading_lines()
    ledger = on_cpu("6.2MB", COLLOCATED).ledger
    turns = OffloadSchedule(ledger, "trainer")
    moves = {at: [(m.unit, m.what) for m in turns.enter(*at)] for at in list_phases(ledger, "trainer")}
    assert moves["rl", "rollout"] == [("trainer", "offload")]
    assert moves["rl", "update"] == [("rollout", "offload"), ("trainer", "resume")]
    assert all(line.counted <= line.capacity for line in ledger.lines)


def test_of_a_trainer_fused_with_the_rollout_only_what_it_alone_holds_is_offloaded(monkeypatch):
    ledger = on_cpu("6.15MB", {"trainer": {"pool": "small"}}).ledger
    assert not ledger.list_offloading_lines(), "fused they share one model"
    monkeypatch.setattr(
        "nonet.controller.plan.memory._estimate_beam_bytes", lambda *_: 2.5e6
    )  # of one prompt: no chunk is smaller
    ledger = on_cpu("7.2MB", {"trainer": {"pool": "small"}}).ledger
    turns = OffloadSchedule(ledger, "trainer")
    moves = {at: [(m.unit, m.what) for m in turns.enter(*at)] for at in list_phases(ledger, "trainer")}
    assert moves["rl", "rollout"] == [("trainer/trainer", "offload")]
    assert moves["rl", "score"] == [("trainer/trainer", "resume")], "without beams all of it fits"


def test_a_bundle_that_cannot_hold_one_of_its_groups_is_refused_with_its_numbers():
    with pytest.raises(
        PlacementError, match=r"each bundle of group 'trainer' would hold .* Raise pools.X.memory"
    ):
        on_cpu("4MB", COLLOCATED)


def test_a_group_made_anew_is_resident():
    ledger = on_cpu("6.2MB", COLLOCATED).ledger
    turns = OffloadSchedule(ledger, "trainer")
    turns.enter("rl", "update")
    assert turns.offloaded == {"rollout"}
    turns.mark_resident("rollout")
    assert turns.offloaded == set()


def test_work_that_the_ledger_did_not_account_for_brings_everybody_back():
    turns = OffloadSchedule(on_cpu("6.2MB", COLLOCATED).ledger, "trainer")
    turns.enter("rl", "rollout")
    assert turns.leave() == [OffloadMove("trainer", "resume")]
    assert turns.leave() == []

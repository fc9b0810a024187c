from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from views import RL, gpu_nodes, scenario

from nonet.controller.plan import plan
from nonet.controller.turns import Move, Turns, pairs
from nonet.errors import PlacementError

QWEN = {"use": "hf", "path": "s3://models/Qwen3-0.6B", "precision": "bf16"}
TOGETHER = {"trainer": {"pool": "gpu"}, "rollout": {"collocate": "trainer"}}


def made(gigabytes: int):
    stages = {"pretrain": {"epochs": 1}, "rl": {**RL, "users": 64, "rollout": {"use": "beam", "width": 16}}}
    return plan(
        scenario(model=QWEN, roles=TOGETHER, stages=stages), gpu_nodes(1, memory_bytes=gigabytes * 10**9)
    ).ledger


def test_groups_that_fit_together_never_move():
    ledger = made(80)
    turns = Turns(ledger, "trainer")
    assert [turns.enter(*at) for at in pairs(ledger, "trainer")] == [[], [], [], [], []]


def test_groups_that_take_turns_are_offloaded_before_the_other_comes_back():
    ledger = made(16)
    turns = Turns(ledger, "trainer")
    moves = {at: turns.enter(*at) for at in pairs(ledger, "trainer")}
    assert moves["rl", "rollout"] == [Move("trainer", "offload"), Move("rollout", "resume")]
    back = [move for found in moves.values() for move in found if move == Move("trainer", "resume")]
    assert back, "the trainer comes back for its update"
    for found in moves.values():
        assert [move.what for move in found] == sorted(move.what for move in found)
    for at in pairs(ledger, "trainer"):
        turns.enter(*at)
        assert turns.bytes_after(*at) <= int(0.92 * 16e9)
        line = next(line for line in ledger.lines if (line.stage, line.phase, line.place) == (*at, "trainer"))
        assert turns.offloaded == set(line.offloaded)


def test_a_phase_the_ledger_does_not_know_is_refused():
    with pytest.raises(PlacementError, match="no phase rl/dance; it has pretrain/train, rl/rollout"):
        Turns(made(16), "trainer").enter("rl", "dance")

"""How far rollout and trainer are apart, as trainers measure it: under the same weights, by version, and when it stops a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ring_world import Ring, scores_of

from nonet.errors import DataError
from nonet.workers.roles import RolloutRequest, UpdateRequest

MEASURED = "stages.rl.mismatch={correct: sequence_truncate, cap: 3.0}"
FAST = "stages.rl.lr=3e-3"


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


def begun(ring, *changes: str):
    """Make a world at the start of RL, and its first beams with their version."""
    world = ring.world(FAST, *changes)
    world.train("pretrain", 0, 6)
    world.trainer.begin(world.stages["rl"])
    return world, world.beams()


def updated(world, beams, step=0, version=None):
    return world.trainer.update(
        UpdateRequest(world.stages["rl"], step, version=version), beams, scores_of(beams)
    )


def test_rollout_and_trainer_of_one_precision_agree(ring):
    world, beams = begun(ring, MEASURED)
    record = updated(world, beams)
    assert record["mismatch/kl"] < 1e-9  # fp32 sums in another order
    assert record["mismatch/ratio p99"] < 1.0001
    assert record["mismatch/stopped"] == 0.0


def test_a_rollout_in_bf16_is_apart_and_says_by_how_much(ring):
    world, _ = begun(ring, MEASURED)
    users, positions = world.rollout.lease("rl", 0, world.stages["rl"].users)
    how = {"stage": "rl", "step": 0, "width": 4, "version": 1}
    beams = world.rollout.generate(
        users, positions, RolloutRequest(**how, draw={"use": "beam", "precision": "bf16"})
    )
    record = updated(world, beams)
    assert beams["logp"].dtype == np.float32
    assert 1e-9 < record["mismatch/kl"] < 0.05
    assert record["mismatch/ratio p99"] > 1.0001


def test_measuring_alone_changes_no_bit_of_a_step(ring):
    plain, beams = begun(ring)
    measured, same = begun(ring, "stages.rl.mismatch={correct: none}")
    updated(plain, beams)
    updated(measured, same)
    assert torch.equal(plain.weights(), measured.weights())


def test_old_beams_are_compared_with_the_weights_that_made_them(ring):
    changes = MEASURED, "stages.rl.rollout.staleness=1"
    world, beams = begun(ring, *changes)
    updated(world, beams, 0, 1)
    record = updated(world, beams, 1, 2)  # made under version 1, learned from under version 2
    assert record["mismatch/kl"] < 1e-9
    assert record["ratio"] != 1.0  # the policy has moved since


def test_old_beams_are_compared_with_the_sparse_rows_that_made_them(ring):
    world, beams = begun(ring, MEASURED, "stages.rl.rollout.staleness=1", "stages.rl.sparse_lr=0.5")
    updated(world, beams, 0, 1)
    record = updated(world, beams, 1, 2)
    assert record["mismatch/kl"] < 1e-9  # with the rows of version 2 it is above 1e-5


def test_a_step_too_far_apart_is_not_learned_from_and_three_in_a_row_end_the_run(ring):
    world, beams = begun(ring, "stages.rl.mismatch={stop_at_kl: 0.001}")
    beams["logp"] = beams["logp"] - 0.5
    before = world.weights()
    record = updated(world, beams)
    assert record["mismatch/stopped"] == 1.0
    assert torch.equal(before, world.weights())
    updated(world, beams, 1)
    with pytest.raises(DataError, match="3 successive steps"):
        updated(world, beams, 2)

"""Rollouts know the prompts of a step: ranks take shares of them that are those a controller would cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ring_world import Ring

from nonet.workers.roles import RolloutRequest


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_answer_the_prompts_of_the_step_between_them_once_each(ring, ranks):
    world = ring.world()
    whole = world.beams(step=2)
    parts = []
    for rank in range(ranks):
        world.rollout.place = replace(world.rollout.place, rank=rank, world=ranks)
        parts.append(
            world.rollout.generate_step(world.stages["rl"].users, RolloutRequest("rl", 2, 4, world._version))
        )
    for name in ("user", "position", "sid", "valid"):
        assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])
    np.testing.assert_allclose(np.concatenate([part["logp"] for part in parts]), whole["logp"], rtol=1e-5)

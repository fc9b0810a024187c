"""Candidates that are re-ranked by rewards, and supervised stages that leave the sparse rows alone; without Ray."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ring_world import Ring

from nonet.models.ranking import MISSED
from nonet.workers.roles import RolloutRequest


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture
def world(ring):
    made = ring.world()
    made.train("pretrain", 0, 6)
    made.rollout.apply(1)
    return made


def candidates(world, width=12, blind=True):
    users, positions = world.rollout.lease("rl", 0, 8)
    how = {"stage": "rl", "step": 0, "width": width, "version": 1, "blind": blind}
    return world.rollout.generate(users, positions, RolloutRequest(**how))


def rerank(world, beams, scores, multiplier):
    weights = {name: np.ones(len(beams["user"])) for name in scores}
    return world.rollout.rerank(beams, scores, weights, multiplier=multiplier, width=4)


def test_candidates_do_not_say_what_their_user_took_next_and_lists_do(world):
    blind, seeing = candidates(world), candidates(world, blind=False)
    assert not len(blind["target"].values)
    assert len(blind["target"].offsets) == 9
    lists = rerank(world, blind, {"own": np.zeros(blind["valid"].shape)}, 1.0)
    np.testing.assert_array_equal(lists["target"].values, seeing["target"].values)


def test_a_multiplier_of_zero_keeps_the_order_and_a_large_one_is_the_order_of_the_rewards(world):
    beams = candidates(world)
    score = np.random.default_rng(0).random(beams["valid"].shape)
    plain = rerank(world, beams, {"own": score}, 0.0)
    np.testing.assert_array_equal(plain["item"], beams["item"][:, :4])
    lists = rerank(world, beams, {"own": score}, 1e6)
    order = np.argsort(-np.where(beams["valid"], score, -1), axis=1)[:, :4]
    np.testing.assert_array_equal(lists["item"], np.take_along_axis(beams["item"], order, 1))
    np.testing.assert_array_equal(lists["logp"], np.take_along_axis(beams["logp"], order[..., None], 1))


def test_a_prompt_without_a_score_keeps_its_order(world):
    beams = candidates(world)
    score = np.full(beams["valid"].shape, np.nan)
    np.testing.assert_array_equal(rerank(world, beams, {"own": score}, 5.0)["item"], beams["item"][:, :4])


def test_the_place_of_what_was_taken_is_found_or_missed(world):
    lists = rerank(world, candidates(world), {}, 0.0)
    place = world.rollout.find_target_ranks(lists)
    taken = np.asarray(lists["target"].values)
    for row, (at, item) in enumerate(zip(place, taken, strict=True)):
        found = np.flatnonzero(lists["item_id"][row] == item)
        assert at == (found[0] if len(found) else MISSED)


def test_a_stage_with_frozen_rows_moves_the_dense_model_alone_and_makes_no_rows(world):
    before, weights = world.states(), world.weights()
    stage = replace(world.stages["finetune"], frozen_rows=True, rl_targets=True, target=None)
    world.trainer.begin(stage)
    world.trainer.train(stage, 0, 2)
    assert world.states() == before
    assert not np.array_equal(world.weights().numpy(), weights.numpy())


def test_spreads_are_those_within_the_valid_candidates_of_each_prompt(world):
    beams = dict(candidates(world))
    beams["valid"] = beams["valid"].copy()
    beams["valid"][:, -1] = False
    score = np.random.default_rng(1).random(beams["valid"].shape)
    weights = {"own": np.full(len(score), 2.0)}
    found = world.rollout.sum_spreads(beams, {"own": score}, weights)
    logp = beams["logp"].sum(-1)[:, :-1]
    np.testing.assert_allclose(found, [logp.std(1).sum(), 2 * score[:, :-1].std(1).sum()], rtol=1e-5)

"""Scenes of an RL stage: a column of the events chooses what may be recommended, what rewards count, and how metrics are told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ring_world import Ring, scores_of

from nonet.errors import ConfigError
from nonet.models.generation.beams import SubCatalogue, search_beams
from nonet.samples.batches.prompt_rows import gather_masked_items, locate_events
from nonet.types import Jagged
from nonet.workers.roles import RolloutRequest, UpdateRequest

SCENES = (
    "stages.rl.scenes={column: rating, of: {'3': {catalogue: 'item_id < 1020', weights: {own: 0.0}}, "
    "'5': {catalogue: \"item_id >= 1020\", rewards: [own]}}}"
)


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def world(ring):
    world = ring.world(SCENES, "stages.rl.users=48")
    world.train("pretrain", 0, 6)
    return world


def ratings(world, beams):
    """Of the events that were asked about."""
    seq = world.trainer.corpus.seq
    return seq.columns["rating"][locate_events(seq, beams["user"], beams["position"])]


def test_a_scene_is_the_value_of_its_column_at_the_event_that_is_asked_about(world):
    beams = world.beams()
    rating = ratings(world, beams)
    assert beams["scene"].tolist() == [{3.0: 0, 5.0: 1}.get(value, 2) for value in rating]
    assert set(beams["scene"].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("use", ["beam", "gumbel", "sample"])
def test_a_scene_is_given_items_of_its_own_catalogue_alone(world, use):
    users, positions = world.rollout.lease("rl", 0, 48)
    world.beams()
    how = {"stage": "rl", "step": 0, "width": 6, "version": world._version}
    beams = world.rollout.generate(users, positions, RolloutRequest(**how, draw={"use": use}))
    item, valid, scene = beams["item_id"], beams["valid"], beams["scene"]
    assert valid.any(1).all()
    assert (item[scene == 0][valid[scene == 0]] < 1020).all()
    assert (item[scene == 1][valid[scene == 1]] >= 1020).all()
    others = item[scene == 2][valid[scene == 2]]
    assert (others < 1020).any()
    assert (others >= 1020).any()


def test_a_sub_catalogue_beam_is_the_best_of_an_exhaustive_list(world):
    asked = world.rollout._recommender
    users, positions = world.rollout.lease("rl", 0, 48)
    trie, seq = asked.corpus.trie, asked.corpus.seq
    batch = asked.batch(users, positions)
    allowed = np.arange(40)[None] % 3 > 0
    within = SubCatalogue(trie, allowed)
    scores = asked.score_catalogue(batch, users, positions).double()
    hidden = gather_masked_items(seq, users, positions)
    found = search_beams(world.trainer.model, asked.prefill(batch), trie, 40, forbidden=hidden, within=within)
    for user in range(len(users)):
        there = [item for item in range(40) if allowed[0, item] and item not in set(hidden[user].tolist())]
        got = found.item[user][found.valid[user]].tolist()
        assert sorted(got) == there
        assert torch.allclose(
            found.logp[user][found.valid[user]].sum(-1).double(), scores[user][got], atol=1e-4
        )  # sums of fp32 levels


def test_no_item_left_means_no_valid_beam(world):
    asked = world.rollout._recommender
    users, positions = world.rollout.lease("rl", 0, 4)
    only = SubCatalogue(asked.corpus.trie, np.arange(40)[None] == 7)
    all_hidden = Jagged(np.full(4, 7), np.arange(5))
    batch = asked.batch(users, positions)
    cache = asked.prefill(batch)
    assert not search_beams(
        world.trainer.model, cache, asked.corpus.trie, 3, forbidden=all_hidden, within=only
    ).valid.any()
    found = search_beams(world.trainer.model, cache, asked.corpus.trie, 3, within=only)
    assert found.item.tolist() == [[7, -1, -1]] * 4


def test_rewards_count_what_their_scene_says_and_metrics_are_told_by_scene(ring, world):
    world.trainer.begin(world.stages["rl"])
    beams = world.beams()
    scores = scores_of(beams)
    record = world.trainer.update(UpdateRequest(world.stages["rl"], 0), beams, scores)
    mean = {name: np.where(beams["valid"], score, 0).mean(1) for name, score in scores.items()}
    weights = {0: (1.0, 0.0), 1: (0.0, 0.5), 2: (1.0, 0.5)}
    total = 0.0
    for index, title in enumerate(("3", "5", "others")):
        rows = beams["scene"] == index
        hit, own = mean["hit"][rows], mean["own"][rows]
        reward = weights[index][0] * hit + weights[index][1] * own
        assert record[f"scene.{title}.prompts"] == rows.sum()
        assert record[f"scene.{title}.reward.own"] == pytest.approx(own.mean())
        assert record[f"scene.{title}.reward"] == pytest.approx(reward.mean())
        total += reward.sum()
    assert record["reward"] == pytest.approx(total / len(beams["scene"]))


def test_a_scene_without_a_reward_learns_nothing_from_it(ring):
    """Scores of `own` alone move nothing in the scene that weighs it 0."""
    world = ring.world(
        "stages.rl.scenes={column: rating, of: {'3': {weights: {own: 0.0, hit: 0.0}}}}", "stages.rl.lr=3e-3"
    )
    world.trainer.begin(world.stages["rl"])
    users, positions = world.rollout.lease("rl", 0, 8)
    seq = world.trainer.corpus.seq
    third = seq.columns["rating"][locate_events(seq, users, positions)] == 3
    world.beams()
    how = {"stage": "rl", "step": 0, "width": 4, "version": world._version}
    beams = world.rollout.generate(users[third], positions[third], RolloutRequest(**how))
    before = world.weights()
    record = world.trainer.update(UpdateRequest(world.stages["rl"], 0), beams, scores_of(beams))
    assert record["norm"] < 1e-6
    assert float((world.weights() - before).abs().max()) < 1e-2  # weight decay alone


def test_a_catalogue_that_holds_nothing_and_a_column_that_is_not_there_are_told(ring):
    world = ring.world("stages.rl.rollout={catalogue: 'item_id < 0'}")
    with pytest.raises(ConfigError, match="holds for none of the 40 items"):
        world.beams()
    world = ring.world("stages.rl.scenes={column: surface, of: {home: {}}}")
    with pytest.raises(ConfigError, match="events have no 'surface'; they have event, rating"):
        world.beams()

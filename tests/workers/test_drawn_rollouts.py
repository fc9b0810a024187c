"""Groups that are drawn from the policy, without Ray: legal, allowed, and weighed so that their sums are its expectation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ring_world import Ring

from nonet.models.generation.memory import MEMORY_WEIGHTS
from nonet.random import rng
from nonet.rl import from_wire, to_wire
from nonet.rl.policy import ItemSampler, compute_catalogue_log_prob
from nonet.samples.batches import gather_masked_items
from nonet.workers.roles import RolloutRequest

KINDS = [
    {"use": "sample"},
    {"use": "sample", "with_target": True},
    {"use": "gumbel"},
    {"use": "gumbel", "with_target": True},
    {"use": "beam", "tail": 2},
    {"use": "beam", "tail": 2, "with_target": True},
]
NAMES = [" ".join(map(str, kind.values())) for kind in KINDS]
PROMPTS, WIDTH, TIMES = 6, 5, 300


@pytest.fixture(scope="module", params=["off", "on"], ids=["model", "memory"])
def world(request, tmp_path_factory):
    """Make a trained model that masks what was seen, with and without a memory."""
    ring = Ring(tmp_path_factory.mktemp("ring"))
    made = ring.world(f"model.memory={request.param}", "data.repeats=mask")
    made.train("pretrain", 0, 3)
    if request.param == "on":
        getattr(made.trainer.model, MEMORY_WEIGHTS).copy_(torch.tensor([0.4, 0.5, 1.0]))
    made.rollout.apply(1)
    return made


def asked(world, options, width=WIDTH, step=0, chunk=None, times=1):
    users, positions = world.rollout.lease("rl", 0, PROMPTS)
    how = {"stage": "rl", "step": step, "width": width, "version": 1, "chunk": chunk}
    request = RolloutRequest(**how, draw=options)
    return world.rollout.generate(np.repeat(users, times), np.repeat(positions, times), request)


def policy(world):
    """Chance [U, I] of every item that is not masked, and the prompts."""
    users, positions = world.rollout.lease("rl", 0, PROMPTS)
    recommender = world.rollout._recommender
    batch = recommender.batch(users, positions)
    votes = recommender.compute_votes(users, positions)
    logp = compute_catalogue_log_prob(
        recommender.model, recommender.prefill(batch), recommender.corpus.trie, votes
    )
    chance = logp.double().exp().numpy()
    hidden = gather_masked_items(recommender.corpus.seq, users, positions)
    for user in range(PROMPTS):
        chance[user, hidden[user]] = 0
    return chance / chance.sum(1, keepdims=True), logp.numpy(), users, positions


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_drawn_items_are_allowed_and_their_log_probabilities_are_the_policy_s(world, kind):
    chance, logp, users, positions = policy(world)
    corpus = world.trainer.corpus
    beams = asked(world, kind)
    there = beams["valid"]
    assert there.all()
    row = np.nonzero(there)[0]
    assert (np.take_along_axis(chance, beams["item"], 1) > 0).all()
    assert beams["logp"].sum(-1)[there] == pytest.approx(logp[row, beams["item"][there]], abs=1e-4)
    assert np.array_equal(beams["sid"][there], corpus.sids[beams["item"][there]])
    if kind["use"] != "sample" and not kind.get("tail"):
        assert all(len(set(items)) == WIDTH for items in beams["item"])
    if kind.get("with_target"):
        target = corpus.seq.item[corpus.seq.offsets[users] + positions]
        assert (beams["item"] == target[:, None]).sum(1).min() == 1
        assert (beams["chance"][beams["item"] == target[:, None]] == 1).all()


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_weighted_sums_are_the_policy_s_expectation(world, kind):
    chance, _, *prompts = policy(world)
    value = np.random.default_rng(4).standard_normal(chance.shape) + 1
    exact = (chance * value).sum(1)
    users, positions = (np.repeat(each, TIMES) for each in prompts)
    recommender = world.rollout._recommender
    noise = [rng(9, row) for row in range(len(users))]
    drawing = ItemSampler(recommender, recommender.batch(users, positions), users, positions, noise)
    beams = drawing.draw_items(WIDTH, kind)
    found = np.take_along_axis(np.repeat(value, TIMES, 0), beams.item.clamp_min(0).numpy(), 1)
    sums = (beams.weight.numpy() * found).sum(1).reshape(PROMPTS, TIMES).T
    error = sums.std(0) / np.sqrt(len(sums))
    assert (np.abs(sums.mean(0) - exact) < 4 * error + 1e-3).all()


def test_draws_are_those_of_a_prompt_whatever_the_chunk_and_others_a_step_later(world):
    for kind in KINDS:
        whole, cut = asked(world, kind), asked(world, kind, chunk=2)
        assert np.array_equal(whole["item"], cut["item"])
        np.testing.assert_allclose(whole["weight"], cut["weight"], rtol=1e-4)
    assert not np.array_equal(asked(world, KINDS[0])["item"], asked(world, KINDS[0], step=1)["item"])


def test_a_low_temperature_draws_the_likeliest_and_says_what_it_drew_with(world):
    chance, *_ = policy(world)
    cold = asked(world, {"use": "sample", "temperature": 0.05})
    warm = asked(world, {"use": "sample", "temperature": 1.0})
    mean = [np.take_along_axis(chance, each["item"], 1).mean() for each in (cold, warm)]
    assert mean[0] > mean[1]
    assert cold["sampling_logp"].shape == cold["logp"].shape
    assert cold["sampling_logp"].sum() > cold["logp"].sum()
    assert "sampling_logp" not in warm
    some = cold["valid"].any(1)  # what is likeliest may all be masked
    assert some.sum() > 2
    assert cold["weight"].sum(1)[some] == pytest.approx(1.0, abs=1e-5)
    few = asked(world, {"use": "sample", "top_p": 1e-6}, width=3)
    assert all(
        len(set(items)) == 1 for items in few["item"][few["valid"].all(1)]
    )  # the likeliest code of each level


def test_more_than_the_catalogue_has_gives_all_of_it_once_and_the_exact_sum(world):
    chance, *_ = policy(world)
    beams = asked(world, {"use": "gumbel"}, width=60)
    there = beams["valid"]
    assert there.sum(1).tolist() == (chance > 0).sum(1).tolist()
    assert (beams["item"][~there] == -1).all()
    assert beams["chance"][there] == pytest.approx(1.0)
    row = np.nonzero(there)[0]
    assert beams["weight"][there] == pytest.approx(chance[row, beams["item"][there]], abs=1e-5)


def test_what_was_drawn_with_crosses_groups_and_plain_beams_say_nothing(world):
    beams = asked(world, {"use": "gumbel"})
    back = to_wire(
        from_wire({name: value for name, value in beams.items() if name not in ("user", "position")})
    )
    assert np.array_equal(back["weight"], beams["weight"])
    assert np.array_equal(back["chance"], beams["chance"])
    assert "weight" not in asked(world, {"use": "beam", "tail": 0})
    assert "weight" not in asked(world, {"use": "gumbel", "correct": False})


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_a_group_is_a_ranking_whatever_it_was_drawn_by_and_says_what_was_added(world, kind):
    beams = asked(world, kind, times=5)
    total_UW = np.where(beams["valid"], beams["logp"].sum(-1), -np.inf)
    assert (np.diff(total_UW, axis=1)[beams["valid"][:, 1:]] <= 1e-6).all()
    assert (
        np.diff(beams["valid"].astype(int), axis=1) <= 0
    ).all()  # what nothing could be drawn for stands last
    if not kind.get("with_target"):
        assert "added" not in beams
        return
    taken_UW = beams["item_id"] == np.asarray(beams["target"].values)[:, None]
    assert (beams["added"] <= taken_UW).all()
    assert (beams["added"].sum(1) == 1).all()
    assert (
        from_wire({k: v for k, v in beams.items() if k not in ("user", "position", "time")}).added is not None
    )
    if kind["use"] == "gumbel":
        assert not beams["added"][:, 0].all()  # the target has its place by likelihood, not the first one

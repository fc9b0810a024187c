"""What each RL algorithm and its options do to the weights, without Ray, in the ring's small world."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ring_world import Ring, scores_of

from nonet.models.generation import compute_policy_log_prob
from nonet.models.generation.exhaustive import score_items
from nonet.rl.algorithms import ALGORITHMS

FAST = "stages.rl.lr=3e-3"


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def taught(ring, tmp_path_factory):
    """Make a checkpoint of a model that has seen the ring for an epoch."""
    world = ring.world()
    world.train("pretrain", 0, 6)
    return world.save(tmp_path_factory.mktemp("taught"))


@pytest.fixture
def world(ring, taught):
    """Make a world at the start of RL by an algorithm; changes of the scenario are its arguments."""

    def made(algorithm, *changes: str):
        made = ring.world(FAST, f"stages.rl.algorithm={json.dumps(algorithm)}", *changes)
        made.load(taught)
        made.trainer.begin(made.stages["rl"])
        return made

    return made


def logp(world, beams):
    """Return the current policy's log-probability of each of these beams [U, W], nats."""
    asked = world.rollout._recommender
    batch = asked.batch(beams["user"], beams["position"])
    model = world.trainer.model.eval()
    with torch.no_grad():
        cache = model.prefill(batch, asked.read_rows(batch))
        return (
            compute_policy_log_prob(model, cache, torch.from_numpy(beams["sid"]), asked.corpus.trie, None)
            .sum(-1)
            .numpy()
        )


@pytest.mark.parametrize("name", ALGORITHMS.list_shipped())
def test_every_algorithm_makes_a_rewarded_beam_likelier_than_the_others(world, name):
    there = world({"use": name, **({"rl": 1.0, "weight": 1e-6} if name == "rsft" else {})})
    beams = there.beams()
    before = logp(there, beams)
    score = np.zeros(beams["valid"].shape, np.float32)
    score[:, 2] = 1.0
    record = there.update(beams, {"hit": score, "own": 0 * score})
    gain = (logp(there, beams) - before).mean(0)
    assert gain[2] > np.delete(gain, 2).max() + 1e-3
    assert {*ALGORITHMS.get(name).more} <= set(record)
    assert all(np.isfinite(value) for value in record.values())


def test_several_passes_move_the_ratio_away_from_one_and_the_clip_acts(world):
    def ratios(**own):
        there = world({"use": "grpo", "kl": 0.0, **own})
        beams = there.beams()
        return there.update(beams, scores_of(beams))

    once = ratios()
    assert (once["ratio"], once["clipped"]) == (pytest.approx(1.0, abs=1e-6), 0.0)
    more = ratios(epochs=4, minibatches=2, clip=0.02)
    assert abs(more["ratio"] - 1) > 1e-4
    assert more["clipped"] > 0.05


def test_minibatches_of_one_prompt_each_and_more_of_them_than_prompts_are_trained_on(world):
    there = world({"use": "grpo", "kl": 0.0, "minibatches": 11, "epochs": 2})
    beams = there.beams()
    before = there.weights()
    assert there.update(beams, scores_of(beams))["prompts"] == len(beams["user"]) < 11
    assert not torch.equal(there.weights(), before)


def _apart(world):
    """Largest difference of the policy's weights to its reference's."""
    reference = torch.cat([p.reshape(-1) for p in world.trainer._learner.reference.model.parameters()])
    return float((world.weights() - reference).abs().max())


def test_a_reference_that_is_synced_is_the_policy_every_so_many_steps(world):
    there = world({"use": "grpo", "kl": 0.01, "reference": {"every": 2}})
    apart = []
    for step in range(4):
        beams = there.beams(step)
        there.update(beams, scores_of(beams, step), step)
        apart.append(_apart(there))
    assert apart[0] > 0
    assert apart[2] > 0
    assert apart[1] == apart[3] == 0


def test_a_reference_by_ema_keeps_its_share_of_itself(world):
    there = world({"use": "grpo", "kl": 0.01, "reference": {"ema": 0.75}})
    first = there.weights()
    beams = there.beams()
    there.update(beams, scores_of(beams))
    reference = torch.cat([p.reshape(-1) for p in there.trainer._learner.reference.model.parameters()])
    torch.testing.assert_close(reference, 0.75 * first + 0.25 * there.weights())


def test_exact_figures_are_those_of_all_items(world):
    there = world({"use": "grpo", "kl": 0.01})
    for step in range(2):
        beams = there.beams(step)
        there.update(beams, scores_of(beams, step), step)
    beams = there.beams(2)
    asked = there.rollout._recommender
    batch = asked.batch(beams["user"], beams["position"])
    every = []
    for model in (there.trainer.model.eval(), there.trainer._learner.reference.model):
        every.append(
            score_items(model, model.prefill(batch, asked.read_rows(batch)), asked.corpus.trie).double()
        )
    policy, reference = every
    record = there.update(beams, scores_of(beams, 2), 2)
    assert record["entropy"] == pytest.approx(float(-(policy.exp() * policy).sum(1).mean()), rel=1e-5)
    exact = float((policy.exp() * (policy - reference)).sum(1).mean())
    assert exact > 1e-4
    assert record["kl_exact"] == pytest.approx(exact, rel=1e-4)


def test_groups_without_what_the_user_took_are_counted(world):
    there = world({"use": "grpo"})
    beams = there.beams()
    corpus = there.trainer.corpus
    target = corpus.seq.item[corpus.seq.offsets[beams["user"]] + beams["position"]]
    missed = 1 - (beams["item"] == target[:, None]).any(1).mean()
    assert there.update(beams, scores_of(beams))["no_hit"] == pytest.approx(missed)


def test_rows_learn_at_their_own_rate_where_a_stage_gives_one(world):
    frozen = world({"use": "grpo"})
    beams = frozen.beams()
    states = frozen.states()
    frozen.update(beams, scores_of(beams))
    assert frozen.states() == states
    moved = {}
    for rate in ("1e-3", "1e-2"):
        there = world({"use": "grpo"}, f"stages.rl.sparse_lr={rate}")
        key, before = there.rows()
        there.update(beams, scores_of(beams))
        after_key, after = there.rows()
        assert np.array_equal(key, after_key)
        moved[rate] = np.abs(after - before).max()
    assert 0 < moved["1e-3"] < moved["1e-2"]


def test_a_value_head_learns_and_goes_on_from_a_commit_bit_for_bit(ring, world, tmp_path):
    how = {"use": "ppo", "kl": 0.01}
    there = world(how, "stages.rl.steps=8")
    errors = []
    for step in range(3):
        beams = there.beams(0)
        errors.append(there.update(beams, scores_of(beams), step)["value_error"])
    assert errors[2] < errors[0]
    there.save(tmp_path)
    again = ring.world(FAST, f"stages.rl.algorithm={json.dumps(how)}", "stages.rl.steps=8")
    again.load(tmp_path, "rl")
    for step in range(3, 5):
        beams = there.beams(step)
        assert there.update(beams, scores_of(beams, step), step) == again.update(
            beams, scores_of(beams, step), step
        )
    assert torch.equal(there.weights(), again.weights())


def test_dapo_asks_for_more_prompts_and_divides_by_those_it_uses(world):
    there = world({"use": "dapo", "oversample": 1.5, "normalise": "group"})
    assert there.stages["rl"].users == 12
    beams = there.beams()
    scores = {name: np.zeros(beams["valid"].shape, np.float32) for name in ("hit", "own")}
    scores["hit"][0, 1] = 1.0
    record = there.update(beams, scores)
    live = {
        name: values[:1]
        for name, values in beams.items()
        if name in ("sid", "valid", "logp", "user", "position")
    }
    alone = world({"use": "dapo", "normalise": "group"})
    same = alone.update(live, {name: score[:1] for name, score in scores.items()})
    assert record["norm"] == pytest.approx(same["norm"], rel=1e-5)
    assert record["flat_groups"] == len(beams["user"]) - 1

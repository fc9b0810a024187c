"""GRPO and GDPO advantages against numbers worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import pytest
import torch

from nonet.errors import ConfigError
from nonet.random import rng
from nonet.rl.advantage import normalise_groups, normalise_objectives, sum_rewards
from nonet.rl.algorithms import ALGORITHMS

TRUE = torch.ones(1, 4, dtype=torch.bool)


def test_grpo_of_one_hit_in_four():
    # mean 1/4, variance (9/16 + 3/16) / 3 = 1/4, std 1/2
    result = normalise_groups(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), TRUE, eps=1e-4)
    assert result.value[0].tolist() == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3, rel=1e-6)
    assert (result.small_groups, result.flat_groups) == (0, 0)


def test_invalid_beams_are_left_out_of_mean_and_spread():
    reward = torch.tensor([[3.0, 1.0, 100.0, torch.nan]])
    valid = torch.tensor([[True, True, False, False]])
    # mean 2, variance (1 + 1) / 1 = 2
    result = normalise_groups(reward, valid, eps=0.0)
    assert result.value[0].tolist() == pytest.approx([1 / sqrt(2), -1 / sqrt(2), 0.0, 0.0], rel=1e-6)


def test_groups_without_two_beams_or_without_spread_are_zero_and_counted():
    reward = torch.tensor([[5.0, 1.0], [0.1, 0.1], [0.0, 1.0], [7.0, 7.0]])
    valid = torch.tensor([[True, False], [True, True], [True, True], [False, False]])
    result = normalise_groups(reward, valid)
    assert result.value[[0, 1, 3]].tolist() == [[0.0, 0.0]] * 3
    assert result.value[2].tolist() == pytest.approx([-0.5 / (sqrt(0.5) + 1e-4), 0.5 / (sqrt(0.5) + 1e-4)])
    assert (result.small_groups, result.flat_groups) == (2, 1)


def test_equal_rewards_stay_without_spread_whatever_the_weights():
    rewards = {"a": torch.full((1, 4), 0.1), "b": torch.full((1, 4), 0.7)}
    result = normalise_groups(sum_rewards(rewards, {"a": 0.3, "b": 1.7}), TRUE)
    assert result.value.tolist() == [[0.0] * 4]
    assert result.flat_groups == 1


def test_group_normalisation_takes_the_weighted_sum_first():
    rewards = {"hit": torch.tensor([[1.0, 0.0]]), "novel": torch.tensor([[0.0, 4.0]])}
    weights = {"hit": 1.0, "novel": 0.5}
    valid = torch.ones(1, 2, dtype=torch.bool)
    assert sum_rewards(rewards, weights).tolist() == [[1.0, 2.0]]
    result = normalise_groups(sum_rewards(rewards, weights), valid, eps=0.0)
    assert result.value[0].tolist() == pytest.approx([-1 / sqrt(2), 1 / sqrt(2)])


def gdpo_case():
    rewards = {
        "a": torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 0.0]]),
        "b": torch.tensor([[0.0, 3.0], [5.0, 1.0], [4.0, 1.0]]),
    }
    return rewards, {"a": 1.0, "b": 0.5}, torch.ones(3, 2, dtype=torch.bool)


def test_gdpo_normalises_each_objective_then_sums_then_whitens():
    # Two values normalise to +-1/sqrt(2), equal ones to 0. Sums, in units of 1/sqrt(2):
    # (1 - 0.5, ...), (0 + 0.5, ...), (1 + 0.5, ...). Squares: 4 * 0.125 + 2 * 1.125 = 2.75, mean 0, variance
    # 2.75 / 5.
    rewards, weights, valid = gdpo_case()
    result = normalise_objectives(rewards, weights, valid, eps=0.0)
    small, large = 0.5 / sqrt(2) / sqrt(0.55), 1.5 / sqrt(2) / sqrt(0.55)
    expected = [[small, -small], [small, -small], [large, -large]]
    assert result.value.tolist() == [pytest.approx(row, rel=1e-6) for row in expected]
    by_name = ALGORITHMS.get("grpo").advantage(
        rewards, weights, valid, {"normalise": "gdpo"}, lambda moments: moments
    )
    assert torch.allclose(by_name.value, result.value, atol=1e-3)


NO_HITS = {"hit": torch.zeros(3, 4), "novel": torch.tensor([[0.1, 0.2, 0.3, 0.9]] * 3)}
NO_HITS["hit"][0, 1] = 1.0


@pytest.mark.parametrize(("use", "survives"), [("gdpo", True), (None, True), ("group", False)])
def test_a_weight_counts_in_groups_where_one_reward_alone_has_a_spread(use, survives):
    valid, advantage = torch.ones(3, 4, dtype=torch.bool), ALGORITHMS.get("grpo").advantage
    sizes = []
    for weight in (0.1, 0.2, 0.4, 0.8):
        weights = {"hit": 1.0, "novel": weight}
        found = advantage(NO_HITS, weights, valid, {"normalise": use}, lambda moments: moments)
        sizes.append(float(found.value[1].abs().max()))
    growth = [after / before for before, after in pairwise(sizes)]
    assert all(each > 1.2 for each in growth) == survives
    assert all(each < 1.01 for each in growth) != survives


def test_one_reward_is_normalised_in_its_group_unless_gdpo_is_asked_for():
    valid, rewards = torch.ones(3, 4, dtype=torch.bool), {"novel": NO_HITS["novel"]}
    advantage = ALGORITHMS.get("grpo").advantage
    found = [
        advantage(rewards, {"novel": 0.3}, valid, {"normalise": use}, lambda moments: moments).value
        for use in (None, "group")
    ]
    assert torch.equal(*found)


def test_gdpo_does_not_let_a_large_scale_drown_another_objective():
    rewards, weights, valid = gdpo_case()
    scaled = {"a": rewards["a"], "b": rewards["b"] * 1000}
    small = normalise_objectives(rewards, weights, valid, eps=0.0).value
    assert torch.allclose(normalise_objectives(scaled, weights, valid, eps=0.0).value, small, rtol=1e-6)
    assert not torch.allclose(normalise_groups(sum_rewards(scaled, weights), valid).value, small, rtol=1e-1)


def test_gdpo_gives_dead_groups_exactly_zero():
    rewards = {"a": torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 0.0]]), "b": torch.ones(3, 2)}
    valid = torch.tensor([[True, True], [True, True], [True, False]])
    result = normalise_objectives(rewards, {"a": 1.0, "b": 1.0}, valid, eps=0.0)
    # whitened over four beams, +-1/sqrt(2), 0, 0: variance 1 / 3; the lone beam of the last group is left out
    assert result.value[0].tolist() == pytest.approx([sqrt(1.5), -sqrt(1.5)], rel=1e-6)
    assert result.value[1:].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert (result.small_groups, result.flat_groups) == (1, 1)
    none = normalise_objectives({"a": torch.ones(2, 2)}, {"a": 1.0}, torch.zeros(2, 2, dtype=torch.bool))
    assert (none.value.tolist(), none.small_groups) == ([[0.0, 0.0]] * 2, 2)


def test_gdpo_zero_is_exact_beside_groups_whose_mean_is_only_nearly_zero():
    rewards = {"a": torch.from_numpy(rng(6, "exact").random((40, 7)))}
    rewards["a"][5] = 0.3
    result = normalise_objectives(rewards, {"a": 0.7}, torch.ones(40, 7, dtype=torch.bool))
    assert result.value[5].tolist() == [0.0] * 7
    assert float(result.value.double().std()) == pytest.approx(1.0, abs=1e-6)


def test_gdpo_over_two_ranks_equals_one():
    g = rng(2, "gdpo")
    rewards = {name: torch.from_numpy(g.random((8, 5))) for name in "ab"}
    valid = torch.from_numpy(g.random((8, 5)) < 0.8)
    weights = {"a": 1.0, "b": 0.3}
    whole = normalise_objectives(rewards, weights, valid)
    halves = [slice(0, 3), slice(3, 8)]
    moments = []
    for half in halves:  # first pass: what each rank would send
        normalise_objectives(
            {k: v[half] for k, v in rewards.items()},
            weights,
            valid[half],
            reduce=lambda m: moments.append(m) or m,
        )
    total = moments[0] + moments[1]
    parts = [
        normalise_objectives(
            {k: v[half] for k, v in rewards.items()}, weights, valid[half], reduce=lambda _: total
        ).value
        for half in halves
    ]
    assert torch.allclose(torch.cat(parts), whole.value, rtol=1e-6)


def test_rewards_and_weights_must_name_the_same_objectives():
    with pytest.raises(ConfigError, match=r"rewards are \['a'\], weights are for \['b'\]"):
        normalise_groups(sum_rewards({"a": torch.ones(1, 4)}, {"b": 1.0}), TRUE)

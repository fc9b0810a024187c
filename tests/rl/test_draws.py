"""Advantages of groups that were drawn: summed over all that could be drawn, their gradient is the exact one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from nonet.random import rng
from nonet.rl import Draws, leave_one_out, weigh_advantages
from nonet.rl.advantage import centre_groups
from nonet.rl.draws import average_other_prompts

P = np.array([0.5, 0.25, 0.15, 0.1])
F = np.array([0.0, 2.0, -1.0, 3.0])
EXACT = P * (F - P @ F)  # the gradient of the expected reward by the logits of a softmax


def gradient(items, draws=None):
    """Return the mean over beams of advantage times the gradient of log-probability for a group of these items, [4]."""
    reward = torch.from_numpy(F[items])[None]
    valid = torch.ones(1, len(items), dtype=torch.bool)
    value = leave_one_out(reward, valid, draws).value[0].double().numpy()
    scores = np.eye(4)[items] - P
    return (value[:, None] * scores).mean(0)


def test_independent_draws_give_the_exact_gradient_in_expectation():
    mean = sum(
        P[list(group)].prod() * gradient(list(group)) for group in itertools.product(range(4), repeat=3)
    )
    assert mean == pytest.approx(EXACT, abs=1e-6)


@pytest.mark.parametrize("drawn", [1, 2])
def test_a_sure_top_and_a_sampled_tail_give_it_too(drawn):
    sure, tail = [0, 1], [2, 3]
    rest = P[tail].sum()
    mean = np.zeros(4)
    for group in itertools.product(tail, repeat=drawn):
        weight = torch.tensor([[*P[sure], *[rest / drawn] * drawn]])
        draws = Draws(weight, torch.tensor([[1.0, 1.0, *[0.0] * drawn]]))
        mean += (P[list(group)] / rest).prod() * gradient([*sure, *group], draws)
    assert mean == pytest.approx(EXACT, abs=1e-6)


def test_draws_without_replacement_give_it_by_their_inclusion_weights():
    draw = rng(3, "gumbel").gumbel(size=(200_000, 4)) + np.log(P)
    order = np.argsort(-draw, axis=1)
    estimates = []
    for row, places in zip(draw, order, strict=True):
        chosen = places[:2]
        chance = -np.expm1(-np.exp(np.log(P[chosen]) - row[places[2]]))
        estimates.append((chosen, chance))
    chosen = np.array([each[0] for each in estimates])
    chance = np.array([each[1] for each in estimates])
    draws = Draws(torch.from_numpy(P[chosen] / chance), torch.from_numpy(chance))
    value = leave_one_out(
        torch.from_numpy(F[chosen]), torch.ones(chosen.shape, dtype=torch.bool), draws
    ).value.numpy()
    each = (value[..., None] * (np.eye(4)[chosen] - P)).mean(1)
    error = each.std(0) / np.sqrt(len(each))
    assert (np.abs(each.mean(0) - EXACT) < 4 * error).all()
    assert error.max() < 0.01


def test_weights_that_are_equal_change_no_advantage():
    reward, valid = torch.tensor([[1.0, 0.0, 0.5, 9.0]]), torch.tensor([[True, True, True, False]])
    draws = Draws(torch.tensor([[0.2, 0.2, 0.2, 7.0]]), torch.zeros(1, 4))
    plain = centre_groups(reward, valid)
    assert weigh_advantages(plain, draws, valid).value.tolist() == [pytest.approx(plain.value[0].tolist())]
    twice = Draws(torch.tensor([[0.4, 0.2, 0.2, 7.0]]), torch.zeros(1, 4))
    assert weigh_advantages(plain, twice, valid).value[0, 0].item() == pytest.approx(
        1.5 * plain.value[0, 0].item()
    )


def test_the_baseline_over_other_prompts_leaves_out_the_prompt_itself():
    reward = torch.tensor([[0.0, 0.0], [3.0, 3.0], [6.0, 6.0]])
    valid = torch.ones(3, 2, dtype=torch.bool)
    found = average_other_prompts(reward, valid, Draws(torch.ones(3, 2), torch.zeros(3, 2)))
    assert found[:, 0].tolist() == [4.5, 3.0, 1.5]

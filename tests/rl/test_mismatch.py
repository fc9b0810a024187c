"""What corrects for rollouts that compute otherwise than trainers: biased without, within the estimator's error with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nonet.rl.algorithms.base import ALGORITHMS
from nonet.rl.draws import Draws
from nonet.rl.mismatch import apply_corrections, compute_corrections, should_skip_step, summarise_mismatch

# Shapes: G groups, W beams, L levels, I items.
ITEMS, WIDTH, GROUPS, BLOCKS = 24, 6, 4000, 16


def log_chances(noise: float) -> torch.Tensor:
    """Log-probabilities of two levels of every item [I, L]: of a trainer, or of a rollout whose logits have noise."""
    draw = np.random.default_rng(3)
    first, second = draw.normal(size=4), draw.normal(size=(4, 6))
    off = np.random.default_rng(4)
    first, second = first + noise * off.normal(size=4), second + noise * off.normal(size=(4, 6))
    root, leaf = torch.tensor(first).log_softmax(0), torch.tensor(second).log_softmax(1)
    return torch.stack([root.repeat_interleave(6), leaf.flatten()], 1)


def estimated(correct: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO's gradient in the items' logits from draws of the noisy rollout, mean over groups; and the exact one."""
    trainer_IL, rollout_IL = log_chances(0.0), log_chances(0.6)
    chance_I, reward_I = trainer_IL.sum(1).exp(), torch.arange(ITEMS, dtype=torch.float64) / ITEMS
    exact_I = chance_I * (reward_I - chance_I @ reward_I)
    draw = torch.Generator().manual_seed(block)
    item_GW = torch.multinomial(
        rollout_IL.sum(1).exp().expand(GROUPS, -1), WIDTH, replacement=True, generator=draw
    )
    valid = torch.ones(item_GW.shape, dtype=torch.bool)
    found = compute_corrections(trainer_IL[item_GW], rollout_IL[item_GW], valid, correct, 50.0)
    share = torch.full(item_GW.shape, 1 / WIDTH, dtype=torch.float64)
    weight = found.weight_UW if found.weight_UW is not None else torch.ones_like(share)
    spec = ALGORITHMS.get("rloo")
    draws = Draws(share * weight, torch.zeros_like(share))
    options = spec.options().model_dump()
    value = spec.advantage(
        {"r": reward_I[item_GW]}, {"r": 1.0}, valid, options, lambda x: x, draws=draws
    ).value
    count_I = torch.bincount(item_GW.flatten(), value.double().flatten(), ITEMS) / WIDTH / GROUPS
    return count_I - chance_I * count_I.sum(), exact_I


@pytest.mark.parametrize(("correct", "right"), [("none", False), ("sequence_truncate", True)])
def test_a_noisy_rollout_biases_the_gradient_and_importance_weights_take_that_out(correct, right):
    parts = [estimated(correct, block) for block in range(BLOCKS)]
    each = torch.stack([mean for mean, _ in parts])
    exact = parts[0][1]
    error = float(each.std(0).norm()) / math.sqrt(BLOCKS)
    apart = float((each.mean(0) - exact).norm())
    if right:
        assert apart < 3 * error  # three standard errors of 64,000 groups
    else:
        assert apart > 10 * error
        assert apart > 0.1 * float(exact.norm())


def three(correct: str, cap: float = 2.0):
    """Corrections of one prompt with three beams of two levels; the last is none."""
    old = torch.tensor([[[0.0, math.log(3.0)], [math.log(0.25), 0.0], [0.0, 9.0]]])
    return compute_corrections(old, torch.zeros(1, 3, 2), torch.tensor([[True, True, False]]), correct, cap)


def test_weights_are_those_of_levels_or_of_items_cut_or_left_out_at_the_cap():
    assert three("none").weight_UW is None
    assert three("token_truncate").weight_UW[0, :2].tolist() == [[1.0, 2.0], [pytest.approx(0.25), 1.0]]
    assert three("token_mask").weight_UW[0, :2].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert three("sequence_truncate").weight_UW[0, :2].tolist() == [2.0, pytest.approx(0.25)]
    assert three("sequence_mask", 4.5).weight_UW[0, :2].tolist() == [pytest.approx(3.0), pytest.approx(0.25)]


def test_a_record_has_the_kl_the_widest_ratios_and_the_share_that_was_cut():
    found = three("sequence_truncate")
    record = summarise_mismatch(found.sums.tolist(), 2)
    kl = (3 - math.log(3) - 1 + 0.25 - math.log(0.25) - 1) / 4
    assert record["mismatch/kl"] == pytest.approx(kl)
    assert record["mismatch/masked"] == 0.5
    assert record["mismatch/ratio p99"] == pytest.approx(
        4.0, rel=0.15
    )  # bins of |log ratio| are a tenth of it wide
    same = compute_corrections(
        torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), torch.ones(1, 2, dtype=torch.bool), "none", 2.0
    )
    assert summarise_mismatch(same.sums.tolist(), 2) == {
        "mismatch/kl": 0.0,
        "mismatch/ratio p99": 1.0,
        "mismatch/masked": 0.0,
    }


def test_a_step_stops_above_its_bound_alone():
    assert should_skip_step({"mismatch/kl": 0.03}, {"stop_at_kl": 0.02})
    assert not should_skip_step({"mismatch/kl": 0.01}, {"stop_at_kl": 0.02})
    assert not should_skip_step({"mismatch/kl": 9.0}, {"stop_at_kl": None})


def test_advantages_count_by_their_weights():
    value = torch.tensor([[1.0, -2.0]])
    assert apply_corrections(value, None) is value
    assert apply_corrections(value, torch.tensor([[0.5, 2.0]])).tolist() == [[0.5, -4.0]]
    assert apply_corrections(value, torch.tensor([[[0.5, 2.0], [1.0, 0.0]]])).tolist() == [
        [[0.5, 2.0], [-2.0, 0.0]]
    ]

"""How a group was drawn, and advantages that make its sum the expectation over the whole catalogue.

Each beam has a `weight` with which a group's weighted sum is the policy's expectation, and the `chance` with which it was in
the group: 1 where it was sure to be (the top of a beam, a target that is always there), its inclusion probability when drawn
without replacement, 0 for independent draws. With them, advantages less a leave-one-out baseline give the exact gradient in
expectation: RLOO (Ahmadian et al., arXiv 2402.14740) for independent draws, and Kool et al. ("Buy 4 REINFORCE samples, get a
baseline for free", 2019) without replacement, w (f (1 - w q + w) - sum of w f).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.rl.advantage import Advantages, centred

# Shapes: U users (groups), W beams.


@dataclass(frozen=True, slots=True)
class Draws:
    """weight [U, W], 0 where invalid; chance [U, W], see above."""

    weight: Tensor
    chance: Tensor

    def scaled(self, valid_UW: Tensor) -> Tensor:
        """Weights [U, W] float64 that are 1 on average over a group's valid beams."""
        weight_UW = torch.where(valid_UW, self.weight.double(), 0.0)
        total_U1 = weight_UW.sum(1, keepdim=True).clamp_min(1e-30)
        return weight_UW / total_U1 * valid_UW.sum(1, keepdim=True)


def weighed(advantages: Advantages, draws: Draws | None, valid_UW: Tensor) -> Advantages:
    """Advantages that count by their beam's weight; as they are for beams that say none."""
    if draws is None:
        return advantages
    value_UW = advantages.value.double() * draws.scaled(valid_UW)
    return Advantages(
        value_UW.float(),
        advantages.small_groups,
        advantages.flat_groups,
        advantages.used_U,
        advantages.group_U,
    )


def mean_of_others(
    reward_UW: Tensor, valid_UW: Tensor, draws: Draws, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return for each prompt the mean reward of all other prompts of the step, [U, 1] float64.

    It is independent of the prompt's own draws, so subtracting it leaves a policy gradient unbiased. Without it the weights of
    draws without replacement, whose sum differs from group to group, turn a constant reward into noise.

    Args:
        reward_UW: Rewards.
        valid_UW: Which beams are valid.
        draws: How they were drawn; a prompt's own mean counts beams by their weights.
        reduce: Sums a float64 tensor over all ranks.
    """
    weight_UW = draws.scaled(valid_UW)
    there_U = valid_UW.any(1)
    mean_U = (weight_UW * torch.where(valid_UW, reward_UW.double(), 0.0)).sum(1) / weight_UW.sum(1).clamp_min(
        1e-30
    )
    mean_U = torch.where(there_U, mean_U, 0.0)
    sums = torch.stack([mean_U.sum(), there_U.sum().double()])
    total, count = sums if reduce is None else reduce(sums)
    return ((total - mean_U) / (count - there_U.double()).clamp_min(1))[:, None]


def without_shift(
    reward_UW: Tensor, valid_UW: Tensor, draws: Draws, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return rewards [U, W] float64 less `mean_of_others`, exactly 0 where that is all they are but for rounding."""
    shifted_UW = reward_UW.double() - mean_of_others(reward_UW, valid_UW, draws, reduce)
    rounding = 1e-12 * reward_UW.double().abs().clamp_min(1e-30)
    return torch.where(shifted_UW.abs() <= rounding, 0.0, shifted_UW)


def leave_one_out(reward_UW: Tensor, valid_UW: Tensor, draws: Draws | None = None) -> Advantages:
    """Reward less a baseline that doesn't know it: a group's mean of advantage times the gradient of a log-probability is
    then the gradient of the expected reward in expectation, whatever the group was drawn by.

    Beams without draws count as independent ones of the policy. Groups without spread are counted, and zero only where the
    formula says so.
    """
    plain = centred(reward_UW, valid_UW)
    count_U1 = valid_UW.sum(1, keepdim=True).double()
    if draws is None:
        value_UW = plain.value.double() * count_U1 / (count_U1 - 1).clamp_min(1)
        return Advantages(value_UW.float(), plain.small_groups, plain.flat_groups)
    weight_UW = torch.where(valid_UW, draws.weight.double(), 0.0)
    reward_UW = torch.where(valid_UW, reward_UW.double(), 0.0)
    free_UW = valid_UW & (draws.chance == 0)
    gain_UW, free_U1 = weight_UW * reward_UW, free_UW.sum(1, keepdim=True).double()
    total_U1, drawn_U1 = _sum(gain_UW), _sum(gain_UW * free_UW)
    sure_UW = reward_UW * (1 - weight_UW * draws.chance.double() + weight_UW) - total_U1
    others_UW = (drawn_U1 - gain_UW) * free_U1 / (free_U1 - 1).clamp_min(1)
    value_UW = torch.where(free_UW, reward_UW - (total_U1 - drawn_U1) - others_UW, sure_UW)
    mean_U1 = (total_U1 - drawn_U1) / _sum(weight_UW * ~free_UW).clamp_min(1e-30)
    alone_U1 = (free_U1 == 1) & (count_U1 > 1)  # one draw has no others: all beams share what doesn't know it
    value_UW = torch.where(alone_U1, reward_UW - mean_U1, value_UW) * weight_UW * count_U1
    return Advantages(value_UW.float(), plain.small_groups, plain.flat_groups)


def _sum(value_UW: Tensor) -> Tensor:
    return value_UW.sum(1, keepdim=True)

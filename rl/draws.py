"""How the beams of a group were drawn, and advantages that are unbiased for it.

Each beam has a `weight`, with which the weighted sum over a group is the expectation under the policy, and a `chance`, its
inclusion probability: 1 for beams that were certain to be in the group (the top of a beam search, a target that is always
added), the inclusion probability for draws without replacement, 0 for independent draws. With both, advantages with a
leave-one-out baseline give the exact gradient in expectation: RLOO (Ahmadian et al., arXiv 2402.14740) for independent draws,
and Kool et al. ("Buy 4 REINFORCE samples, get a baseline for free", 2019) for draws without replacement,
w (f (1 - w q + w) - sum of w f).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.rl.advantage import Advantages, centre_groups

# Shapes: U users (groups), W beams.


@dataclass(frozen=True, slots=True)
class Draws:
    """Importance weights and inclusion probabilities of drawn beams.

    Attributes:
        weight: Weights [U, W], 0 where a beam is invalid.
        chance: Inclusion probabilities [U, W]; 0 for independent draws, see the module docstring.
    """

    weight: Tensor
    chance: Tensor

    def scale_weights(self, valid_UW: Tensor) -> Tensor:
        """Return weights [U, W] float64 that average 1 over the valid beams of a group."""
        weight_UW = torch.where(valid_UW, self.weight.double(), 0.0)
        total_U1 = weight_UW.sum(1, keepdim=True).clamp_min(1e-30)
        return weight_UW / total_U1 * valid_UW.sum(1, keepdim=True)


def weigh_advantages(advantages: Advantages, draws: Draws | None, valid_UW: Tensor) -> Advantages:
    """Multiply advantages by the weights of their beams; return them unchanged if `draws` is None."""
    if draws is None:
        return advantages
    value_UW = advantages.value.double() * draws.scale_weights(valid_UW)
    return Advantages(
        value_UW.float(),
        advantages.small_groups,
        advantages.flat_groups,
        advantages.used_U,
        advantages.group_U,
    )


def average_other_prompts(
    reward_UW: Tensor, valid_UW: Tensor, draws: Draws, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return for each prompt the mean reward of all other prompts of the step, [U, 1] float64.

    It is independent of the prompt's own draws, so subtracting it leaves a policy gradient unbiased. Without it the weights of
    draws without replacement, whose sum differs from group to group, turn a constant reward into noise.

    Args:
        reward_UW: Rewards.
        valid_UW: Mask of the valid beams.
        draws: How the beams were drawn; a prompt's own mean is weighted by these weights.
        reduce: Sums a float64 tensor over all ranks.
    """
    weight_UW = draws.scale_weights(valid_UW)
    there_U = valid_UW.any(1)
    mean_U = (weight_UW * torch.where(valid_UW, reward_UW.double(), 0.0)).sum(1) / weight_UW.sum(1).clamp_min(
        1e-30
    )
    mean_U = torch.where(there_U, mean_U, 0.0)
    sums = torch.stack([mean_U.sum(), there_U.sum().double()])
    total, count = sums if reduce is None else reduce(sums)
    return ((total - mean_U) / (count - there_U.double()).clamp_min(1))[:, None]


def subtract_shift(
    reward_UW: Tensor, valid_UW: Tensor, draws: Draws, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return rewards [U, W] float64 less `average_other_prompts`; differences within rounding error become exactly 0."""
    shifted_UW = reward_UW.double() - average_other_prompts(reward_UW, valid_UW, draws, reduce)
    rounding = 1e-12 * reward_UW.double().abs().clamp_min(1e-30)
    return torch.where(shifted_UW.abs() <= rounding, 0.0, shifted_UW)


def leave_one_out(reward_UW: Tensor, valid_UW: Tensor, draws: Draws | None = None) -> Advantages:
    """Subtract from each reward a baseline that does not depend on the beam itself.

    The group mean of advantage times the gradient of the log-probability is then an unbiased estimate of the gradient of the
    expected reward, whichever way the group was drawn. Groups without spread are counted, and are zero only where the formula
    gives zero.

    Args:
        reward_UW: Rewards.
        valid_UW: Mask of the valid beams.
        draws: How the beams were drawn; None for independent draws of the policy.
    """
    plain = centre_groups(reward_UW, valid_UW)
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

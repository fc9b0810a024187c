"""How the beams of a group were drawn, and advantages that are unbiased for that way of drawing.

Each beam has two numbers. Its `weight` is such that the weighted sum over a group is the expectation under the policy. Its
`chance` is its inclusion probability: 1 for beams that were certain to be in the group (the top of a beam search, a target that
is always added), a value between 0 and 1 for draws without replacement, and by convention 0 for independent draws.

With both, advantages with a leave-one-out baseline give the exact gradient in expectation: RLOO (Ahmadian et al., arXiv
2402.14740) for independent draws, and Kool et al. ("Buy 4 REINFORCE samples, get a baseline for free", 2019) for draws without
replacement: w (f (1 - w q + w) - sum of w f), with the weight w, the chance q and the reward f of a beam.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    return replace(advantages, value=value_UW.float())


def average_other_prompts(
    reward_UW: Tensor, valid_UW: Tensor, draws: Draws, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return for each prompt the mean reward of all other prompts of the step, [U, 1] float64.

    This baseline is independent of the prompt's own draws, so subtracting it leaves a policy gradient unbiased. Without it, the
    weights of draws without replacement, whose sum differs from group to group, turn a constant reward into noise.

    Args:
        reward_UW: Reward of each beam.
        valid_UW: Mask of the valid beams; prompts without valid beams are left out of the mean.
        draws: How the beams were drawn; the mean of each prompt is weighted by these weights.
        reduce: Sums a float64 tensor over all ranks.
    """
    weight_UW = draws.scale_weights(valid_UW)
    has_beams_U = valid_UW.any(1)
    weighted_UW = weight_UW * torch.where(valid_UW, reward_UW.double(), 0.0)
    mean_U = weighted_UW.sum(1) / weight_UW.sum(1).clamp_min(1e-30)
    mean_U = torch.where(has_beams_U, mean_U, 0.0)
    sums = torch.stack([mean_U.sum(), has_beams_U.sum().double()])
    total, count = sums if reduce is None else reduce(sums)
    return ((total - mean_U) / (count - has_beams_U.double()).clamp_min(1))[:, None]


def subtract_shift(
    reward_UW: Tensor, valid_UW: Tensor, draws: Draws, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return rewards [U, W] float64 minus `average_other_prompts`; differences within rounding error become exactly 0."""
    shifted_UW = reward_UW.double() - average_other_prompts(reward_UW, valid_UW, draws, reduce)
    rounding_UW = 1e-12 * reward_UW.double().abs().clamp_min(1e-30)
    return torch.where(shifted_UW.abs() <= rounding_UW, 0.0, shifted_UW)


def leave_one_out(reward_UW: Tensor, valid_UW: Tensor, draws: Draws | None = None) -> Advantages:
    """Subtract from each reward a baseline that does not depend on the beam itself.

    The mean over a group of (advantage times gradient of the log-probability) is then an unbiased estimate of the gradient of
    the expected reward, whichever way the group was drawn. Unlike in `centre_groups`, the advantages of groups without spread
    are 0 only where the formula gives 0; these groups are still counted.

    Args:
        reward_UW: Reward of each beam.
        valid_UW: Mask of the valid beams.
        draws: How the beams were drawn; None for independent draws of the policy.
    """
    centred = centre_groups(reward_UW, valid_UW)
    count_U1 = valid_UW.sum(1, keepdim=True).double()
    if draws is None:
        # r - mean of the other n - 1 beams = (r - mean of all n beams) * n / (n - 1)
        value_UW = centred.value.double() * count_U1 / (count_U1 - 1).clamp_min(1)
        return Advantages(value_UW.float(), centred.small_groups, centred.flat_groups)
    weight_UW = torch.where(valid_UW, draws.weight.double(), 0.0)
    reward_UW = torch.where(valid_UW, reward_UW.double(), 0.0)
    independent_UW = valid_UW & (draws.chance == 0)
    independent_count_U1 = independent_UW.sum(1, keepdim=True).double()
    weighted_UW = weight_UW * reward_UW
    total_U1, independent_total_U1 = _sum_beams(weighted_UW), _sum_beams(weighted_UW * independent_UW)
    dependent_total_U1 = total_U1 - independent_total_U1
    # The formula of Kool et al. for beams drawn without replacement, divided by the beam's weight, which is applied at the end.
    dependent_value_UW = reward_UW * (1 - weight_UW * draws.chance.double() + weight_UW) - total_U1
    # For an independent draw: the other independent draws estimate what all of them estimate, scaled by n / (n - 1).
    others_UW = (
        (independent_total_U1 - weighted_UW) * independent_count_U1 / (independent_count_U1 - 1).clamp_min(1)
    )
    value_UW = torch.where(independent_UW, reward_UW - dependent_total_U1 - others_UW, dependent_value_UW)
    # A single independent draw has no other such draws. The baseline of all beams is then the weighted mean of the others.
    is_single_draw_U1 = (independent_count_U1 == 1) & (count_U1 > 1)
    dependent_mean_U1 = dependent_total_U1 / _sum_beams(weight_UW * ~independent_UW).clamp_min(1e-30)
    value_UW = torch.where(is_single_draw_U1, reward_UW - dependent_mean_U1, value_UW) * weight_UW * count_U1
    return Advantages(value_UW.float(), centred.small_groups, centred.flat_groups)


def _sum_beams(value_UW: Tensor) -> Tensor:
    """Return the sum over the beams of each group, [U, 1]."""
    return value_UW.sum(1, keepdim=True)

"""Advantages of a group of beams, computed from one reward or several.

A group is the beams of one user. GRPO: A = (r - mean) / (std + eps) over a user's valid beams, where the variance is divided
by n - 1, as in verl, TRL and MiniOneRec (eps 1e-4).
GDPO (arXiv 2601.05242; verl's gdpo_reward_weights): each objective is normalised in its group as in GRPO, then the weighted
sum is whitened over the batch, so the scale of one objective does not dominate another. Dr. GRPO: no division by the standard
deviation. REINFORCE++: only whitened over the batch, with or without subtracting the group's mean first. RLOO is in draws.py.

A group with fewer than two valid beams, or whose rewards are all equal, has advantage exactly 0 and is counted. The
arithmetic is float64, so that rounding gives no spread to a group of equal rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.errors import ConfigError

# Shapes: U users (groups), W beams.


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of a batch of beams.

    Attributes:
        value: Advantages [U, W] float32, 0 where a beam is invalid.
        small_groups: Number of groups with fewer than two valid beams.
        flat_groups: Number of groups whose rewards are all equal.
        used_U: Mask [U] bool of the groups that the loss is computed and averaged over; None for all.
        group_U: Weight [U] of each group's prompt in a next-event loss; None if the algorithm has no such loss.
    """

    value: Tensor
    small_groups: int
    flat_groups: int
    used_U: Tensor | None = None
    group_U: Tensor | None = None


def sum_rewards(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Compute the weighted sum of the rewards, [U, W] float64."""
    _check_names(rewards, weights)
    return torch.stack([weights[name] * reward.double() for name, reward in rewards.items()]).sum(0)


def normalise_groups(reward_UW: Tensor, valid_UW: Tensor, *, eps: float = 1e-4) -> Advantages:
    """Compute (r - group mean) / (group std + eps) over the valid beams."""
    value, small_U, flat_U = _normalise(reward_UW, valid_UW, eps)
    return Advantages(value.float(), int(small_U.sum()), int(flat_U.sum()))


def centre_groups(reward_UW: Tensor, valid_UW: Tensor) -> Advantages:
    """Compute r - group mean, without dividing by the standard deviation: Dr. GRPO (arXiv 2503.20783)."""
    value, small_U, flat_U = _centre(reward_UW, valid_UW)
    return Advantages(value.float(), int(small_U.sum()), int(flat_U.sum()))


def whiten_batch(
    reward_UW: Tensor,
    valid_UW: Tensor,
    *,
    baseline: bool = False,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Advantages:
    """Compute (r - mean) / std over the valid beams of the batch: REINFORCE++ (arXiv 2501.03262).

    Args:
        reward_UW: Reward of each beam.
        valid_UW: Mask of the valid beams.
        baseline: Whether to subtract each group's mean first, and to exclude groups without spread from the batch statistics.
        reduce: Sums a float64 [3] tensor over all ranks, as in `normalise_objectives`.
    """
    centred_UW, small_U, flat_U = _centre(reward_UW, valid_UW)
    counted_UW = valid_UW & ~(small_U | flat_U)[:, None] if baseline else valid_UW
    value_UW = centred_UW if baseline else torch.where(valid_UW, reward_UW.double(), 0.0)
    white_UW = _whiten(value_UW, counted_UW, reduce)
    return Advantages(white_UW.float(), int(small_U.sum()), int(flat_U.sum()))


def normalise_objectives(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    *,
    eps: float = 1e-4,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Advantages:
    """Normalise each objective in its group, sum with weights, and whiten over the batch.

    The batch statistics include every valid beam of a group with two or more; beams of groups without spread count as 0.

    Args:
        rewards: Rewards [U, W] by name.
        weights: Weight of each reward.
        valid_UW: Mask of the valid beams.
        eps: Added to the standard deviation of a group.
        reduce: Sums a float64 [3] tensor (count, sum, sum of squares) over all ranks, so that the result does not depend on how
            the batch is sharded.
    """
    _check_names(rewards, weights)
    summed_UW = torch.zeros(valid_UW.shape, dtype=torch.float64, device=valid_UW.device)
    flat_U = torch.ones(len(valid_UW), dtype=torch.bool, device=valid_UW.device)
    small_U = valid_UW.sum(1) < 2
    for name, reward_UW in rewards.items():
        value_UW, small_U, reward_flat_U = _normalise(reward_UW, valid_UW, eps)
        summed_UW += weights[name] * value_UW
        flat_U &= reward_flat_U  # a group is flat if it is flat in every reward
    white_UW = _whiten(summed_UW, valid_UW & ~small_U[:, None], reduce)
    value_UW = torch.where(flat_U[:, None], 0.0, white_UW)
    return Advantages(value_UW.float(), int(small_U.sum()), int(flat_U.sum()))


def _whiten(value_UW: Tensor, counted_UW: Tensor, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Shift and scale the values of the counted beams to mean 0 and standard deviation 1 over all ranks.

    Other beams get 0. If fewer than two beams are counted, all beams get 0.
    """
    values = value_UW[counted_UW]
    sums = torch.stack([values.new_tensor(len(values)), values.sum(), values.square().sum()])
    count, total, squares = sums if reduce is None else reduce(sums)
    if count < 2:
        return torch.zeros_like(value_UW)
    mean = total / count
    variance = ((squares - count * mean**2) / (count - 1)).clamp_min(0.0)
    return torch.where(counted_UW, (value_UW - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def _normalise(reward_UW: Tensor, valid_UW: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the group-normalised reward [U, W] float64, and masks [U] of the groups that are too small or flat."""
    centred_UW, small_U, flat_U = _centre(reward_UW, valid_UW)
    count_U1 = valid_UW.sum(1, keepdim=True)
    std_U1 = (centred_UW.square().sum(1, keepdim=True) / (count_U1 - 1).clamp_min(1)).sqrt()
    has_no_advantage_U1 = (small_U | flat_U)[:, None]
    return torch.where(has_no_advantage_U1, 0.0, centred_UW / (std_U1 + eps)), small_U, flat_U


def _centre(reward_UW: Tensor, valid_UW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reward minus its group's mean [U, W] float64, and masks [U] of the groups that are too small or flat.

    The beams of such groups get 0.
    """
    reward_UW = torch.where(valid_UW, reward_UW.double(), 0.0)
    count_U1 = valid_UW.sum(1, keepdim=True)
    centred_UW = torch.where(
        valid_UW, reward_UW - reward_UW.sum(1, keepdim=True) / count_U1.clamp_min(1), 0.0
    )
    highest_U = reward_UW.masked_fill(~valid_UW, -torch.inf).amax(1)
    lowest_U = reward_UW.masked_fill(~valid_UW, torch.inf).amin(1)
    small_U = count_U1[:, 0] < 2
    flat_U = ~small_U & (highest_U == lowest_U)
    return torch.where((small_U | flat_U)[:, None], 0.0, centred_UW), small_U, flat_U


def _check_names(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> None:
    """Raise ConfigError unless there are rewards and each has a weight."""
    if not rewards or set(rewards) != set(weights):
        raise ConfigError(
            f"rewards are {sorted(rewards)}, weights are for {sorted(weights)}: give each reward a weight."
        )

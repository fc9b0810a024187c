"""Advantages of a group of beams, of one reward or several.

GRPO: A = (r - mean) / (std + eps) over a user's valid beams; std with n - 1, as in verl, TRL and MiniOneRec
(eps 1e-4). GDPO (arXiv 2601.05242; verl's gdpo_reward_weights): each objective is normalised so in its group,
the weighted sum is then whitened over the batch, so one objective's scale cannot drown another. Dr. GRPO: no spread.
REINFORCE++: whitened over the batch alone, with or without the group's mean taken off first. RLOO is in draws.py.
A group with fewer than two valid beams, or whose rewards are all equal, has advantage exactly 0 and is
counted. Arithmetic is float64: a group of equal rewards has no spread by rounding.
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
    """value [U, W] float32, 0 where invalid; how many groups had too few beams, or no spread at all.

    used_U   [U] bool: groups that a loss is computed and divided over; None for all
    group_U  [U]: what each group's next event counts in a loss of next events; None where there is none
    """

    value: Tensor
    small_groups: int
    flat_groups: int
    used_U: Tensor | None = None
    group_U: Tensor | None = None


def weighted_sum(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Sum of weight * reward, [U, W] float64."""
    _check_names(rewards, weights)
    return torch.stack([weights[name] * reward.double() for name, reward in rewards.items()]).sum(0)


def grpo(reward_UW: Tensor, valid_UW: Tensor, *, eps: float = 1e-4) -> Advantages:
    """(r - group mean) / (group std + eps) over valid beams."""
    value, small_U, flat_U = _normalise(reward_UW, valid_UW, eps)
    return Advantages(value.float(), int(small_U.sum()), int(flat_U.sum()))


def centred(reward_UW: Tensor, valid_UW: Tensor) -> Advantages:
    """r - group mean, without a spread: Dr. GRPO (arXiv 2503.20783)."""
    value, small_U, flat_U = _centred(reward_UW, valid_UW)
    return Advantages(value.float(), int(small_U.sum()), int(flat_U.sum()))


def whitened(
    reward_UW: Tensor,
    valid_UW: Tensor,
    *,
    baseline: bool = False,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Advantages:
    """(r - mean) / std over the batch's valid beams: REINFORCE++ (arXiv 2501.03262); `baseline` takes each group's mean off
    before, and leaves groups without spread out of the batch. `reduce` is that of `gdpo`."""
    centred_UW, small_U, flat_U = _centred(reward_UW, valid_UW)
    counted_UW = valid_UW & ~(small_U | flat_U)[:, None] if baseline else valid_UW
    value_UW = centred_UW if baseline else torch.where(valid_UW, reward_UW.double(), 0.0)
    white_UW = _white(value_UW, counted_UW, reduce)
    return Advantages(white_UW.float(), int(small_U.sum()), int(flat_U.sum()))


def gdpo(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    *,
    eps: float = 1e-4,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Advantages:
    """Normalise each objective in its group, sum with weights, whiten over the batch.

    Whitening counts every valid beam of a group with two or more (those without spread as 0). With the batch
    cut over ranks, `reduce` sums a float64 [3] tensor (count, sum, sum of squares) over them, so a rank's
    share changes nothing.
    """
    _check_names(rewards, weights)
    summed_UW = torch.zeros(valid_UW.shape, dtype=torch.float64, device=valid_UW.device)
    flat_U = torch.ones(len(valid_UW), dtype=torch.bool, device=valid_UW.device)
    small_U = valid_UW.sum(1) < 2
    for name, reward in rewards.items():
        value, small_U, flat = _normalise(reward, valid_UW, eps)
        summed_UW += weights[name] * value
        flat_U &= flat
    white_UW = _white(summed_UW, valid_UW & ~small_U[:, None], reduce)
    value_UW = torch.where(flat_U[:, None], 0.0, white_UW)
    return Advantages(value_UW.float(), int(small_U.sum()), int(flat_U.sum()))


def _white(value_UW: Tensor, counted_UW: Tensor, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Mean 0 and spread 1 over the counted beams of all ranks; 0 for the others, and where there are fewer than two."""
    values = value_UW[counted_UW]
    count, total, squares = _reduced(
        torch.stack([values.new_tensor(len(values)), values.sum(), values.square().sum()]), reduce
    )
    if count < 2:
        return torch.zeros_like(value_UW)
    mean = total / count
    variance = ((squares - count * mean**2) / (count - 1)).clamp_min(0.0)
    return torch.where(counted_UW, (value_UW - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def _normalise(reward_UW: Tensor, valid_UW: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Group-normalised reward [U, W] float64, and which groups are too small or flat, [U] bool each."""
    centred_UW, small_U, flat_U = _centred(reward_UW, valid_UW)
    count_U1 = valid_UW.sum(1, keepdim=True)
    std_U1 = (centred_UW.square().sum(1, keepdim=True) / (count_U1 - 1).clamp_min(1)).sqrt()
    dead_U1 = (small_U | flat_U)[:, None]
    return torch.where(dead_U1, 0.0, centred_UW / (std_U1 + eps)), small_U, flat_U


def _centred(reward_UW: Tensor, valid_UW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reward less its group's mean [U, W] float64, 0 in groups that are too small or flat, and which those are, [U] bool
    each."""
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


def _reduced(moments: Tensor, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    return moments if reduce is None else reduce(moments)


def _check_names(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> None:
    if not rewards or set(rewards) != set(weights):
        raise ConfigError(
            f"rewards are {sorted(rewards)}, weights are for {sorted(weights)}: give each reward a weight."
        )

"""The clipped policy-gradient loss with a KL term to a reference model.

objective: min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) - kl * k3; k3 = exp(d) - d - 1, d = ref - logp
token:     a ratio per level, exp(logp - old); mean over all valid levels (DAPO's token mean)
sequence:  a ratio per beam, exp(mean over levels of logp - old); mean over beams (GSPO)

Sums and counts are returned apart: a trainer divides by the *global* count, whatever the world size.
MiniOneRec's loss (one update a rollout) is this with old = logp.detach(): the ratio is 1 and never clips.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.errors import ConfigError

# Shapes: U users, W beams, L levels.

_MAX_LOG = 20.0  # exp(20) = 5e8: beyond it the gradient is cut rather than overflow, as verl does


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` is a sum with a gradient; divide it and the other sums by `count` (tokens, or beams at sequence
    level).

    kl: sum of k3; clipped: ratios that the clip held back; ratio: sum of ratios. 0-d tensors, detached.
    """

    loss: Tensor
    count: Tensor
    kl: Tensor
    clipped: Tensor
    ratio: Tensor


def policy_loss(
    logp_UWL: Tensor,
    old_UWL: Tensor,
    advantage_UW: Tensor,
    valid_UW: Tensor,
    *,
    ref_UWL: Tensor | None = None,
    clip: float | tuple[float, float] | list[float] | None = 0.2,
    kl: float = 0.0,
    level: str = "token",
) -> PolicyLoss:
    """Loss of one micro-batch. `clip` is a width, (low, high), or None for no clip; `ref_UWL` is needed when
    kl > 0.
    """
    low, high = _clip_bounds(clip)
    if kl and ref_UWL is None:
        raise ConfigError(f"algorithm.kl is {kl} but there is no reference model: give `ref` or set kl: 0.")
    valid_UW1 = valid_UW.unsqueeze(-1)
    logp_UWL = torch.where(valid_UW1, logp_UWL, 0.0)  # keeps NaN of an unused row out of the gradient
    change = torch.where(valid_UW1, logp_UWL - old_UWL.detach(), 0.0)
    k3 = torch.zeros_like(change)
    if ref_UWL is not None:
        k3 = _k3(torch.where(valid_UW1, ref_UWL.detach() - logp_UWL, 0.0))
    if level == "sequence":
        change, k3 = change.mean(-1, keepdim=True), k3.mean(-1, keepdim=True)
    elif level != "token":
        raise ConfigError(f"algorithm.level is {level!r}; it can be 'token' or 'sequence'.")
    advantage = torch.where(valid_UW, advantage_UW, 0.0).detach().to(change.dtype).unsqueeze(-1)
    ratio = change.clamp(max=_MAX_LOG).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    used = valid_UW1.expand_as(change)
    loss = torch.where(used, kl * k3 - gain, 0.0).sum()
    clipped = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    with torch.no_grad():
        return PolicyLoss(loss, used.sum(), k3[used].sum(), (clipped & used).sum(), ratio[used].sum())


def _k3(d: Tensor) -> Tensor:
    """Schulman's low-variance estimator of KL(policy, reference) from d = ref - logp."""
    d = d.clamp(max=_MAX_LOG)
    return d.exp() - d - 1


def _clip_bounds(clip: float | tuple[float, float] | list[float] | None) -> tuple[float, float]:
    if clip is None:
        return torch.inf, torch.inf
    low, high = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    if low <= 0 or high <= 0:
        raise ConfigError(
            f"algorithm.clip is {clip}; it is a positive width or [low, high], for example [0.2, 0.28]."
        )
    return float(low), float(high)

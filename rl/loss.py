"""The clipped policy-gradient loss with a KL term to a reference model.

objective: min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) - kl * estimate
token:     a ratio per level, exp(logp - old); mean over all valid levels (DAPO's token mean)
sequence:  a ratio per beam, exp(mean over levels of logp - old); mean over beams (GSPO)
item:      a ratio per beam, exp(sum over levels of logp - old), the item's own; mean over beams (ECPO)

All semantic ids have the same number of levels, so a mean over tokens and one over beams of their means are one number.
Of d = ref - logp, k1 is -d, k2 d^2 / 2, k3 exp(d) - d - 1 (Schulman, "Approximating KL divergence", 2020): as estimates of
the KL all are for draws of the policy, as losses only k2 has its gradient; k1 has none in expectation.

Sums and counts are returned apart: a trainer divides by the *global* count, whatever the world size.
MiniOneRec's loss (one update a rollout) is this with old = logp.detach(): the ratio is 1 and never clips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nonet.errors import ConfigError

# Shapes: U users, W beams, L levels.

_MAX_LOG = 20.0  # exp(20) = 5e8: beyond it the gradient is cut rather than overflow, as verl does


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` is a sum with a gradient; divide it and the other sums by `count` (tokens, or beams at sequence
    level).

    kl: sum of its estimate; clipped: ratios that the clip held back; ratio: sum of ratios. 0-d tensors, detached.
    more: other sums by name, those that the algorithm's spec names.
    """

    loss: Tensor
    count: Tensor
    kl: Tensor
    clipped: Tensor
    ratio: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)


Held = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(change, logp, advantage) -> change: another old policy, as ECPO and GBPO have one; by level or beam, as the ratio is."""


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
    estimator: str = "k3",
    held: Held | None = None,
    weight_UW: Tensor | None = None,
) -> PolicyLoss:
    """Loss of one micro-batch. `clip` is a width, (low, high), or None for no clip; `ref_UWL` is needed when
    kl > 0. `advantage_UW` may be [U, W, L] for a loss of tokens. `weight_UW` is what each beam counts in the KL term, 1 on
    average over a group; advantages already have it.
    """
    low, high = _clip_bounds(clip)
    if kl and ref_UWL is None:
        raise ConfigError(f"algorithm.kl is {kl} but there is no reference model: give `ref` or set kl: 0.")
    valid_UW1 = valid_UW.unsqueeze(-1)
    logp_UWL = torch.where(valid_UW1, logp_UWL, 0.0)  # keeps NaN of an unused row out of the gradient
    change = torch.where(valid_UW1, logp_UWL - old_UWL.detach(), 0.0)
    divergence = torch.zeros_like(change)
    if ref_UWL is not None:
        divergence = kl_estimate(torch.where(valid_UW1, ref_UWL.detach() - logp_UWL, 0.0), estimator)
        if weight_UW is not None:
            divergence = divergence * weight_UW.detach().to(divergence.dtype).unsqueeze(-1)
    change, divergence, logp = _at_level(change, divergence, logp_UWL, level)
    advantage = advantage_UW if advantage_UW.ndim == 3 else advantage_UW.unsqueeze(-1)
    advantage = torch.where(valid_UW1, advantage, 0.0).detach().to(change.dtype)
    if held is not None:
        change = held(change, logp.detach(), advantage)
    ratio = change.clamp(max=_MAX_LOG).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    used = valid_UW1.expand_as(change)
    loss = torch.where(used, kl * divergence - gain, 0.0).sum()
    clipped = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    with torch.no_grad():
        return PolicyLoss(loss, used.sum(), divergence[used].sum(), (clipped & used).sum(), ratio[used].sum())


def _at_level(change: Tensor, divergence: Tensor, logp: Tensor, level: str) -> tuple[Tensor, Tensor, Tensor]:
    """Log ratio, KL and log-probability of what has one ratio: a level, or a beam."""
    if level == "token":
        return change, divergence, logp
    divergence, logp = divergence.mean(-1, keepdim=True), logp.sum(-1, keepdim=True)
    if level == "sequence":
        return change.mean(-1, keepdim=True), divergence, logp
    if level == "item":
        return change.sum(-1, keepdim=True), divergence, logp
    raise ConfigError(f"algorithm.level is {level!r}; it can be 'token', 'sequence' or 'item'.")


def kl_estimate(d: Tensor, estimator: str = "k3") -> Tensor:
    """Schulman's estimates of KL(policy, reference) from d = ref - logp, under draws of the policy."""
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator != "k3":
        raise ConfigError(f"algorithm.estimator is {estimator!r}; it can be 'k1', 'k2' or 'k3'.")
    d = d.clamp(max=_MAX_LOG)
    return d.exp() - d - 1


def early_clipped(change: Tensor, logp: Tensor, advantage: Tensor, *, most: float) -> Tensor:
    """ECPO (OneRec, arXiv 2506.13695): the old policy is at least the present one / `most`, so that a ratio which ran away on
    a bad beam is held at `most` and its gradient stays bounded."""
    return change - (change.detach() - torch.tensor(most, dtype=change.dtype).log()).clamp_min(0)


def gradient_bounded(change: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
    """GBPO (OneRec-V2, arXiv 2508.20900): the old policy is at least the present one where a beam is good, at least one minus
    it where it is bad. Gradients are those of a binary cross-entropy at most, and nothing is clipped away."""
    old = logp - change.detach()
    rest = torch.log1p(-logp.exp().clamp(max=1 - 1e-6))
    floor = torch.where(advantage >= 0, logp, rest)
    return change - (floor - old).clamp_min(0)


def _clip_bounds(clip: float | tuple[float, float] | list[float] | None) -> tuple[float, float]:
    if clip is None:
        return torch.inf, torch.inf
    low, high = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    if low <= 0 or high <= 0:
        raise ConfigError(
            f"algorithm.clip is {clip}; it is a positive width or [low, high], for example [0.2, 0.28]."
        )
    return float(low), float(high)

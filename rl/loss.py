"""The clipped policy-gradient loss with a KL term to a reference model.

The loss is the negative of

    min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) - kl * estimate

with one of three ratios (`level`):

token:     one ratio per level, exp(logp - old); mean over all valid levels (DAPO's token mean)
sequence:  one ratio per beam, exp(mean over levels of logp - old); mean over beams (GSPO)
item:      one ratio per beam, exp(sum over levels of logp - old); mean over beams (ECPO)

All semantic ids have the same number of levels, so the mean over tokens equals the mean over beams of their token means.
With d = ref - logp, k1 is -d, k2 is d^2 / 2 and k3 is exp(d) - d - 1 (Schulman, "Approximating KL divergence", 2020). All
three estimate the KL from samples of the policy. As a loss, only k2 has the gradient of the KL; the gradient of k1 has mean zero.

Sums and counts are returned separately: a trainer divides by the *global* count, whatever the world size.
MiniOneRec's loss (one update per rollout) is this loss with old = logp.detach(): the ratio is 1 and is never clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nonet.errors import ConfigError

# Shapes: U users, W beams, L levels.

# exp(20) = 5e8. Larger log ratios are clamped, which stops their gradient, so that exp does not overflow (as in verl).
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The result of a loss: sums over one micro-batch, as scalar tensors.

    Attributes:
        loss: Sum of the loss, with a gradient. Its mean and those of the other sums are the sums divided by `count`.
        count: Number of valid tokens, or of valid beams at sequence and item level.
        kl: Sum of the KL estimates.
        clipped: Number of ratios for which the clip was active.
        ratio: Sum of the ratios.
        more: Other sums by name, as listed in `Algorithm.more`.
    """

    loss: Tensor
    count: Tensor
    kl: Tensor
    clipped: Tensor
    ratio: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)


LogRatioBound = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps (log ratio, logp, advantage) to a bounded log ratio, as in ECPO and GBPO: [U, W, L] for `level` token, else [U, W, 1]."""


def compute_policy_loss(
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
    bound_log_ratio: LogRatioBound | None = None,
    weight_UW: Tensor | None = None,
) -> PolicyLoss:
    """Compute the clipped policy-gradient loss of one micro-batch.

    Args:
        logp_UWL: Log-probabilities under the model that is trained, with a gradient.
        old_UWL: Log-probabilities under the policy that generated the beams.
        advantage_UW: Advantages; [U, W, L] is accepted at token level.
        valid_UW: Mask of the valid beams.
        ref_UWL: Log-probabilities under the reference model; required if `kl` > 0.
        clip: Width of the clip, or (low, high), or None for no clip.
        kl: Weight of the KL term.
        level: "token", "sequence" or "item", see the module docstring.
        estimator: KL estimator: "k1", "k2" or "k3".
        bound_log_ratio: Maps (log ratio, logp, advantage) to a bounded log ratio; None leaves it unchanged.
        weight_UW: Weight of each beam in the KL term, 1 on average over a group; advantages are already weighted.

    Returns:
        Sums over the valid tokens, or over the valid beams at sequence and item level.

    Raises:
        ConfigError: `kl` is positive without a reference, or an option has an unknown value.
    """
    low, high = _parse_clip(clip)
    if kl and ref_UWL is None:
        raise ConfigError(f"algorithm.kl is {kl} but there is no reference model: set `ref`, or set kl: 0.")
    valid_UW1 = valid_UW.unsqueeze(-1)
    logp_UWL = torch.where(valid_UW1, logp_UWL, 0.0)  # keeps the NaN of an invalid beam out of the gradient
    log_ratio = torch.where(valid_UW1, logp_UWL - old_UWL.detach(), 0.0)
    kl_estimate = torch.zeros_like(log_ratio)
    if ref_UWL is not None:
        kl_estimate = estimate_kl(torch.where(valid_UW1, ref_UWL.detach() - logp_UWL, 0.0), estimator)
        if weight_UW is not None:
            kl_estimate = kl_estimate * weight_UW.detach().to(kl_estimate.dtype).unsqueeze(-1)
    log_ratio, kl_estimate, logp = _aggregate_levels(log_ratio, kl_estimate, logp_UWL, level)
    # From here on, X is L at token level and 1 at the other levels: log_ratio, kl_estimate, logp and ratio are [U, W, X].
    advantage = advantage_UW if advantage_UW.ndim == 3 else advantage_UW.unsqueeze(-1)
    advantage = torch.where(valid_UW1, advantage, 0.0).detach().to(log_ratio.dtype)
    if bound_log_ratio is not None:
        log_ratio = bound_log_ratio(log_ratio, logp.detach(), advantage)
    ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    valid_UWX = valid_UW1.expand_as(log_ratio)
    loss = torch.where(valid_UWX, kl * kl_estimate - objective, 0.0).sum()
    clipped = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            count=valid_UWX.sum(),
            kl=kl_estimate[valid_UWX].sum(),
            clipped=(clipped & valid_UWX).sum(),
            ratio=ratio[valid_UWX].sum(),
        )


def _aggregate_levels(
    log_ratio: Tensor, kl_estimate: Tensor, logp: Tensor, level: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Aggregate log ratios, KL estimates and log-probabilities [U, W, L] to [U, W, 1]; at token level leave them unchanged."""
    if level == "token":
        return log_ratio, kl_estimate, logp
    kl_estimate, logp = kl_estimate.mean(-1, keepdim=True), logp.sum(-1, keepdim=True)
    if level == "sequence":
        return log_ratio.mean(-1, keepdim=True), kl_estimate, logp
    if level == "item":
        return log_ratio.sum(-1, keepdim=True), kl_estimate, logp
    raise ConfigError(f"algorithm.level is {level!r}; it can be 'token', 'sequence' or 'item'.")


def estimate_kl(d: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy, reference) with one of Schulman's estimators, elementwise.

    `d` is ref - logp: the reference's log-probabilities of samples of the policy minus the policy's.
    """
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator != "k3":
        raise ConfigError(f"algorithm.estimator is {estimator!r}; it can be 'k1', 'k2' or 'k3'.")
    d = d.clamp(max=_MAX_LOG_RATIO)
    return d.exp() - d - 1


def clip_early(log_ratio: Tensor, logp: Tensor, advantage: Tensor, *, max_ratio: float) -> Tensor:
    """Limit log ratios to log(`max_ratio`) and keep their gradient, as ECPO does (OneRec, arXiv 2506.13695).

    This is the same as raising the old probability to at least the current one / `max_ratio`. The ratio of a beam with a
    negative advantage, which the clip does not limit from above, is thus at most `max_ratio`, and its gradient stays bounded.
    `logp` and `advantage` are not used; every LogRatioBound has them.
    """
    return log_ratio - (log_ratio.detach() - torch.tensor(max_ratio, dtype=log_ratio.dtype).log()).clamp_min(
        0
    )


def bound_gradient(log_ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
    """Lower log ratios so that the gradient of the loss is bounded, as GBPO does (OneRec-V2, arXiv 2508.20900).

    This is the same as raising the old probability to at least the current one p for beams with an advantage >= 0, and to at
    least 1 - p for the others. Gradients are then bounded by those of a binary cross-entropy, and no beam is clipped.
    """
    old_logp = logp - log_ratio.detach()
    log_complement = torch.log1p(-logp.exp().clamp(max=1 - 1e-6))  # log(1 - p); the clamp keeps it finite
    min_old_logp = torch.where(advantage >= 0, logp, log_complement)
    return log_ratio - (min_old_logp - old_logp).clamp_min(0)


def _parse_clip(clip: float | tuple[float, float] | list[float] | None) -> tuple[float, float]:
    """Return the widths (low, high) below and above 1 of a clip option; both are infinite for None."""
    if clip is None:
        return torch.inf, torch.inf
    low, high = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    if low <= 0 or high <= 0:
        raise ConfigError(
            f"algorithm.clip is {clip}; it is a positive width or [low, high], for example [0.2, 0.28]."
        )
    return float(low), float(high)

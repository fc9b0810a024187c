"""The mismatch between rollout and trainer on the same beams under the same weights, and advantages corrected for it.

A rollout in bf16, on another device or with other kernels draws from a slightly different distribution. So three
log-probabilities are kept: the rollout's, the trainer's under the same version (`old`), and the current one. The policy changes
between the last two; the ratio exp(old - rollout) between the first two is an error that importance weights correct:

    token_truncate     one weight per level, at most `cap` (truncated importance sampling: Yao et al., "Your efficient RL
                       framework secretly brings you off-policy RL training", 2025)
    token_mask         one weight per level, 0 outside [1 / cap, cap] (IcePop, Ring-1T, arXiv 2510.18855)
    sequence_truncate  one weight per item, at most `cap`: unbiased except for the truncated part
    sequence_mask      one weight per item, 0 outside [1 / cap, cap] (Liu et al., "When speed kills stability", 2025)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Shapes: U users, W beams, L levels, B bins.

_BINS, _LEAST, _MOST = 240, 1e-7, 20.0  # of |log ratio| of an item, to a tenth of it


@dataclass(frozen=True, slots=True)
class MismatchCorrections:
    """Importance weights of a rollout and the sums that describe its mismatch.

    Attributes:
        weight_UW: Weights [U, W, L] or [U, W]; None if `correct` is "none".
        sums: Input of `summarise_mismatch`, to be summed over ranks.
    """

    weight_UW: Tensor | None
    sums: Tensor


def compute_corrections(
    old_UWL: Tensor, rollout_UWL: Tensor, valid_UW: Tensor, correct: str, cap: float
) -> MismatchCorrections:
    """Compute importance weights of the trainer's policy relative to the rollout's.

    Args:
        old_UWL: Log-probabilities under the trainer's model, of the version that generated the beams.
        rollout_UWL: Log-probabilities that the rollout reported.
        valid_UW: Mask of the valid beams.
        correct: "none" or one of the corrections in the module docstring.
        cap: Bound of the weights.
    """
    level, _, how = correct.partition("_")
    change_UWL = torch.where(valid_UW.unsqueeze(-1), old_UWL.double() - rollout_UWL.double(), 0.0)
    item_UW = change_UWL.sum(-1)
    ratio = (change_UWL if level == "token" else item_UW).clamp(max=_MOST).exp()
    outside = ratio > cap if how == "truncate" else (ratio > cap) | (ratio < 1 / cap)
    weight = None
    if correct != "none":
        weight = ratio.clamp(max=cap) if how == "truncate" else ratio.masked_fill(outside, 0.0)
    there = valid_UW.unsqueeze(-1).expand_as(outside) if outside.ndim == 3 else valid_UW
    kl = (change_UWL.exp() - change_UWL - 1)[valid_UW].sum()
    counts = torch.histc(_place(item_UW[valid_UW]), _BINS, 0, _BINS)
    held = (outside & there).sum() if correct != "none" else torch.zeros(())
    facts = torch.stack([kl, held.double(), there.sum().double(), valid_UW.sum().double()])
    return MismatchCorrections(weight, torch.cat([facts, counts.double()]))


def summarise_mismatch(sums: Sequence[float], levels: int) -> dict[str, float]:
    """Compute the mismatch metrics of a step from the summed `Corrections.sums`.

    kl: KL of rollout and trainer in nats per level (k3). ratio p99: 99th percentile of the factor by which the probability of an
    item differs, in either direction. masked: share of the weights that the cap truncated or masked.
    """
    kl, held, weights, beams, *counts = sums
    reached = torch.tensor(counts).cumsum(0)
    place = int((reached < 0.99 * reached[-1]).sum())
    apart = 0.0 if not beams or place == 0 else _LEAST * (_MOST / _LEAST) ** ((place + 1) / _BINS)
    return {
        "mismatch/kl": kl / max(1.0, beams * levels),
        "mismatch/ratio p99": float(torch.tensor(apart).exp()),
        "mismatch/masked": held / max(1.0, weights),
    }


def apply_corrections(value_UW: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply advantages [U, W] by importance weights [U, W] or [U, W, L]; return them unchanged without weights."""
    if weight is None:
        return value_UW
    value = value_UW.unsqueeze(-1) if weight.ndim > value_UW.ndim else value_UW
    return (value.double() * weight).to(value_UW.dtype)


def should_skip_step(record: Mapping[str, float], options: Mapping[str, Any]) -> bool:
    """Return whether a step must be skipped because the KL of rollout and trainer exceeds `stop_at_kl`."""
    most = options.get("stop_at_kl")
    return most is not None and record["mismatch/kl"] > most


def _place(item_N: Tensor) -> Tensor:
    """Return the log-spaced bin of each |log ratio|; the first bin also holds all smaller values."""
    size = (item_N.abs().clamp(_LEAST, _MOST) / _LEAST).log() / torch.tensor(_MOST / _LEAST).log().double()
    return (size * _BINS).floor().clamp(0, _BINS - 1)

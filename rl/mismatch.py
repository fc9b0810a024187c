"""The mismatch between rollout and trainer on the same beams under the same weights, and advantages corrected for it.

A rollout in bf16, on another device or with other kernels samples from a slightly different distribution than the trainer
computes. So a beam has three log-probabilities: the rollout's, the trainer's under the same weights (`old`), and the trainer's
under its current weights. The policy loss uses the ratio of the last two. The ratio exp(old - rollout) of the first two is an
error, which importance weights correct. The option `mismatch.correct` names the kind of weight:

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

# The histogram of |log ratio|: log-spaced bins, each about 8 % wide. exp(20) = 5e8 does not overflow.
_BINS, _MIN_LOG_RATIO, _MAX_LOG_RATIO = 240, 1e-7, 20.0


@dataclass(frozen=True, slots=True)
class MismatchCorrections:
    """Importance weights of a rollout and the sums that describe its mismatch.

    Attributes:
        weight_UW: Weights [U, W, L] by level or [U, W] by item; None if `correct` is "none".
        sums: Input of `summarise_mismatch` [4 + B] float64, to be summed over ranks: KL, number of truncated or masked
            weights, number of weights, number of beams, and the histogram of |log ratio|.
    """

    weight_UW: Tensor | None
    sums: Tensor


def compute_corrections(
    old_UWL: Tensor, rollout_UWL: Tensor, valid_UW: Tensor, correct: str, cap: float
) -> MismatchCorrections:
    """Compute importance weights of the trainer's policy relative to the rollout's, and the sums for its metrics.

    Args:
        old_UWL: Log-probabilities under the trainer's model, of the version that generated the beams.
        rollout_UWL: Log-probabilities that the rollout reported.
        valid_UW: Mask of the valid beams.
        correct: "none" or one of the corrections in the module docstring.
        cap: Upper bound of the weights; masks also use its inverse as the lower bound.
    """
    level, _, method = correct.partition("_")
    log_ratio_UWL = torch.where(valid_UW.unsqueeze(-1), old_UWL.double() - rollout_UWL.double(), 0.0)
    item_log_ratio_UW = log_ratio_UWL.sum(-1)
    ratio = (log_ratio_UWL if level == "token" else item_log_ratio_UW).clamp(max=_MAX_LOG_RATIO).exp()
    # [U, W, L] at token level, else [U, W], as are `ratio`, `weight` and `valid`.
    out_of_bounds = ratio > cap if method == "truncate" else (ratio > cap) | (ratio < 1 / cap)
    weight = None
    if correct != "none":
        weight = ratio.clamp(max=cap) if method == "truncate" else ratio.masked_fill(out_of_bounds, 0.0)
    valid = valid_UW.unsqueeze(-1).expand_as(ratio) if ratio.ndim == 3 else valid_UW
    kl = (log_ratio_UWL.exp() - log_ratio_UWL - 1)[valid_UW].sum()  # estimator k3
    histogram_B = torch.histc(_find_bins(item_log_ratio_UW[valid_UW]), _BINS, 0, _BINS)
    affected = (out_of_bounds & valid).sum() if correct != "none" else torch.zeros(())
    totals = torch.stack([kl, affected.double(), valid.sum().double(), valid_UW.sum().double()])
    return MismatchCorrections(weight, torch.cat([totals, histogram_B.double()]))


def summarise_mismatch(sums: Sequence[float], levels: int) -> dict[str, float]:
    """Compute the mismatch metrics of a step.

    Args:
        sums: `MismatchCorrections.sums`, summed over the ranks.
        levels: Number of levels.

    Returns:
        "mismatch/kl": KL of rollout and trainer in nats per level (k3). "mismatch/ratio p99": 99th percentile of the factor by
        which the two probabilities of an item differ, in either direction. "mismatch/masked": share of the weights that were
        truncated or masked.
    """
    kl, affected_count, weight_count, beam_count, *histogram = sums
    cumulative_B = torch.tensor(histogram).cumsum(0)
    p99_bin = int((cumulative_B < 0.99 * cumulative_B[-1]).sum())
    # The upper edge of the bin. The first bin holds all ratios that are 1 up to rounding.
    p99_log_ratio = (
        0.0
        if not beam_count or p99_bin == 0
        else _MIN_LOG_RATIO * (_MAX_LOG_RATIO / _MIN_LOG_RATIO) ** ((p99_bin + 1) / _BINS)
    )
    return {
        "mismatch/kl": kl / max(1.0, beam_count * levels),
        "mismatch/ratio p99": float(torch.tensor(p99_log_ratio).exp()),
        "mismatch/masked": affected_count / max(1.0, weight_count),
    }


def apply_corrections(value_UW: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply advantages [U, W] by importance weights [U, W] or [U, W, L]; return them unchanged without weights."""
    if weight is None:
        return value_UW
    value = value_UW.unsqueeze(-1) if weight.ndim > value_UW.ndim else value_UW
    return (value.double() * weight).to(value_UW.dtype)


def should_skip_step(record: Mapping[str, float], options: Mapping[str, Any]) -> bool:
    """Return whether a step must be skipped because the KL of rollout and trainer exceeds `stop_at_kl`.

    Args:
        record: Metrics of the step, with those of `summarise_mismatch`.
        options: Options `mismatch` of the stage.
    """
    max_kl = options.get("stop_at_kl")
    return max_kl is not None and record["mismatch/kl"] > max_kl


def _find_bins(log_ratio_N: Tensor) -> Tensor:
    """Return the index of each |log ratio|'s log-spaced bin; the first bin also contains all smaller values."""
    # 0 at the smallest ratio of the histogram, 1 at the largest.
    position_N = (
        log_ratio_N.abs().clamp(_MIN_LOG_RATIO, _MAX_LOG_RATIO) / _MIN_LOG_RATIO
    ).log() / torch.tensor(_MAX_LOG_RATIO / _MIN_LOG_RATIO).log().double()
    return (position_N * _BINS).floor().clamp(0, _BINS - 1)

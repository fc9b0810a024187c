"""What rollout and trainer say differently of the same beams under the same weights, and advantages that count it.

A rollout in bf16, on another device or with other kernels draws from a distribution of its own. So three log-probabilities
are kept: the rollout's, the trainer's under the same version (`old`), and the current one. Policies move between the last two;
between the first two lies an error, exp(old - rollout), that importance weights take out:

    token_truncate     a weight a level, at most `cap` (truncated importance sampling: Yao et al., "Your efficient RL framework
                       secretly brings you off-policy RL training", 2025)
    token_mask         a weight a level, 0 outside [1 / cap, cap] (IcePop, Ring-1T, arXiv 2510.18855)
    sequence_truncate  a weight an item, at most `cap`: without bias but for what is above it
    sequence_mask      a weight an item, 0 outside [1 / cap, cap] (Liu et al., "When speed kills stability", 2025)
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
class Corrections:
    """weight [U, W, L] or [U, W], 1 where nothing is corrected and None where nothing is to be; sums: what `mismatch_record`
    reads, to be added up over ranks."""

    weight_UW: Tensor | None
    sums: Tensor


def corrections(
    old_UWL: Tensor, rollout_UWL: Tensor, valid_UW: Tensor, correct: str, cap: float
) -> Corrections:
    """Importance weights of the trainer's policy over the rollout's; `correct` is none or a name above."""
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
    return Corrections(weight, torch.cat([facts, counts.double()]))


def mismatch_record(sums: Sequence[float], levels: int) -> dict[str, float]:
    """kl: of rollout to trainer, nats a level (k3); ratio p99: by how much an item's chance differs, either way, at most in 99 %;
    masked: share of weights that the cap cut."""
    kl, held, weights, beams, *counts = sums
    reached = torch.tensor(counts).cumsum(0)
    place = int((reached < 0.99 * reached[-1]).sum())
    apart = 0.0 if not beams or place == 0 else _LEAST * (_MOST / _LEAST) ** ((place + 1) / _BINS)
    return {
        "mismatch/kl": kl / max(1.0, beams * levels),
        "mismatch/ratio p99": float(torch.tensor(apart).exp()),
        "mismatch/masked": held / max(1.0, weights),
    }


def corrected(value_UW: Tensor, weight: Tensor | None) -> Tensor:
    """Advantages [U, W], or a level [U, W, L], that count by their weights."""
    if weight is None:
        return value_UW
    value = value_UW.unsqueeze(-1) if weight.ndim > value_UW.ndim else value_UW
    return (value.double() * weight).to(value_UW.dtype)


def stops(record: Mapping[str, float], options: Mapping[str, Any]) -> bool:
    """Whether a step is not learned from, for rollout and trainer are too far apart."""
    most = options.get("stop_at_kl")
    return most is not None and record["mismatch/kl"] > most


def _place(item_N: Tensor) -> Tensor:
    """The bin of each |log ratio|, log-spaced; the first holds all below the least."""
    size = (item_N.abs().clamp(_LEAST, _MOST) / _LEAST).log() / torch.tensor(_MOST / _LEAST).log().double()
    return (size * _BINS).floor().clamp(0, _BINS - 1)

"""Attention masks as data: which keys each query row sees, as K <= 4 intervals a row.

A mask is a small frozen object that knows nothing of the batch it will meet; `intervals` turns it into numbers for
sequences of given lengths. O(N) integers where a dense mask is O(N^2), and the form a tile scheduler wants: the whole
HSTU mask family is exactly K = 2, a beam tree K = 4. NVIDIA's recsys-examples chose the same form for SID decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.errors import ConfigError

MOST_INTERVALS = 4

# Shapes: B sequences, Q query rows of the longest, K intervals a row, T packed query tokens.


@dataclass(frozen=True, slots=True)
class Mask:
    """Visibility within a sequence of n_q queries and n_k keys, aligned at the newest token.

    Query q stands at key position p = q + n_k - n_q. It sees keys up to p when `causal`, all of them otherwise, and
    of these only the newest `window` (p itself included) when there is a window.
    """

    causal: bool = False
    window: int | None = None

    def intervals(self, n_q_B: Tensor, n_k_B: Tensor, rows: int, start_B: Tensor) -> tuple[Tensor, Tensor]:
        """First and past-the-last visible key [B, rows, K] of each query; empty where start >= stop.

        For sequences of these lengths whose queries begin at packed token `start_B`; `rows` is the longest.
        """
        place_BQ = torch.arange(rows, device=n_q_B.device) + (n_k_B - n_q_B)[:, None]
        last_BQ = n_k_B[:, None].expand_as(place_BQ)
        stop_BQ = torch.minimum(place_BQ + 1, last_BQ) if self.causal else last_BQ
        start_BQ = torch.zeros_like(stop_BQ)
        if self.window is not None:
            start_BQ = (place_BQ - self.window + 1).clamp_min(0)
        return start_BQ[..., None], stop_BQ[..., None]


@dataclass(frozen=True, slots=True, eq=False)
class IntervalMask:
    """Any mask of up to four intervals a row: start and stop [T, K] int64 over the packed queries, in key positions
    of the query's own sequence. A row whose intervals are all empty sees nothing and gives 0.
    """

    start: Tensor
    stop: Tensor

    def intervals(self, n_q_B: Tensor, n_k_B: Tensor, rows: int, start_B: Tensor) -> tuple[Tensor, Tensor]:
        """As Mask.intervals."""
        row_BQ = torch.arange(rows, device=n_q_B.device).expand(len(n_q_B), rows)
        token_BQ = (start_B[:, None] + row_BQ).clamp_max(len(self.start) - 1)
        inside_BQ1 = (row_BQ < n_q_B[:, None])[..., None]
        stop_BQK = torch.minimum(self.stop[token_BQ], n_k_B[:, None, None])
        return self.start[token_BQ].clamp_min(0), stop_BQK.masked_fill(~inside_BQ1, 0)


def full() -> Mask:
    """Every query sees every key of its sequence."""
    return Mask()


def causal(window: int | None = None) -> Mask:
    """A query sees itself and what came before it; with `window` only the newest `window` of these, itself included."""
    if window is not None and window < 1:
        raise ConfigError(
            f"causal(window={window}): a window holds at least 1 key. Leave it out for no window."
        )
    return Mask(causal=True, window=window)


def intervals(start: Tensor, stop: Tensor) -> IntervalMask:
    """A mask of explicit intervals: start and stop [T, K] integers, K <= 4. Intervals of a row may overlap."""
    if start.shape != stop.shape or start.ndim != 2:
        raise ConfigError(
            f"intervals: start {tuple(start.shape)} and stop {tuple(stop.shape)} must both be [tokens, intervals]."
        )
    if not 1 <= start.shape[1] <= MOST_INTERVALS:
        raise ConfigError(
            f"intervals: {start.shape[1]} intervals a row; uni_attention expresses 1 to {MOST_INTERVALS}. "
            "Merge neighbours or split the call."
        )
    return IntervalMask(start.long(), stop.long())

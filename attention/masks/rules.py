"""Further mask rules: class words, BOS intervals in column form, keys of another sequence, and explicit intervals.

In the first line of each rule, a query at position p attends to the key at position k if the condition is true.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.masks.packed import MaskRows, PackedGeometry
from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, K intervals per row. p is a query's position among the keys, n the number
# of keys of its sequence.


@dataclass(frozen=True, slots=True, eq=False)
class ClassesRule:
    """Classes: (sees[q] & words[k]) != 0, for 32-bit words `sees` of the queries [T] and `words` of the keys [S]."""

    sees: Tensor
    words: Tensor

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        sees = geometry.check_tokens(self.sees, geometry.tokens_q, "sees")
        words = geometry.check_tokens(self.words, geometry.tokens_k, "words")
        return MaskRows(((torch.zeros_like(geometry.keys_T), geometry.keys_T),), words=(sees, words))


@dataclass(frozen=True, slots=True)
class BosIntervalRule:
    """Causal attention in which a BOS key (every `period`-th key) is visible only to its period: k <= p, and p < k + period.

    A row would need n / period intervals, but the queries that see a key are one interval, so the rule uses the column form.
    """

    period: int

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        sequence_S, place_S = geometry.locate_keys()
        queries_S = geometry.cu_q.diff()[sequence_S]
        # The query row at each key's position.
        row_S = place_S - (geometry.cu_k.diff()[sequence_S] - queries_S)
        is_bos_S = (place_S + 1) % self.period == 0
        stop_S = torch.where(is_bos_S, torch.minimum(row_S + self.period, queries_S), queries_S)
        causal_slot = (torch.zeros_like(geometry.place_T), geometry.place_T + 1)
        return MaskRows((causal_slot,), column=(row_S.clamp_min(0), stop_S.clamp_min(0)))


@dataclass(frozen=True, slots=True, eq=False)
class CrossRule:
    """Every key; with times, time_k[k] <= time_q[q], or < if `strict`. time_k must not decrease within a sequence."""

    time_q: Tensor | None
    time_k: Tensor | None
    strict: bool

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        if self.time_q is None or self.time_k is None:
            return MaskRows(((torch.zeros_like(geometry.keys_T), geometry.keys_T),))
        time_q = geometry.check_tokens(self.time_q, geometry.tokens_q, "time_q").double()
        time_k = geometry.check_tokens(self.time_k, geometry.tokens_k, "time_k").double()
        stop_T = _count_below(time_q, time_k, geometry, right=not self.strict)
        return MaskRows(((torch.zeros_like(stop_T), stop_T),))


def _count_below(time_q: Tensor, time_k: Tensor, geometry: PackedGeometry, right: bool) -> Tensor:
    """Count the keys of each query's sequence below its time [T], by bisection for all queries at once.

    With `right`, keys at the query's own time are counted too.
    """
    low, high = geometry.cu_k[geometry.sequence_T], geometry.cu_k[geometry.sequence_T] + geometry.keys_T
    sequence_start = low
    # Under torch.compile the number of keys is symbolic: there are enough bisections for any, so that one graph is valid for all.
    halvings = 32 if torch.compiler.is_compiling() else max(geometry.tokens_k, 1).bit_length()
    for _ in range(halvings):
        open_T = low < high
        middle = (low + high) // 2
        time = time_k[middle.clamp_max(max(geometry.tokens_k - 1, 0))] if geometry.tokens_k else time_q
        below = open_T & ((time <= time_q) if right else (time < time_q))
        low, high = torch.where(below, middle + 1, low), torch.where(open_T & ~below, middle, high)
    return low - sequence_start


@dataclass(frozen=True, slots=True, eq=False)
class IntervalsRule:
    """Explicit intervals: start[q, i] <= k < stop[q, i] for any i, with start and stop [T, K]."""

    start: Tensor
    stop: Tensor

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        if len(self.start) != geometry.tokens_q or self.start.device != geometry.cu_q.device:
            raise ConfigError(
                f"the mask has intervals for {len(self.start)} queries on {self.start.device}; this batch has "
                f"{geometry.tokens_q} queries on {geometry.cu_q.device}. "
                f"A mask of explicit intervals serves the batch it was made for."
            )
        start, stop = make_disjoint(self.start.long().clamp_min(0), self.stop.long())
        return MaskRows(tuple(zip(start.unbind(1), stop.unbind(1), strict=True)))


def make_disjoint(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Make the slots of each row [T, K] disjoint without changing the set of keys.

    A slot begins where the slots that begin before it have ended. Slots keep their numbers, so that slot 0 of every
    row remains slot 0.
    """
    if start.shape[1] == 1:
        return start, stop
    order = torch.where(start < stop, start, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
    sorted_start, sorted_stop = start.gather(1, order), stop.gather(1, order)
    previous_stop = torch.cat([torch.zeros_like(stop[:, :1]), sorted_stop.cummax(1).values[:, :-1]], 1)
    return torch.empty_like(start).scatter(1, order, torch.maximum(sorted_start, previous_stop)), stop

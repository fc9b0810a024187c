"""Mask rules that are not spans: class words, BOS intervals as columns, keys of another sequence, explicit intervals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.masks.packed import MaskRows, PackedGeometry
from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, K intervals a row; p the query's place, n the keys of its sequence.


@dataclass(frozen=True, slots=True, eq=False)
class ClassesRule:
    """(sees[q] & words[k]) != 0: sees [T] and words [S], 32-bit."""

    sees: Tensor
    words: Tensor

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        sees = geometry.check_tokens(self.sees, geometry.tokens_q, "sees")
        words = geometry.check_tokens(self.words, geometry.tokens_k, "words")
        return MaskRows(((torch.zeros_like(geometry.keys_T), geometry.keys_T),), words=(sees, words))


@dataclass(frozen=True, slots=True)
class BosIntervalRule:
    """k <= p, and a BOS key (every `period`-th) only for p < k + period. A row would need n / period intervals, a key one."""

    period: int

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        sequence_S, place_S = geometry.locate_keys()
        queries_S = geometry.cu_q.diff()[sequence_S]
        row_S = place_S - (
            geometry.cu_k.diff()[sequence_S] - queries_S
        )  # The query row at this key's position.
        bos_S = (place_S + 1) % self.period == 0
        stop_S = torch.where(bos_S, torch.minimum(row_S + self.period, queries_S), queries_S)
        causal = (torch.zeros_like(geometry.place_T), geometry.place_T + 1)
        return MaskRows((causal,), column=(row_S.clamp_min(0), stop_S.clamp_min(0)))


@dataclass(frozen=True, slots=True, eq=False)
class CrossRule:
    """Every key; with times, the keys no younger than the query (older, if `strict`). time_k rises in each sequence."""

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


def _count_below(time_q: Tensor, time_k: Tensor, at: PackedGeometry, right: bool) -> Tensor:
    """Count the keys [T] of a query's sequence below its time, by bisection in all sequences at once."""
    low, high = at.cu_k[at.sequence_T], at.cu_k[at.sequence_T] + at.keys_T
    begin = low
    # Under torch.compile the number of keys is symbolic: there are enough bisections for any, so that one graph is valid for all.
    halvings = 32 if torch.compiler.is_compiling() else max(at.tokens_k, 1).bit_length()
    for _ in range(halvings):
        open_T = low < high
        middle = (low + high) // 2
        time = time_k[middle.clamp_max(max(at.tokens_k - 1, 0))] if at.tokens_k else time_q
        below = open_T & ((time <= time_q) if right else (time < time_q))
        low, high = torch.where(below, middle + 1, low), torch.where(open_T & ~below, middle, high)
    return low - begin


@dataclass(frozen=True, slots=True, eq=False)
class IntervalsRule:
    """Explicit start and stop [T, K] of the packed queries, made disjoint."""

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
    ended = torch.cat([torch.zeros_like(stop[:, :1]), sorted_stop.cummax(1).values[:, :-1]], 1)
    return torch.empty_like(start).scatter(1, order, torch.maximum(sorted_start, ended)), stop

"""Spans: masks whose rows are one run of keys around the diagonal, or two: the full, causal and windowed family."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nonet.attention.packed import Packed, PerSequence, Rows

# Shapes: T packed query tokens; p the query's place, n the keys of its sequence.


@dataclass(frozen=True, slots=True)
class Full:
    """k < n."""

    def rows(self, at: Packed) -> Rows:
        return Rows(((torch.zeros_like(at.keys_T), at.keys_T),))


@dataclass(frozen=True, slots=True)
class Causal:
    """k <= p, and of these the newest `window`."""

    window: int | None = None

    def rows(self, at: Packed) -> Rows:
        start_T = (
            torch.zeros_like(at.place_T)
            if self.window is None
            else (at.place_T - self.window + 1).clamp_min(0)
        )
        return Rows(((start_T, at.place_T + 1),))


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLm:
    """k < prefix or k <= p."""

    prefix: PerSequence

    def rows(self, at: Packed) -> Rows:
        prefix = at.by_query(self.prefix, "prefix")
        stop_T = (at.place_T + 1).clamp_min(prefix)  # type: ignore[arg-type]
        return Rows(((torch.zeros_like(stop_T), stop_T),))


@dataclass(frozen=True, slots=True)
class Window:
    """p - left <= k <= p + right."""

    left: int
    right: int

    def rows(self, at: Packed) -> Rows:
        return Rows((((at.place_T - self.left).clamp_min(0), at.place_T + self.right + 1),))


@dataclass(frozen=True, slots=True)
class SinksWindow:
    """k <= p and (k < sinks or k > p - window); with `sinks_see_all`, rows p < sinks see every key."""

    sinks: int
    window: int
    sinks_see_all: bool = False

    def rows(self, at: Packed) -> Rows:
        stop_T = at.place_T + 1
        first = (torch.zeros_like(stop_T), stop_T.clamp_max(self.sinks))
        near_T = (stop_T - self.window).clamp_min(self.sinks)
        if self.sinks_see_all:
            sink_T = (at.place_T >= 0) & (at.place_T < self.sinks)
            first = (first[0], torch.where(sink_T, at.keys_T, first[1]))
        return Rows((first, (near_T, stop_T)))

"""Mask rules whose rows are one or two runs of keys around the diagonal: the full, causal and windowed family.

Segments are masks of consecutive documents or sessions inside the packed keys, with one slot (two with a shared
prefix).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.masks.packed import MaskRows, PackedGeometry, PerSequence
from nonet.errors import ConfigError

# Shapes: T packed query tokens; p the query's place, n the keys of its sequence.


@dataclass(frozen=True, slots=True)
class FullRule:
    """k < n."""

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        return MaskRows(((torch.zeros_like(geometry.keys_T), geometry.keys_T),))


@dataclass(frozen=True, slots=True)
class CausalRule:
    """k <= p, and of these the newest `window`."""

    window: int | None = None

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        start_T = (
            torch.zeros_like(geometry.place_T)
            if self.window is None
            else (geometry.place_T - self.window + 1).clamp_min(0)
        )
        return MaskRows(((start_T, geometry.place_T + 1),))


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLmRule:
    """k < prefix or k <= p."""

    prefix: PerSequence

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        prefix = geometry.expand_to_queries(self.prefix, "prefix")
        stop_T = (geometry.place_T + 1).clamp_min(prefix)  # type: ignore[arg-type]
        return MaskRows(((torch.zeros_like(stop_T), stop_T),))


@dataclass(frozen=True, slots=True)
class WindowRule:
    """p - left <= k <= p + right."""

    left: int
    right: int

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        return MaskRows((((geometry.place_T - self.left).clamp_min(0), geometry.place_T + self.right + 1),))


@dataclass(frozen=True, slots=True)
class SinksWindowRule:
    """k <= p and (k < sinks or k > p - window); with `sinks_see_all`, rows p < sinks see every key."""

    sinks: int
    window: int
    sinks_see_all: bool = False

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        stop_T = geometry.place_T + 1
        first = (torch.zeros_like(stop_T), stop_T.clamp_max(self.sinks))
        near_T = (stop_T - self.window).clamp_min(self.sinks)
        if self.sinks_see_all:
            sink_T = (geometry.place_T >= 0) & (geometry.place_T < self.sinks)
            first = (first[0], torch.where(sink_T, geometry.keys_T, first[1]))
        return MaskRows((first, (near_T, stop_T)))


# Shapes: T packed query tokens, M segments; p the query's place.


@dataclass(frozen=True, slots=True, eq=False)
class SegmentsRule:
    """A query sees the keys of its own segment and, causally, the first `prefix` keys of its sequence.

    If `causal`, it sees the keys of its segment up to itself. `cuts` [M + 1] are packed key offsets from 0 to S;
    the end of a sequence also ends its segment.
    """

    cuts: Tensor
    causal: bool
    prefix: PerSequence

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        if self.cuts.ndim != 1 or not len(self.cuts) or self.cuts.device != geometry.cu_q.device:
            raise ConfigError(
                f"segment cuts of shape {list(self.cuts.shape)} on {self.cuts.device}; wanted [segments + 1] packed key "
                f"offsets from 0 to {geometry.tokens_k} on {geometry.cu_q.device}."
            )
        begin_T = geometry.cu_k[geometry.sequence_T]
        cuts = self.cuts.long()
        segment_T = torch.searchsorted(cuts[1:].contiguous(), geometry.place_T + begin_T, right=True)
        last = max(len(cuts) - 2, 0)
        start = (cuts[segment_T.clamp_max(last)] - begin_T).clamp_min(0)
        stop = geometry.place_T + 1 if self.causal else cuts[(segment_T + 1).clamp_max(last + 1)] - begin_T
        stop = stop.masked_fill(geometry.place_T < 0, 0)
        if isinstance(self.prefix, int) and self.prefix == 0:
            return MaskRows(((start, stop),))
        prefix = geometry.expand_to_queries(self.prefix, "prefix")
        shared = (geometry.place_T + 1).clamp_max(prefix)  # type: ignore[arg-type]
        return MaskRows(((torch.zeros_like(shared), shared), (start.clamp_min(prefix), stop)))  # type: ignore[arg-type]

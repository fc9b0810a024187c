"""Mask rules whose rows are one or two intervals of keys: full, causal, prefix, windowed and segmented attention.

In the first line of each rule, a query at position p attends to the key at position k if the condition is true.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.masks.packed import MaskRows, PackedGeometry, PerSequence
from nonet.errors import ConfigError

# Shapes: T packed query tokens, M segments. p is a query's position among the keys, n the number of keys of its sequence.


@dataclass(frozen=True, slots=True)
class FullRule:
    """Full attention: k < n."""

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        return MaskRows(((torch.zeros_like(geometry.keys_T), geometry.keys_T),))


@dataclass(frozen=True, slots=True)
class CausalRule:
    """Causal attention: p - window < k <= p; without a window, k <= p."""

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
    """Causal attention with a bidirectional prefix: k < prefix or k <= p."""

    prefix: PerSequence

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        prefix = geometry.expand_to_queries(self.prefix, "prefix")
        stop_T = (geometry.place_T + 1).clamp_min(prefix)  # type: ignore[arg-type]
        return MaskRows(((torch.zeros_like(stop_T), stop_T),))


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Sliding-window attention: p - left <= k <= p + right."""

    left: int
    right: int

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        return MaskRows((((geometry.place_T - self.left).clamp_min(0), geometry.place_T + self.right + 1),))


@dataclass(frozen=True, slots=True)
class SinksWindowRule:
    """Causal window with attention sinks: k <= p and (k < sinks or k > p - window).

    With `sinks_see_all`, the queries p < sinks attend to every key.
    """

    sinks: int
    window: int
    sinks_see_all: bool = False

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        stop_T = geometry.place_T + 1
        sinks_slot = (torch.zeros_like(stop_T), stop_T.clamp_max(self.sinks))
        window_start_T = (stop_T - self.window).clamp_min(self.sinks)
        if self.sinks_see_all:
            is_sink_T = (geometry.place_T >= 0) & (geometry.place_T < self.sinks)
            sinks_slot = (sinks_slot[0], torch.where(is_sink_T, geometry.keys_T, sinks_slot[1]))
        return MaskRows((sinks_slot, (window_start_T, stop_T)))


@dataclass(frozen=True, slots=True, eq=False)
class SegmentsRule:
    """Segments such as documents or sessions: a query attends to its own segment and to a shared prefix.

    Attributes:
        cuts: Packed key offsets of the segments [M + 1], from 0 to the number of packed keys. The end of a sequence also
            ends its last segment.
        causal: Whether a query attends only to the keys of its segment up to itself.
        prefix: Number of keys at the start of a sequence to which its queries attend causally.
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
        sequence_start_T = geometry.cu_k[geometry.sequence_T]
        cuts = self.cuts.long()
        segment_T = torch.searchsorted(cuts[1:].contiguous(), geometry.place_T + sequence_start_T, right=True)
        last_segment = max(len(cuts) - 2, 0)
        start = (cuts[segment_T.clamp_max(last_segment)] - sequence_start_T).clamp_min(0)
        stop = (
            geometry.place_T + 1
            if self.causal
            else cuts[(segment_T + 1).clamp_max(last_segment + 1)] - sequence_start_T
        )
        stop = stop.masked_fill(geometry.place_T < 0, 0)  # A query before all keys is in no segment.
        if isinstance(self.prefix, int) and self.prefix == 0:
            return MaskRows(((start, stop),))
        prefix = geometry.expand_to_queries(self.prefix, "prefix")
        prefix_stop = (geometry.place_T + 1).clamp_max(prefix)  # type: ignore[arg-type]
        return MaskRows(((torch.zeros_like(prefix_stop), prefix_stop), (start.clamp_min(prefix), stop)))  # type: ignore[arg-type]

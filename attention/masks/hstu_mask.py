"""The mask rules of HSTU and of target groups: rows [contextual | history | targets] with two slots, history and own.

The whole family of Meta's HSTU (targets, contextual prefix, max attention length, min full length) is two row
intervals, equal to `_get_valid_attn_mask` of generative-recommenders for every parameter
(tests/attention/masks/test_mask.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.attention.masks.packed import MaskRows, PackedGeometry, PerSequence

# Shapes: T packed query tokens; p the query's place, n the keys of its sequence, h = n - targets.


@dataclass(frozen=True, slots=True, eq=False)
class HstuRule:
    """The mask of HSTU, defined by ids as in Meta's implementation.

    id = min(max(p - c + 1, 0), top) with top = n - c + 1 - targets (p and n - targets if c = 0). A query sees
    itself and the keys of lower id, at most `length` ids below it unless its id >= top - full; a contextual query
    (id 0) sees every key below top. Contextual keys leave the window like any other.
    """

    targets: PerSequence
    contextual: PerSequence
    length: int
    full: int

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        p, n = geometry.place_T, geometry.keys_T
        h = n - geometry.expand_to_queries(self.targets, "targets")
        c = geometry.expand_to_queries(self.contextual, "contextual")
        # If targets extend into the contextual prefix, every id is `top`, and a query sees only itself.
        alone = torch.as_tensor((c > h) & (c > 0) if isinstance(c, Tensor) else (h < c) & (c > 0))
        start, stop = self._find_window_start(p, h, c), torch.minimum(p + 1, h)
        contextual = p < c
        start, stop = start.masked_fill(contextual, 0), torch.where(contextual, h, stop)
        start, stop = torch.where(alone, p, start), torch.where(alone, p + 1, stop)
        if isinstance(self.targets, int) and self.targets == 0:
            return MaskRows(((start, stop),))
        own = (p >= h) & ~alone
        return MaskRows(((start, stop), (p, torch.where(own, p + 1, p))))

    def _find_window_start(self, p: Tensor, h: Tensor, c: Any) -> Tensor:
        """Compute the first history key [T] within `length` ids."""
        if self.length <= 0:
            return torch.zeros_like(p)
        shift = (c - 1).clamp_min(0) if isinstance(c, Tensor) else max(c - 1, 0)  # id = place - shift
        lowest = torch.minimum(p, h) - shift - self.length
        start = torch.where(lowest <= 0, 0, lowest + shift)
        if self.full > 0:
            start = start.masked_fill(torch.minimum(p, h) >= h - self.full, 0)
        return start


@dataclass(frozen=True, slots=True, eq=False)
class TargetGroupsRule:
    """History is causal; a target sees the history and, of its own group of `size` targets, itself and those before."""

    targets: PerSequence
    size: int

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        p = geometry.place_T
        h = geometry.keys_T - geometry.expand_to_queries(self.targets, "targets")
        group = h + (p - h) // self.size * self.size
        return MaskRows(
            ((torch.zeros_like(p), torch.minimum(p + 1, h)), (group, torch.where(p >= h, p + 1, group)))
        )

"""The mask rules of HSTU and of target groups, for sequences of [contextual tokens | history | targets].

A row of these masks has two intervals (slots): one in the contextual tokens and the history, and one in the targets.
All parameters of Meta's HSTU (targets, contextual prefix, maximum attention length, minimum full length) are supported;
the masks equal `_get_valid_attn_mask` of generative-recommenders (tests/attention/masks/test_mask.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.attention.masks.packed import MaskRows, PackedGeometry, PerSequence

# Shapes: T packed query tokens. p is a query's position among the keys, n the number of keys of its sequence, h = n - targets
# the number of keys before the targets, c the number of contextual keys.


@dataclass(frozen=True, slots=True, eq=False)
class HstuRule:
    """The mask of HSTU, defined by token ids as in Meta's implementation.

    The id of a token at position p is min(max(p - c + 1, 0), top) with top = h - c + 1, or min(p, top) with top = h if c = 0.
    So all contextual tokens have id 0, and all targets have id `top`. A query attends to itself and to keys with a lower id.
    If `length` > 0, these keys are limited to the `length` ids below its own; if `full` > 0, queries with an id of at least
    top - full are exempt from this limit. A contextual query attends to every key with an id below `top`.

    Attributes:
        targets: Number of targets at the end of each sequence.
        contextual: Number c of contextual tokens at the start of each sequence. `length` limits access to them as to other keys.
        length: Maximum attention length in ids; 0 for no limit.
        full: Minimum full length in ids; 0 for none.
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
        sees_only_itself = torch.as_tensor((c > h) & (c > 0) if isinstance(c, Tensor) else (h < c) & (c > 0))
        start, stop = self._find_window_start(p, h, c), torch.minimum(p + 1, h)
        contextual = p < c
        start, stop = start.masked_fill(contextual, 0), torch.where(contextual, h, stop)
        start, stop = torch.where(sees_only_itself, p, start), torch.where(sees_only_itself, p + 1, stop)
        if isinstance(self.targets, int) and self.targets == 0:
            return MaskRows(((start, stop),))
        own = (p >= h) & ~sees_only_itself  # Targets, whose own key is the second slot.
        return MaskRows(((start, stop), (p, torch.where(own, p + 1, p))))

    def _find_window_start(self, p: Tensor, h: Tensor, c: Any) -> Tensor:
        """Compute the position of the first key [T] within the `length` ids below each query's id."""
        if self.length <= 0:
            return torch.zeros_like(p)
        shift = (c - 1).clamp_min(0) if isinstance(c, Tensor) else max(c - 1, 0)  # id = p - shift
        lowest_id = torch.minimum(p, h) - shift - self.length
        # Id 0 has all contextual tokens, from position 0.
        start = torch.where(lowest_id <= 0, 0, lowest_id + shift)
        if self.full > 0:
            start = start.masked_fill(torch.minimum(p, h) >= h - self.full, 0)
        return start


@dataclass(frozen=True, slots=True, eq=False)
class TargetGroupsRule:
    """Causal attention in the history and in groups of `size` targets; a target attends to the history and its own group only.

    Attributes:
        targets: Number of targets at the end of each sequence.
        size: Number of consecutive targets in a group.
    """

    targets: PerSequence
    size: int

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        p = geometry.place_T
        h = geometry.keys_T - geometry.expand_to_queries(self.targets, "targets")
        group_start = h + (p - h) // self.size * self.size
        return MaskRows(
            (
                (torch.zeros_like(p), torch.minimum(p + 1, h)),
                (group_start, torch.where(p >= h, p + 1, group_start)),
            )
        )

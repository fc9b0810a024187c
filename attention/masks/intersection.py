"""The mask rule of the keys that two masks both allow.

The intersection of two intervals is an interval, so masks of K1 and K2 slots have an intersection of K1 x K2 slots. Slots that
no row uses are dropped. A row that uses more than four slots is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nonet.attention.masks.packed import MaskRows, PackedGeometry
from nonet.errors import ConfigError

MOST_SLOTS = 4  # The maximum number of slots (intervals) per row.
_WORD_BITS = 32

# Shapes: T packed query tokens, S packed key tokens, K slots.


class MaskRule(Protocol):
    """A mask rule, which computes the row intervals of a packed batch."""

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        ...


@dataclass(frozen=True, slots=True)
class IntersectionRule:
    """The intersection of two masks: a query sees the keys that both rules allow."""

    one: MaskRule
    other: MaskRule

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        one, other = self.one.compute_rows(geometry), self.other.compute_rows(geometry)
        slots = [
            (torch.maximum(start, other_start), torch.minimum(stop, other_stop))
            for start, stop in one.slots
            for other_start, other_stop in other.slots
        ]
        return MaskRows(drop_empty_slots(slots), _intersect_columns(one, other), _intersect_words(one, other))


def drop_empty_slots(slots: list[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Reduce slots to at most four with the same keys.

    Raises:
        ConfigError: If a row needs more.
    """
    if len(slots) > MOST_SLOTS:
        slots = [(start, stop) for start, stop in slots if bool((start < stop).any())] or slots[:1]
    if len(slots) <= MOST_SLOTS:
        return tuple(slots)
    start, stop = torch.stack([s for s, _ in slots], 1), torch.stack([e for _, e in slots], 1)
    max_used = int((start < stop).sum(1).max())
    if max_used > MOST_SLOTS:
        raise ConfigError(
            f"this composition needs {max_used} intervals in a row (of {len(slots)} slots); uni_attention expresses "
            f"{MOST_SLOTS}. Compose fewer masks, or split the call and merge by log-sum-exp."
        )
    order = (start >= stop).to(torch.int8).argsort(dim=1, stable=True)[:, :MOST_SLOTS]
    return tuple(zip(start.gather(1, order).unbind(1), stop.gather(1, order).unbind(1), strict=True))


def _intersect_columns(one: MaskRows, other: MaskRows) -> tuple[Tensor, Tensor] | None:
    """Return the column intervals that both masks allow; None if neither mask has columns."""
    if one.column is None or other.column is None:
        return one.column or other.column
    return torch.maximum(one.column[0], other.column[0]), torch.minimum(one.column[1], other.column[1])


def _intersect_words(one: MaskRows, other: MaskRows) -> tuple[Tensor, Tensor] | None:
    """Combine two class conditions into one, with a bit for every pair of their bits."""
    if one.words is None or other.words is None:
        return one.words or other.words
    bits_one, bits_other = _list_used_bits(one.words), _list_used_bits(other.words)
    if len(bits_one) * len(bits_other) > _WORD_BITS:
        raise ConfigError(
            f"composing class words of {len(bits_one)} and {len(bits_other)} classes needs their product in {_WORD_BITS} bits; "
            "use fewer classes."
        )
    pairs = [(i, j) for i in bits_one for j in bits_other]
    return _combine_bits(one.words[0], other.words[0], pairs), _combine_bits(
        one.words[1], other.words[1], pairs
    )


def _list_used_bits(words: tuple[Tensor, Tensor]) -> list[int]:
    """List the bits that both a query and a key use."""
    return [bit for bit in range(_WORD_BITS) if all(bool((word.long() >> bit & 1).any()) for word in words)]


def _combine_bits(one: Tensor, other: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """Build words in which bit n is set if bit i of `one` and bit j of `other` are, for pair number n (i, j)."""
    out = torch.zeros(len(one), dtype=torch.int64, device=one.device)
    for number, (i, j) in enumerate(pairs):
        out |= (one.long() >> i & other.long() >> j & 1) << number
    return torch.where(out >= 1 << 31, out - (1 << 32), out)  # As signed 32-bit numbers.

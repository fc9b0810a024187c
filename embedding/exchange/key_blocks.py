"""Blocks of an exchange of keys: a header, the number of keys, two flags, and the keys that fit.

The length of a block is the largest number of keys that recently followed the same exchange, plus an eighth. Both ends know that
number, so they agree without communication.
"""

# Shapes: W ranks, U keys of this rank.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nonet.embedding.exchange.header import COUNT, WORDS, ExchangeHeader


@dataclass(slots=True)
class BlockCapacity:
    """The number of keys that fit into a block, by rank [W]: for sent and for received blocks."""

    given: list[int]
    got: list[int]

    def grow(self, given_counts: list[int], got_counts: list[int]) -> BlockCapacity:
        """Return the capacity for the next exchange, after these numbers of keys [W] were sent and received."""
        return BlockCapacity(_compute_room(given_counts, self.given), _compute_room(got_counts, self.got))


def _compute_room(counts: list[int], room: list[int]) -> list[int]:
    """Return the room [W] of the next blocks: an eighth more than these counts, but at least 7/8 of the room before."""
    return [
        max(count + count // 8 + 16 if count else 0, space - (space + 7) // 8)
        for count, space in zip(counts, room, strict=True)
    ]


def fill_blocks(
    blocks: np.ndarray,
    header: ExchangeHeader | None,
    keys: np.ndarray,
    counts: list[int],
    room: list[int],
    flags: tuple[int, int],
) -> None:
    """Write the blocks of an exchange.

    Args:
        blocks: The memory of all blocks, int64 [sum(room) + W * WORDS].
        header: The header; None on a shard.
        keys: Keys in the order of the ranks, int64 [U].
        counts: The number of keys for each rank [W].
        room: The number of keys that fit into each block [W].
        flags: The values of SAME and MORE.
    """
    words = header.to_words() if header else [0] * COUNT
    at, start = 0, 0
    for count, space in zip(counts, room, strict=True):
        blocks[at : at + WORDS] = [*words, count, *flags]
        fits = min(count, space)
        blocks[at + WORDS : at + WORDS + fits] = keys[start : start + fits]
        at, start = at + WORDS + space, start + count


def split_views(array: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Split an array into views of consecutive parts."""
    parts, start = [], 0
    for size in sizes:
        parts.append(array[start : start + size])
        start += size
    return parts

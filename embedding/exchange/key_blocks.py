"""Blocks of an exchange of keys: a header, the number of keys, two flags, and the keys that fit.

The length of a block depends on the largest number of keys that the two ranks recently exchanged after an exchange of the same
kind: that number plus an eighth. Both ends know it, so they agree on the length without communication.
"""

# Shapes: W ranks, U keys of this rank.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nonet.embedding.exchange.header import BLOCK_WORDS, COUNT_WORD, ExchangeHeader


@dataclass(slots=True)
class BlockCapacity:
    """The number of keys that fit into a block, by rank [W]: for sent and for received blocks."""

    given: list[int]
    got: list[int]

    def grow(self, given_counts: list[int], got_counts: list[int]) -> BlockCapacity:
        """Return the capacity for the next exchange, after these numbers of keys [W] were sent and received."""
        return BlockCapacity(
            _compute_capacity(given_counts, self.given), _compute_capacity(got_counts, self.got)
        )


def _compute_capacity(counts: list[int], capacities: list[int]) -> list[int]:
    """Return the number of keys that the next blocks hold [W].

    It is an eighth and 16 more than the last counts [W], but at least 7/8 of the last capacities [W], so that it shrinks slowly.
    """
    return [
        max(count + count // 8 + 16 if count else 0, capacity - (capacity + 7) // 8)
        for count, capacity in zip(counts, capacities, strict=True)
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
        blocks: The memory of all blocks, int64 [sum(room) + W * BLOCK_WORDS].
        header: The header; None on a shard.
        keys: Keys in the order of the ranks, int64 [U].
        counts: The number of keys for each rank [W].
        room: The number of keys that fit into each block [W].
        flags: The values of SAME_WORD and MORE_WORD.
    """
    header_words = header.to_words() if header else [0] * COUNT_WORD
    block_start, key_start = 0, 0
    for count, capacity in zip(counts, room, strict=True):
        keys_start = block_start + BLOCK_WORDS
        blocks[block_start:keys_start] = [*header_words, count, *flags]
        fitting = min(count, capacity)
        blocks[keys_start : keys_start + fitting] = keys[key_start : key_start + fitting]
        block_start, key_start = keys_start + capacity, key_start + count


def split_views(array: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Split an array into views of consecutive parts."""
    parts, start = [], 0
    for size in sizes:
        parts.append(array[start : start + size])
        start += size
    return parts

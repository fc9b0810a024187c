"""The routes of a batch's keys: each distinct key once, sorted by the rank that owns it.

`make_route` has no side effects. Duplicates are found without a sort, by writing positions into cells addressed by the hash
that also gives the slice. Cells contain positions and never keys, so that every key value is legal. 8,192 keys take
0.24 ms in NumPy. `select_router` returns the C++ router, or the NumPy one if the core is unavailable; both give the
same route.
"""

# Shapes: N requested keys, U distinct keys, W ranks, D width.

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nonet.embedding import SliceMap, splitmix64
from nonet.embedding.tables import NativeUnavailable, load_library

_SLICE_SHIFT = np.uint64(48)


@dataclass(frozen=True, slots=True)
class KeyRoute:
    """The distinct keys of a batch by owner, and how to map them back to the requested keys.

    Attributes:
        requested: The requested keys [N].
        keys: The distinct keys, sorted by owner [U].
        counts: The number of distinct keys for each rank [W].
        place: The position of each requested key among the distinct ones [N].
    """

    requested: np.ndarray
    keys: np.ndarray
    counts: list[int]
    place: np.ndarray

    @property
    def distinct(self) -> bool:
        """Whether no key was requested twice."""
        return len(self.keys) == len(self.place)

    def select_keys(self, key_mask: np.ndarray) -> KeyRoute:
        """Return the route of the distinct keys that the mask `key_mask` [U] selects, each requested once."""
        keys, rank_stops = self.keys[key_mask], np.cumsum(self.counts)
        selected_before = np.concatenate([[0], np.cumsum(key_mask)])
        counts = [
            int(selected_before[stop] - selected_before[stop - count])
            for stop, count in zip(rank_stops, self.counts, strict=True)
        ]
        return KeyRoute(keys, keys, counts, np.arange(len(keys)))

    def move_to_end(self, start: int, count: int, unchanged: bool) -> KeyRoute:
        """Return the route for rows [U, D] in which a block of rows was moved behind all others.

        Args:
            start: The first row of the block.
            count: The number of rows in the block.
            unchanged: Whether the rows were not moved; the route is then returned as it is.
        """
        stop = start + count
        if unchanged or not count or stop == len(self.keys):
            return self
        new_positions = np.arange(len(self.keys))
        new_positions[start:stop] += len(self.keys) - stop
        new_positions[stop:] -= count
        return KeyRoute(self.requested, self.keys, self.counts, new_positions[self.place])

    def spread_rows(self, rows: Tensor) -> Tensor:
        """Expand rows [U, D] of the distinct keys to rows [N, D] of the requested keys."""
        return rows.index_select(0, torch.from_numpy(self.place))

    def sum_gradients(self, grads: Tensor) -> Tensor:
        """Sum gradients [N, D] over equal keys in position order and return [U, D]."""
        place = torch.from_numpy(self.place)
        if self.distinct:
            return torch.empty_like(grads).index_copy_(0, place, grads)
        return grads.new_zeros(len(self.keys), grads.shape[1]).index_add_(0, place, grads)


# (keys [N], owner of each slice [65536] uint16, number of shards)
# -> (distinct keys [U] sorted by owner, number of keys per shard, place of each requested key [N])
Router = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray, np.ndarray]]


def make_route(
    keys: np.ndarray, slices: SliceMap, world: int, first: int = 0, router: Router | None = None
) -> KeyRoute:
    """Compute the route of keys to shards.

    Args:
        keys: Requested keys, int64 [N].
        slices: The map of slices to shards.
        world: W, the number of ranks.
        first: The rank of the first shard; the shards have successive ranks.
        router: The router; `route_with_numpy` by default.
    """
    all_keys = keys.copy()
    distinct_keys, shard_counts, place = (router or route_with_numpy)(all_keys, slices.owners, slices.shards)
    counts = [0] * world
    counts[first : first + slices.shards] = shard_counts.tolist()
    return KeyRoute(all_keys, distinct_keys, counts, place)


def route_with_numpy(
    keys: np.ndarray, owners: np.ndarray, shards: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the distinct keys and sort them by owner, in NumPy.

    Args:
        keys: Requested keys, int64 [N].
        owners: The owner of each slice, uint16 [65536].
        shards: The number of shards.

    Returns:
        The distinct keys [U] sorted by owner, the number of keys per shard, and each requested key's place among the
        distinct ones [N].
    """
    hashes = splitmix64(keys)
    representatives = _find_representatives(keys, hashes)
    distinct = np.flatnonzero(representatives == np.arange(len(keys)))  # The positions of the distinct keys.
    owner = owners[hashes[distinct] >> _SLICE_SHIFT]
    order = distinct[np.argsort(owner, kind="stable")]
    place = np.empty(len(keys), dtype=np.int64)
    place[order] = np.arange(len(order))
    return keys[order], np.bincount(owner, minlength=shards), place[representatives]


def _find_representatives(keys: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Return for each key the position of a key equal to it, the same one for all equal keys, as int64 [N].

    Each unresolved position is written to a cell of a hash table, and the position that is read from the cell represents
    the key if their keys are equal. Keys that collided with another key are tried again with other bits of the hash.
    """
    representatives = np.arange(len(keys))
    unresolved, shift = np.arange(len(keys)), 0
    while unresolved.size:
        # At least four cells per key, so that few keys collide.
        bits = max(4, int(4 * unresolved.size - 1).bit_length())
        cells = ((hashes[unresolved] >> np.uint64(shift)) & np.uint64((1 << bits) - 1)).astype(np.int64)
        cell_positions = np.empty(1 << bits, dtype=np.int64)
        # The last write wins, so the first position represents the key.
        cell_positions[cells[::-1]] = unresolved[::-1]
        found = cell_positions[cells]
        representatives[unresolved] = found
        unresolved = unresolved[keys[found] != keys[unresolved]]
        shift = (shift + 7) % 40
        if shift == 0:  # Every window of the hash was tried: mix again, so that the loop ends for any keys.
            hashes = splitmix64(hashes)
    return representatives


_MAX_CORE_KEYS = 1 << 30  # The core's positions are int32.


class _ScratchMemory(threading.local):
    """Scratch memory of a thread, which only grows: a new allocation would take a third of a route's time."""

    def __init__(self) -> None:
        self._count = 0

    def reserve(self, count: int) -> list[int]:
        """Return the addresses of scratch arrays for a batch of `count` keys: cells, keys and shards."""
        if count > self._count:
            self._arrays = (
                np.empty(_count_cells(count), np.int32),
                np.empty(count, np.int64),
                np.empty(count, np.int32),
            )
            self._count, self._addresses = count, [array.ctypes.data for array in self._arrays]
        return self._addresses


def _count_cells(count: int) -> int:
    """Return the number of hash cells for `count` keys: a power of two of at least four per key."""
    return 1 << max(4, (4 * count - 1).bit_length())


@cache
def select_router() -> Router:
    """Return the C++ router, or `route_with_numpy` if there is no core."""
    try:
        call = load_library().nonet_route
    except NativeUnavailable:
        return route_with_numpy
    scratch_memory = _ScratchMemory()
    call.restype = ctypes.c_int64
    call.argtypes = [ctypes.c_void_p, ctypes.c_int64] * 3 + [ctypes.c_void_p] * 5

    def route_with_core(
        keys: np.ndarray, owners: np.ndarray, shards: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count = len(keys)
        if not 0 < count < _MAX_CORE_KEYS:
            return route_with_numpy(keys, owners, shards)
        keys = np.ascontiguousarray(keys)
        out, place, counts = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(shards, np.int64)
        cells, *scratch = scratch_memory.reserve(count)
        inputs = keys.ctypes.data, count, owners.ctypes.data, shards
        results = [array.ctypes.data for array in (out, counts, place)]
        distinct_count = call(*inputs, cells, _count_cells(count) - 1, *scratch, *results)
        return out[:distinct_count], counts, place

    return route_with_core

"""Where a batch's keys go: each distinct key once, sorted by the rank that owns it.

`make_route` is pure. A key is found to be a duplicate by stamping positions into cells of its hash, the very hash that gives
the slice: no sort over keys. Cells hold positions and never keys, so every key value is legal. 8,192 keys take
0.24 ms in NumPy; `fast_route` gives the same route by C++.

The router in C++, or NumPy's where the core is not to be had; both give the same route.
"""

from __future__ import annotations

import ctypes
import threading

# Shapes: N keys asked for, U distinct ones, W ranks.
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
    """Distinct keys [U] sorted by owner, how many go to each rank [W], and where each asked key stands among them [N]."""

    asked: np.ndarray
    keys: np.ndarray
    counts: list[int]
    place: np.ndarray

    @property
    def distinct(self) -> bool:
        """Whether no key was asked for twice."""
        return len(self.keys) == len(self.place)

    def select_keys(self, key_mask: np.ndarray) -> KeyRoute:
        """The route of some of the distinct keys, `chosen` [U] bool, each asked for once."""
        keys, stop = self.keys[key_mask], np.cumsum(self.counts)
        until = np.concatenate([[0], np.cumsum(key_mask)])
        counts = [int(until[end] - until[end - count]) for end, count in zip(stop, self.counts, strict=True)]
        return KeyRoute(keys, keys, counts, np.arange(len(keys)))

    def move_to_end(self, start: int, count: int, unchanged: bool) -> KeyRoute:
        """The route when the `count` rows from `start` stand behind all others; `first`: when they stay where they are."""
        stop = start + count
        if unchanged or not count or stop == len(self.keys):
            return self
        to = np.arange(len(self.keys))
        to[start:stop] += len(self.keys) - stop
        to[stop:] -= count
        return KeyRoute(self.asked, self.keys, self.counts, to[self.place])

    def spread_rows(self, rows: Tensor) -> Tensor:
        """Rows [U, D] of the distinct keys as rows [N, D] of the asked ones."""
        return rows.index_select(0, torch.from_numpy(self.place))

    def sum_gradients(self, grads: Tensor) -> Tensor:
        """Gradients [N, D] summed over equal keys in position order: [U, D]."""
        place = torch.from_numpy(self.place)
        if self.distinct:
            return torch.empty_like(grads).index_copy_(0, place, grads)
        return grads.new_zeros(len(self.keys), grads.shape[1]).index_add_(0, place, grads)


# (keys [N], owner of each slice [65536] uint16, shards) -> distinct keys [U] by owner, keys a shard, place [N]
Router = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray, np.ndarray]]


def make_route(
    keys: np.ndarray, slices: SliceMap, world: int, first: int = 0, router: Router | None = None
) -> KeyRoute:
    """The route of keys [N] to shards that are the ranks `first`... of `world`."""
    all_keys = keys.copy()
    sorted_keys, of_shards, place = (router or route_with_numpy)(all_keys, slices.owners, slices.shards)
    counts = [0] * world
    counts[first : first + slices.shards] = of_shards.tolist()
    return KeyRoute(all_keys, sorted_keys, counts, place)


def route_with_numpy(
    keys: np.ndarray, owners: np.ndarray, shards: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The router in NumPy."""
    mixed = splitmix64(keys)
    alike = _find_representatives(keys, mixed)
    distinct = np.flatnonzero(alike == np.arange(len(keys)))
    owner = owners[mixed[distinct] >> _SLICE_SHIFT]
    order = distinct[np.argsort(owner, kind="stable")]
    place = np.empty(len(keys), dtype=np.int64)
    place[order] = np.arange(len(order))
    return keys[order], np.bincount(owner, minlength=shards), place[alike]


def _find_representatives(keys: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    """For each key the position [N] of one that equals it, the same for all equal ones."""
    positions = np.arange(len(keys))
    alike = positions.copy()
    open_, shift = positions, 0
    while open_.size:
        bits = max(4, int(4 * open_.size - 1).bit_length())
        cells = ((mixed[open_] >> np.uint64(shift)) & np.uint64((1 << bits) - 1)).astype(np.int64)
        stamps = np.empty(1 << bits, dtype=np.int64)
        stamps[cells[::-1]] = open_[::-1]  # the last write stays, so the first position stands for the key
        first = stamps[cells]
        alike[open_] = first
        open_ = open_[keys[first] != keys[open_]]
        shift = (shift + 7) % 40
        if shift == 0:  # every window of the hash was tried: remix, so that the loop ends for any keys
            mixed = splitmix64(mixed)
    return alike


_MOST = 1 << 30


class _ScratchMemory(threading.local):
    """Scratch memory of a thread, which only grows: to ask for it anew takes a third of a route's time."""

    def __init__(self) -> None:
        self._count = 0

    def reserve(self, count: int) -> list[int]:
        """Addresses of the cells, keys and shards of a batch of so many keys."""
        if count > self._count:
            self._kept = (
                np.empty(_count_cells(count), np.int32),
                np.empty(count, np.int64),
                np.empty(count, np.int32),
            )
            self._count, self._at = count, [array.ctypes.data for array in self._kept]
        return self._at


def _count_cells(count: int) -> int:
    return 1 << max(4, (4 * count - 1).bit_length())


@cache
def select_router() -> Router:
    """The C++ router; `route_with_numpy` where there is no core."""
    try:
        call = load_library().nonet_route
    except NativeUnavailable:
        return route_with_numpy
    room = _ScratchMemory()
    call.restype = ctypes.c_int64
    call.argtypes = [ctypes.c_void_p, ctypes.c_int64] * 3 + [ctypes.c_void_p] * 5

    def route_with_core(
        keys: np.ndarray, owners: np.ndarray, shards: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count = len(keys)
        if not 0 < count < _MOST:
            return route_with_numpy(keys, owners, shards)
        keys = np.ascontiguousarray(keys)
        out, place, counts = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(shards, np.int64)
        cells, *scratch = room.reserve(count)
        at = [array.ctypes.data for array in (keys, owners, out, counts, place)]
        distinct = call(at[0], count, at[1], shards, cells, _count_cells(count) - 1, *scratch, *at[2:])
        return out[:distinct], counts, place

    return route_with_core

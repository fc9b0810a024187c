"""The router in C++, or NumPy's where the core is not to be had; both give the same route."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

import numpy as np

from nonet.embedding.native_library import NativeUnavailable, library
from nonet.embedding.route import Router, by_stamps

_MOST = 1 << 30


class _Room(threading.local):
    """Scratch memory of a thread, which only grows: to ask for it anew takes a third of a route's time."""

    def __init__(self) -> None:
        self._count = 0

    def of(self, count: int) -> list[int]:
        """Addresses of the cells, keys and shards of a batch of so many keys."""
        if count > self._count:
            self._kept = (
                np.empty(_cells(count), np.int32),
                np.empty(count, np.int64),
                np.empty(count, np.int32),
            )
            self._count, self._at = count, [array.ctypes.data for array in self._kept]
        return self._at


def _cells(count: int) -> int:
    return 1 << max(4, (4 * count - 1).bit_length())


@cache
def best_router() -> Router:
    """The C++ router; `by_stamps` where there is no core."""
    try:
        call = library().nonet_route
    except NativeUnavailable:
        return by_stamps
    kept = _Room()
    call.restype = ctypes.c_int64
    call.argtypes = [ctypes.c_void_p, ctypes.c_int64] * 3 + [ctypes.c_void_p] * 5

    def by_cells(
        keys: np.ndarray, owners: np.ndarray, shards: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count = len(keys)
        if not 0 < count < _MOST:
            return by_stamps(keys, owners, shards)
        keys = np.ascontiguousarray(keys)
        out, place, counts = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(shards, np.int64)
        cells, *scratch = kept.of(count)
        at = [array.ctypes.data for array in (keys, owners, out, counts, place)]
        distinct = call(at[0], count, at[1], shards, cells, _cells(count) - 1, *scratch, *at[2:])
        return out[:distinct], counts, place

    return by_cells

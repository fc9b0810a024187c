"""The router in C++, or NumPy's where the core is not to be had; both give the same route."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from nonet.embedding.native_library import NativeUnavailable, library
from nonet.embedding.route import Router, by_stamps

_MOST = 1 << 30


@cache
def best_router() -> Router:
    """The C++ router; `by_stamps` where there is no core."""
    try:
        call = library().nonet_route
    except NativeUnavailable:
        return by_stamps
    call.restype = ctypes.c_int64
    call.argtypes = [ctypes.c_void_p, ctypes.c_int64] * 3 + [ctypes.c_void_p] * 5

    def by_cells(
        keys: np.ndarray, owners: np.ndarray, shards: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count = len(keys)
        if not 0 < count < _MOST:
            return by_stamps(keys, owners, shards)
        keys = np.ascontiguousarray(keys)
        cells = np.empty(1 << max(4, (4 * count - 1).bit_length()), dtype=np.int32)
        scratch, shard = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)
        out, place, counts = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(shards, np.int64)
        at = [array.ctypes.data for array in (keys, owners, cells, scratch, shard, out, counts, place)]
        distinct = call(at[0], count, at[1], shards, at[2], len(cells) - 1, *at[3:])
        return out[:distinct], counts, place

    return by_cells

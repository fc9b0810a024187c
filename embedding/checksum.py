"""The checksum of checkpoint segments, in C++ at memory speed or in NumPy; both give the same 64 bits.

Each 64-bit word is mixed with its place by a bijection and the results are added: one changed word always changes the sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from nonet.embedding.native_library import NativeUnavailable, library
from nonet.embedding.slices import splitmix64

_ODD = np.uint64(0xD1342543DE82EF95)


def checksum(data: np.ndarray) -> int:
    """64 bits for a contiguous array's bytes."""
    native = _native()
    if native is not None:
        return native(data.ctypes.data, data.nbytes)
    return checksum_numpy(data)


def checksum_numpy(data: np.ndarray) -> int:
    """The same, slowly."""
    raw = data.reshape(-1).view(np.uint8)
    padded = np.zeros(8 * (len(raw) // 8 + 1), dtype=np.uint8)
    padded[: len(raw)] = raw
    words = padded.view(np.uint64)
    mixed = splitmix64(words ^ (np.arange(len(words), dtype=np.uint64) * _ODD))
    return (int(mixed.sum(dtype=np.uint64)) + len(raw)) % (1 << 64)


@cache
def _native() -> Callable[[int, int], int] | None:
    try:
        call = library().nonet_checksum
    except NativeUnavailable:
        return None
    call.restype, call.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_int64]
    return call

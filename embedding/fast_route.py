"""The router in C++, or NumPy's where there is no compiler; both give the same route.

The one small source is compiled once a machine into the user's cache, under a name that holds the hash of source and
architecture, and put in place by one rename, so processes that start together do not disturb each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nonet.embedding.route import Router, by_stamps

_SOURCE = Path(__file__).parent / "native" / "route.cpp"
_MOST = 1 << 30


@cache
def best_router() -> Router:
    """The C++ router; `by_stamps` when it cannot be built."""
    library = _library()
    if library is None:
        return by_stamps
    call = library.nonet_route
    call.restype = ctypes.c_int64
    call.argtypes = [ctypes.c_void_p, ctypes.c_int64] * 3 + [ctypes.c_void_p] * 5

    def by_cells(
        keys: np.ndarray, owners: np.ndarray, shards: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count = len(keys)
        if not 0 < count < _MOST:
            return by_stamps(keys, owners, shards)
        keys = np.ascontiguousarray(keys)
        cells = np.empty(1 << max(4, (2 * count - 1).bit_length()), dtype=np.int32)
        scratch, shard = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)
        out, place, counts = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(shards, np.int64)
        at = [array.ctypes.data for array in (keys, owners, cells, scratch, shard, out, counts, place)]
        distinct = call(at[0], count, at[1], shards, at[2], len(cells) - 1, *at[3:])
        return out[:distinct], counts, place

    return by_cells


def _library() -> Any:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    cached = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nonet"
    try:
        name = hashlib.sha256(_SOURCE.read_bytes() + platform.machine().encode()).hexdigest()[:16]
        path = cached / f"route-{name}.so"
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: str | None, path: Path) -> None:
    if compiler is None:
        raise OSError("no C++ compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, "-O3", "-std=c++17", "-shared", "-fPIC", "-o", str(made), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        os.replace(made, path)

"""Keys of benches: ranks distributed as in data, and the scattered 64-bit ids of ranks."""

from __future__ import annotations

from functools import cache

import numpy as np

_ODD = 0x9E3779B97F4A7C15
_UNDO = pow(_ODD, -1, 1 << 64)


def draw_zipf_ranks(source: np.random.Generator, rows: int, shape: int | tuple[int, ...]) -> np.ndarray:
    """Draw Zipf(1.05) ranks below `rows`."""
    return np.minimum(np.searchsorted(_compute_edges(rows), source.random(shape)), rows - 1)


def scatter_ranks(ranks: np.ndarray) -> np.ndarray:
    """Return 64-bit ids of ranks; the odd multiplier is a bijection, which `number_of` inverts."""
    return (ranks.astype(np.uint64) * np.uint64(_ODD)).view(np.int64)


def number_of(keys: np.ndarray) -> np.ndarray:
    """Return half the rank of each scattered key, rounded down."""
    return ((keys.view(np.uint64) * np.uint64(_UNDO)) >> np.uint64(1)).view(np.int64)


@cache
def _compute_edges(rows: int) -> np.ndarray:
    weight = np.arange(1, rows + 1, dtype=np.float64) ** -1.05
    return np.cumsum(weight) / weight.sum()

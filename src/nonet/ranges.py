"""Ranges of indices into ragged arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nonet.types import Jagged


def expand_ranges(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices in all ranges, concatenated, as values and offsets of a ragged array.

    Args:
        starts: First index of each range [P].
        stops: Index past the last one of each range [P].

    Returns:
        The indices of `starts[i]:stops[i]` for all i [M], and the offset of each range among them [P + 1] int64.
    """
    lengths = stops - starts
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets


def concatenate_rows(rows: Sequence[np.ndarray]) -> Jagged:
    """Concatenate rows of integers [n], of which some may be empty."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return Jagged(np.concatenate([np.empty(0, np.int64), *rows]), offsets)

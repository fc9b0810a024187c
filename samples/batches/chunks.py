"""Splits a step into consecutive parts of bounded size, so that a bot's 300,000 events become many small parts."""

from __future__ import annotations

import numpy as np

# Shapes: B sequences or prompts.


def split_by_size(sizes_B: np.ndarray, max_size: int) -> list[slice]:
    """Return slices of [B] in order whose sizes sum to at most `max_size`; a single larger element is a slice of its own.

    Slices are as long as possible. An empty input gives one empty slice.
    """
    ends = np.cumsum(sizes_B)
    parts, start = [], 0
    while start < len(ends) or not parts:
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + max_size, side="right"))
        parts.append(slice(start, max(stop, min(start + 1, len(ends)))))
        start = parts[-1].stop
    return parts

"""Splits a step into consecutive parts of bounded size, so that a user with 300,000 events does not exhaust memory."""

from __future__ import annotations

import numpy as np

# Shapes: B sequences or prompts.


def split_by_size(sizes_B: np.ndarray, max_size: int) -> list[slice]:
    """Split [B] into consecutive slices, as long as possible, whose sizes sum to at most `max_size`.

    An element that is larger than `max_size` is a slice of its own. An empty input gives one empty slice.
    """
    ends = np.cumsum(sizes_B)
    parts, start = [], 0
    while start < len(ends) or not parts:
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + max_size, side="right"))
        parts.append(slice(start, max(stop, min(start + 1, len(ends)))))
        start = parts[-1].stop
    return parts

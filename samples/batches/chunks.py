"""Chunks: consecutive parts of a step that are bounded, whatever comes: a bot's 300,000 events are many small parts."""

from __future__ import annotations

import numpy as np

# Shapes: B sequences or prompts.


def bounded(sizes_B: np.ndarray, most: int) -> list[slice]:
    """Slices of [B] in order, each with sizes that sum to `most` at the most, or with a single one that is larger.

    As long as they can be, so that what fits is one slice; nothing is one empty slice.
    """
    ends = np.cumsum(sizes_B)
    parts, start = [], 0
    while start < len(ends) or not parts:
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + most, side="right"))
        parts.append(slice(start, max(stop, min(start + 1, len(ends)))))
        start = parts[-1].stop
    return parts

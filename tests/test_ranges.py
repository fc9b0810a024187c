"""Index ranges are concatenated, and empty ones have no index."""

from __future__ import annotations

import numpy as np

from nonet.ranges import expand_ranges


def test_ranges_are_concatenated_with_their_offsets():
    index, offsets = expand_ranges(np.array([5, 2, 9]), np.array([7, 2, 12]))
    assert index.tolist() == [5, 6, 9, 10, 11]
    assert offsets.tolist() == [0, 2, 2, 5]


def test_no_range_gives_no_index():
    index, offsets = expand_ranges(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert (index.tolist(), offsets.tolist()) == ([], [0])

"""Conversion of the spans of query tiles to the spans of key tiles, for the backward kernel with one program per key tile.

A run is a range of consecutive query tiles that all read a key tile. Consecutive query tiles differ in few key tiles, so runs
are found where a key tile appears in the spans or disappears: O(tiles + runs), never O(tiles^2). 65,536 tokens in one causal
sequence have 1,024 of these events. If a key tile has more than 4 runs, the last ones are merged: more blocks are computed with
a mask, and the result is the same.

A position in a group (here a query tile in the group of a key tile) is encoded as one number, group * WIDE + position, so that
all runs can be sorted and searched together.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

MOST_RUNS = 4  # The maximum number of spans of a tile.
WIDE = 2**31  # Above every position.
_MAX_STACKED = 32
Runs: TypeAlias = tuple[
    np.ndarray, np.ndarray
]  # The sorted codes of the begins and of the (exclusive) ends of runs.

# Shapes: N query tiles in packed order, B sequences, S spans of a tile, M key tiles, R runs, E events.


def transpose_spans(
    spans_NS4: np.ndarray, place_N2: np.ndarray, full_rows_N: np.ndarray, key_base_B1: np.ndarray
) -> np.ndarray:
    """Compute the spans of query tiles per key tile, [M, 4, 4].

    Args:
        spans_NS4: The ascending, disjoint spans of key tiles of each query tile, in packed order.
        place_N2: The sequence of each query tile and its number within the sequence.
        full_rows_N: Whether each query tile has all rows. Others are never unmasked here, because their rows need a bound.
        key_base_B1: The first key tile of every sequence.
    """
    inner = np.where(full_rows_N[:, None, None], spans_NS4[..., 1:3], 0)
    hull, core = (
        find_runs(spans_NS4[..., ::3], place_N2, key_base_B1),
        find_runs(inner, place_N2, key_base_B1),
    )
    return make_spans(hull, core, int(key_base_B1[-1]))


def join_touching_runs(begin_R: np.ndarray, end_R: np.ndarray) -> Runs:
    """Join sorted runs that touch."""
    if not len(begin_R):
        return begin_R, end_R
    is_boundary = np.ones(len(begin_R) + 1, dtype=bool)
    is_boundary[1:-1] = begin_R[1:] != end_R[:-1]
    return begin_R[is_boundary[:-1]], end_R[is_boundary[1:]]


def stack_runs(runs: Runs, groups: int, swallow: bool) -> np.ndarray:
    """Return the runs of each group as intervals [groups, most runs of a group, 2], with empty ones as (0, 0).

    Runs past the 32nd of a group are left out; with `swallow`, the 32nd is extended to include all of them.
    """
    (begin, end), group = runs, runs[0] // WIDE
    number = _number_runs(group, groups)
    if not swallow:
        begin, end, group, number = (x[number < _MAX_STACKED] for x in (begin, end, group, number))
    number = np.minimum(number, _MAX_STACKED - 1)
    max_runs = int(number.max()) + 1 if len(number) else 1
    slot = group * max_runs + number
    first, last = _find_extents(slot, begin, end, groups * max_runs)
    intervals = np.stack([first, last], -1)
    intervals[last == 0] = 0
    return intervals.reshape(groups, max_runs, 2)


def _find_extents(slot_R: np.ndarray, begin_R: np.ndarray, end_R: np.ndarray, slots: int) -> Runs:
    """Return the first and the past-the-last position of each slot's runs; (WIDE, 0) for a slot without runs."""
    first, last = np.full(slots, WIDE), np.zeros(slots, dtype=np.int64)
    np.minimum.at(first, slot_R, begin_R % WIDE)
    np.maximum.at(last, slot_R, (end_R - 1) % WIDE + 1)
    return first, last


def _number_runs(group_R: np.ndarray, groups: int) -> np.ndarray:
    """Return the index of each run in its group; groups are sorted."""
    counts = np.bincount(group_R, minlength=groups)
    return np.arange(len(group_R)) - (counts.cumsum() - counts)[group_R]


def find_runs(interval_NS2: np.ndarray, place_N2: np.ndarray, key_base_B1: np.ndarray) -> Runs:
    """Find the runs of query tiles that read each key tile.

    Args:
        interval_NS2: Intervals of key tiles in each query tile.
        place_N2: The sequence of each query tile and its number within the sequence.
        key_base_B1: The first key tile of every sequence.

    Returns:
        The sorted codes (group: key tile, position: query tile) at which runs begin, and those at which the same runs end.
    """
    rows, tiles_B = len(interval_NS2), np.bincount(place_N2[:, 0], minlength=len(key_base_B1) - 1)
    sequences = len(tiles_B)
    # Each row is compared with the one before, so there is an empty row after every sequence's tiles and one before all.
    padded_index_N = np.arange(1, rows + 1) + place_N2[:, 0]
    padded = np.zeros((rows + sequences + 1, *interval_NS2.shape[1:]), dtype=np.int64)
    padded[padded_index_N] = interval_NS2
    sequence, tile = np.zeros(len(padded), dtype=np.int64), np.zeros(len(padded), dtype=np.int64)
    sequence[padded_index_N], tile[padded_index_N] = place_N2[:, 0], place_N2[:, 1]
    empty_index_B = tiles_B.cumsum() + np.arange(1, sequences + 1)
    sequence[empty_index_B], tile[empty_index_B] = np.arange(sequences), tiles_B
    base = key_base_B1[sequence[1:]]
    begin = _find_events(padded[1:], padded[:-1], base, tile[1:])
    end = _find_events(padded[:-1], padded[1:], base, tile[1:])
    return begin, end


def _find_events(
    interval_NS2: np.ndarray, excluded_NS2: np.ndarray, base_N: np.ndarray, tile_N: np.ndarray
) -> np.ndarray:
    """Return the sorted codes of the key tiles that are in the intervals of a row and not in the intervals to exclude.

    Args:
        interval_NS2: The intervals of key tiles of each row.
        excluded_NS2: The intervals to exclude from each row.
        base_N: The first key tile of each row's sequence.
        tile_N: The query tile of each row, which is the position in the codes.
    """
    # The gaps between the excluded intervals. Empty ones must not create a gap, so they become points at the far end.
    far = 2**30
    empty = excluded_NS2[..., 0] >= excluded_NS2[..., 1]
    excluded = np.sort(np.where(empty[..., None], far, excluded_NS2), axis=1)
    ends = np.full((len(excluded), 1), far)
    gap_begin = np.concatenate([np.zeros_like(ends), excluded[..., 1]], 1)
    gap_end = np.concatenate([excluded[..., 0], ends], 1)
    # The intersection of every interval with every gap.
    begin = np.maximum(interval_NS2[:, :, None, 0], gap_begin[:, None])
    end = np.minimum(interval_NS2[:, :, None, 1], gap_end[:, None])
    filled = np.flatnonzero(begin < end)
    first, row = begin.ravel()[filled], filled // (begin.shape[1] * begin.shape[2])
    count = end.ravel()[filled] - first
    code = (base_N[row] + first) * WIDE + tile_N[row]
    return np.sort(code.repeat(count) + _concatenate_ranges(count) * WIDE)


def _concatenate_ranges(count_E: np.ndarray) -> np.ndarray:
    """Concatenate the ranges 0, 1, ..., count - 1 of each count."""
    before = count_E.cumsum() - count_E
    return np.arange(int(count_E.sum())) - before.repeat(count_E)


def make_spans(hull: Runs, core: Runs, groups: int) -> np.ndarray:
    """Convert the runs of each group to spans [groups, 4, 4]; the unmasked part of a span is the longest core in it.

    A group's runs past the 4th are merged into the 4th span.
    """
    (begin, end), (core_begin, core_end) = hull, core
    group = begin // WIDE
    slot = group * MOST_RUNS + np.minimum(_number_runs(group, groups), MOST_RUNS - 1)
    first, last = _find_extents(slot, begin, end, groups * MOST_RUNS)
    # The longest core of each span, as length * WIDE + position.
    longest_core = np.zeros(len(first), dtype=np.int64)
    core_slot = slot[np.searchsorted(begin, core_begin, side="right") - 1]
    np.maximum.at(longest_core, core_slot, (core_end - core_begin) * WIDE + core_begin % WIDE)
    length, position = longest_core // WIDE, longest_core % WIDE
    inner = np.where(length > 0, position, first)
    spans = np.stack([first, inner, inner + length, last], -1)
    spans[last == 0] = 0
    return spans.reshape(groups, MOST_RUNS, 4)

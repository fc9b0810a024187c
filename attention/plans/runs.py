"""Conversion of tile pairs to the spans of key tiles, for the backward that owns keys.

Consecutive query tiles differ in few key blocks, so runs of query tiles are found where a block appears or disappears: O(tiles +
runs), never O(tiles^2). 65,536 tokens in one causal sequence take 1,024 events. If a tile has more than 4 runs, the last ones are
merged: more is computed under the mask, and the result is the same.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

MOST_RUNS = 4
WIDE = 2**31
_MOST_STACKED = 32
Runs: TypeAlias = tuple[np.ndarray, np.ndarray]  # Sorted codes group * WIDE + position of begins and of ends.

# Shapes: N query tiles in packed order, B sequences, S spans of a tile, M key tiles, E events.


def transpose_spans(
    spans_NS4: np.ndarray, place_N2: np.ndarray, full_rows_N: np.ndarray, key_base_B1: np.ndarray
) -> np.ndarray:
    """Compute the spans of query tiles per key tile, [M, 4, 4]; cores hold complete query tiles only.

    `spans` are rising and disjoint, with tiles in packed order. `place` is sequence and tile within it, `key_base` the first key
    tile of every sequence. A query tile that its sequence does not fill is never unmasked here, because its rows need a bound.
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
    apart = np.ones(len(begin_R) + 1, dtype=bool)
    apart[1:-1] = begin_R[1:] != end_R[:-1]
    return begin_R[apart[:-1]], end_R[apart[1:]]


def stack_runs(runs: Runs, groups: int, swallow: bool) -> np.ndarray:
    """Stack runs as intervals [groups, R, 2], with empty ones as (0, 0).

    Runs past the 32nd of a group are left out; with `swallow` the 32nd includes all of them.
    """
    (begin, end), group = runs, runs[0] // WIDE
    number = _number_runs(group, groups)
    if not swallow:
        begin, end, group, number = (x[number < _MOST_STACKED] for x in (begin, end, group, number))
    number = np.minimum(number, _MOST_STACKED - 1)
    most = int(number.max()) + 1 if len(number) else 1
    slot = group * most + number
    first, last = _find_extents(slot, begin, end, groups * most)
    stack = np.stack([first, last], -1)
    stack[last == 0] = 0
    return stack.reshape(groups, most, 2)


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
    """Return the sorted codes (key tile, query tile) where runs begin, and those where the same runs end."""
    rows, tiles_B = len(interval_NS2), np.bincount(place_N2[:, 0], minlength=len(key_base_B1) - 1)
    sequences = len(tiles_B)
    # An empty row after every sequence's tiles, and one before all: each row is compared with the one before.
    to_N = np.arange(1, rows + 1) + place_N2[:, 0]
    padded = np.zeros((rows + sequences + 1, *interval_NS2.shape[1:]), dtype=np.int64)
    padded[to_N] = interval_NS2
    sequence, tile = np.zeros(len(padded), dtype=np.int64), np.zeros(len(padded), dtype=np.int64)
    sequence[to_N], tile[to_N] = place_N2[:, 0], place_N2[:, 1]
    behind_B = tiles_B.cumsum() + np.arange(1, sequences + 1)
    sequence[behind_B], tile[behind_B] = np.arange(sequences), tiles_B
    base = key_base_B1[sequence[1:]]
    begin = _find_events(padded[1:], padded[:-1], base, tile[1:])
    end = _find_events(padded[:-1], padded[1:], base, tile[1:])
    return begin, end


def _find_events(
    of_NS2: np.ndarray, without_NS2: np.ndarray, base_N: np.ndarray, tile_N: np.ndarray
) -> np.ndarray:
    """Return the sorted codes (key tile, query tile) of the blocks in `of` that are not in `without`, row by row."""
    # The gaps between the other row's spans. Its empty spans must not create one, so they become points at the far end.
    far = 2**30
    empty = without_NS2[..., 0] >= without_NS2[..., 1]
    other = np.sort(np.where(empty[..., None], far, without_NS2), axis=1)
    ends = np.full((len(other), 1), far)
    gap_begin = np.concatenate([np.zeros_like(ends), other[..., 1]], 1)
    gap_end = np.concatenate([other[..., 0], ends], 1)
    begin = np.maximum(of_NS2[:, :, None, 0], gap_begin[:, None])
    end = np.minimum(of_NS2[:, :, None, 1], gap_end[:, None])
    filled = np.flatnonzero(begin < end)
    first, at = begin.ravel()[filled], filled // (begin.shape[1] * begin.shape[2])
    count = end.ravel()[filled] - first
    code = (base_N[at] + first) * WIDE + tile_N[at]
    return np.sort(code.repeat(count) + _make_ramps(count) * WIDE)


def _make_ramps(count_E: np.ndarray) -> np.ndarray:
    """Concatenate the ranges 0, 1, ... of `count` steps each."""
    before = count_E.cumsum() - count_E
    return np.arange(int(count_E.sum())) - before.repeat(count_E)


def make_spans(hull: Runs, core: Runs, groups: int) -> np.ndarray:
    """Convert runs by group (codes) to spans [groups, 4, 4]; of a run's cores the longest is kept."""
    (begin, end), (core_begin, core_end) = hull, core
    group = begin // WIDE
    slot = group * MOST_RUNS + np.minimum(_number_runs(group, groups), MOST_RUNS - 1)
    first, last = _find_extents(slot, begin, end, groups * MOST_RUNS)
    best = np.zeros(len(first), dtype=np.int64)
    home = slot[np.searchsorted(begin, core_begin, side="right") - 1]
    np.maximum.at(best, home, (core_end - core_begin) * WIDE + core_begin % WIDE)
    length, at = best // WIDE, best % WIDE
    inner = np.where(length > 0, at, first)
    spans = np.stack([first, inner, inner + length, last], -1)
    spans[last == 0] = 0
    return spans.reshape(groups, MOST_RUNS, 4)

"""Refinement of tiles for masks with key columns or class words: spans are cut to the pairs that these allow.

A pair of a query tile and a key tile is dropped if no row is in any key's column, or no row shares a class bit with any key. It
needs no mask only if every row is in every key's column and shares a class bit with every key. Runs are cut instead of single
pairs: a column is an interval of query tiles per key tile, and tiles with the same class bits share one list of runs. 65,536
tokens in one row take 3 to 5 ms, compared with 50 ms for half a million pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nonet.attention.masks import IntervalTable
from nonet.attention.plans.runs import (
    MOST_RUNS,
    WIDE,
    Runs,
    find_runs,
    join_touching_runs,
    make_spans,
    stack_runs,
)
from nonet.attention.plans.spans import compute_extents, compute_tokens

# Shapes: N query tiles, M key tiles, S spans of a tile, G groups of tiles with the same class bits, E spans in use.
_MAX_CORES = 8  # Maximum number of unmasked runs of a span among which the longest is chosen.


@dataclass(frozen=True, slots=True, eq=False)
class TileSide:
    """The tiles of queries or of keys, in packed order.

    Attributes:
        place: The sequence of each tile and its number within the sequence [N, 2].
        first: The first packed token of each tile [N].
        rows: The number of tokens of each tile [N].
        base: The first tile of each sequence [B + 1].
        size: The maximum number of tokens of a tile.
    """

    place: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    base: np.ndarray
    size: int


def refine_spans(
    table: IntervalTable, spans_NS4: np.ndarray, query: TileSide, key: TileSide
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the spans of query tiles to the pairs that columns and classes allow.

    Returns:
        The spans of key tiles by query tile [N, 4, 4], and the spans of query tiles by key tile [M, 4, 4].
    """
    hull = find_runs(spans_NS4[..., ::3], query.place, key.base)
    core = find_runs(spans_NS4[..., 1:3], query.place, key.base)
    if table.column_start is not None and table.column_stop is not None:
        hull, core = _clip_to_columns(table.column_start, table.column_stop, hull, core, query, key)
        # Columns cut the runs of each key tile, which are then converted back to runs of each query tile.
        query_runs = [
            find_runs(stack_runs(runs, len(key.place), swallow=runs is hull), key.place, query.base)
            for runs in (hull, core)
        ]
        by_query = make_spans(query_runs[0], query_runs[1], len(query.place))
    else:
        by_query = spans_NS4
    # The number of complete query tiles of each sequence; the last tile may be partial, whose rows need a bound.
    whole_B = np.diff(query.base) - (_count_tokens(query) % query.size != 0)
    by_key = make_spans(hull, _clip_runs(core, None, whole_B[key.place[:, 0]]), len(key.place))
    if table.sees is not None and table.word is not None:
        bits_N, bits_M = _summarise_bits(table.sees, query), _summarise_bits(table.word, key)
        every_M = np.ones(len(key.place), dtype=bool)
        by_query = _clip_to_classes(by_query, bits_N, bits_M, key.base[query.place[:, 0]], every_M)
        by_key = _clip_to_classes(
            by_key, bits_M, bits_N, query.base[key.place[:, 0]], query.rows == query.size
        )
    return by_query, by_key


def _count_tokens(side: TileSide) -> np.ndarray:
    """Return the number of tokens of each sequence [B]."""
    return np.bincount(side.place[:, 0], side.rows, minlength=len(side.base) - 1).astype(np.int64)


def _clip_to_columns(
    start_S: Tensor, stop_S: Tensor, hull: Runs, core: Runs, query: TileSide, key: TileSide
) -> tuple[Runs, Runs]:
    """Clip the hulls of key tiles to query tiles that any key's column meets, and the cores to those in every key's column."""
    token_MR = compute_tokens(key.first, key.rows, key.size)
    begin, end, inner, outer = compute_extents(start_S.numpy(), stop_S.numpy(), token_MR)
    # A partial tile ends with its sequence.
    sequence_M = key.place[:, 0]
    last = np.where(
        outer >= _count_tokens(query)[sequence_M], np.diff(query.base)[sequence_M], outer // query.size
    )
    return (
        _clip_runs(hull, begin // query.size, -(-end // query.size)),
        _clip_runs(core, -(-inner // query.size), last),
    )


def _clip_runs(runs: Runs, low_M: np.ndarray | None, high_M: np.ndarray) -> Runs:
    """Clip each run to the positions [low, high) of its group, and drop runs that become empty."""
    begin, end = runs
    group = begin // WIDE
    if low_M is not None:
        begin = np.maximum(begin, group * WIDE + low_M[group])
    end = np.minimum(end, group * WIDE + high_M[group])
    filled = begin < end
    return begin[filled], end[filled]


def _summarise_bits(word_T: Tensor, side: TileSide) -> np.ndarray:
    """Summarise the class words of each tile, int32 [3, N].

    Returns:
        The bits that any token of the tile has, the bits that all of them have, and whether every token has a bit.
    """
    word_NR = word_T.numpy().take(compute_tokens(side.first, side.rows, side.size))
    any_N, all_N = np.bitwise_or.reduce(word_NR, axis=1), np.bitwise_and.reduce(word_NR, axis=1)
    return np.stack([any_N, all_N, word_NR.all(1)]).astype(np.int32)


def _clip_to_classes(
    spans_NS4: np.ndarray,
    bits_3N: np.ndarray,
    other_bits_3M: np.ndarray,
    base_N: np.ndarray,
    may_M: np.ndarray,
) -> np.ndarray:
    """Clip the spans of tiles to the blocks (tiles of the other side) that share a class bit with the tile, [N, 4, 4].

    Args:
        spans_NS4: The spans of each tile.
        bits_3N: The tiles' bits from `_summarise_bits`.
        other_bits_3M: The bits of the other side's tiles.
        base_N: The first tile of each tile's sequence among all tiles of the other side.
        may_M: Which tiles of the other side may be unmasked, if also every row shares a bit with every key.
    """
    group_N, tile_G = _group_by_bits(bits_3N)
    keep_GM, full_GM = _find_shared_bits(bits_3N[:, tile_G], other_bits_3M)
    keep, full = _find_row_runs(keep_GM), _find_row_runs(full_GM & may_M)
    tile_E, span_E = (spans_NS4[..., 3] > spans_NS4[..., 0]).nonzero()
    span_4E = spans_NS4[tile_E, span_E].T
    # From a block of the tile's sequence to its code in the group's runs, and from there to its code in the tile's runs.
    to_group_E = group_N[tile_E] * WIDE + base_N[tile_E]
    to_tile_E = tile_E * WIDE - to_group_E
    hull = _select_runs(
        keep, span_4E[0] + to_group_E, span_4E[3] + to_group_E, to_tile_E, MOST_RUNS, swallow=True
    )
    core = _select_runs(
        full, span_4E[1] + to_group_E, span_4E[2] + to_group_E, to_tile_E, _MAX_CORES, swallow=False
    )
    return make_spans(join_touching_runs(*hull), join_touching_runs(*core), len(spans_NS4))


def _group_by_bits(bits_3N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group tiles with equal bits, and return each tile's group and one tile of each group.

    Tiles are compared by 64-bit codes, because np.unique over rows takes 20 times as long.
    """
    any_N, all_N, no_blank_N = bits_3N.astype(np.int64)
    _, words_N = np.unique((any_N << 32) | (all_N & 0xFFFFFFFF), return_inverse=True)
    _, tile_G, group_N = np.unique(2 * words_N + no_blank_N, return_index=True, return_inverse=True)
    return group_N, tile_G


def _find_shared_bits(bits_3G: np.ndarray, other_bits_3M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the pairs [G, M] in which any tokens share a bit, and those in which all pairs of tokens are known to share one.

    `no_blank` says that every token of a tile has a bit.
    """
    (any_G, all_G, no_blank_G), (any_M, all_M, no_blank_M) = bits_3G[:, :, None], other_bits_3M
    keep = (any_G & any_M) != 0
    full = (all_G & all_M) != 0  # All tokens of both tiles have a common bit.
    full |= ((any_M & ~all_G) == 0) & (no_blank_M != 0)  # Every token of G has all bits that occur in M.
    full |= ((any_G & ~all_M) == 0) & (no_blank_G != 0)
    return keep, full & keep


def _find_row_runs(seen_GM: np.ndarray) -> Runs:
    """Find the runs of true entries in each row; the row is the group of their codes."""
    groups, positions = seen_GM.shape
    edge = np.zeros((groups, positions + 2), dtype=np.int8)
    edge[:, 1:-1] = seen_GM
    edge = np.diff(edge, axis=1)
    begin, end = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
    row = begin // (positions + 1)
    to_code = row * (WIDE - positions - 1)  # From a flat index to row * WIDE + position.
    return begin + to_code, end + to_code


def _select_runs(
    runs: Runs, low_E: np.ndarray, high_E: np.ndarray, shift_E: np.ndarray, max_runs: int, swallow: bool
) -> Runs:
    """Select the first `max_runs` runs in each range [low, high) of codes, clip them to it and add `shift` to their codes.

    With `swallow`, the last selected run of a range is extended to include all that follow.
    """
    begin_R, end_R = runs
    if not len(begin_R):
        return begin_R, end_R
    first_E1 = np.searchsorted(end_R, low_E, side="right")[:, None]
    count_E1 = np.searchsorted(begin_R, high_E)[:, None] - first_E1
    index_J = np.arange(max_runs)
    begin_run_EJ = first_E1 + index_J
    exists_EJ = (index_J < count_E1) & (low_E < high_E)[:, None]
    end_run_EJ = begin_run_EJ
    if swallow:
        end_run_EJ = np.where(
            index_J == max_runs - 1, np.maximum(begin_run_EJ, first_E1 + count_E1 - 1), begin_run_EJ
        )
    begin_EJ = np.maximum(begin_R.take(begin_run_EJ, mode="clip"), low_E[:, None]) + shift_E[:, None]
    end_EJ = np.minimum(end_R.take(end_run_EJ, mode="clip"), high_E[:, None]) + shift_E[:, None]
    return begin_EJ[exists_EJ], end_EJ[exists_EJ]

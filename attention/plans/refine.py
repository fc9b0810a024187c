"""Refinement of tiles for masks with key columns or class words: spans are cut to the pairs that these allow.

A pair of tiles is dropped if no row is in any key's column, or no class bit is shared. It needs no mask only if every row is in
every key's column and every word meets every row's. Runs are cut, not pairs: a column is an interval of query tiles per key tile,
and tiles with the same class bits share one list of runs. 65,536 tokens in one row take 3 to 5 ms, compared with 50 ms for half a
million pairs.
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
_MOST_CORES = 8  # Maximum number of unmasked runs of a span among which the longest is chosen.


@dataclass(frozen=True, slots=True, eq=False)
class TileSide:
    """The tiles of queries or of keys, in packed order."""

    place: np.ndarray  # [N, 2] sequence and tile within it
    first: np.ndarray  # [N] first packed token
    rows: np.ndarray  # [N]
    base: np.ndarray  # [B + 1] the first tile of each sequence
    size: int


def refine_spans(
    table: IntervalTable, spans_NS4: np.ndarray, query: TileSide, key: TileSide
) -> tuple[np.ndarray, np.ndarray]:
    """Return the spans by query tile [N, 4, 4] and by key tile [M, 4, 4]."""
    hull = find_runs(spans_NS4[..., ::3], query.place, key.base)
    core = find_runs(spans_NS4[..., 1:3], query.place, key.base)
    if table.column_start is not None and table.column_stop is not None:
        hull, core = _clip_to_columns(table.column_start, table.column_stop, hull, core, query, key)
        back = [
            find_runs(stack_runs(runs, len(key.place), swallow=runs is hull), key.place, query.base)
            for runs in (hull, core)
        ]
        by_query = make_spans(back[0], back[1], len(query.place))
    else:
        by_query = spans_NS4
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
    """Clip runs of query tiles to those that any key's column meets, and to those within every key's column."""
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
    """Clip each run to [low, high) of its group."""
    begin, end = runs
    group = begin // WIDE
    if low_M is not None:
        begin = np.maximum(begin, group * WIDE + low_M[group])
    end = np.minimum(end, group * WIDE + high_M[group])
    filled = begin < end
    return begin[filled], end[filled]


def _summarise_bits(word_T: Tensor, side: TileSide) -> np.ndarray:
    """Compute the bits that any row of a tile has, those that all have, and whether none is without bits, [3, N] int32."""
    word_NR = word_T.numpy().take(compute_tokens(side.first, side.rows, side.size))
    some_N, every_N = np.bitwise_or.reduce(word_NR, axis=1), np.bitwise_and.reduce(word_NR, axis=1)
    return np.stack([some_N, every_N, word_NR.all(1)]).astype(np.int32)


def _clip_to_classes(
    spans_NS4: np.ndarray, mine_3N: np.ndarray, theirs_3M: np.ndarray, base_N: np.ndarray, may_M: np.ndarray
) -> np.ndarray:
    """Clip spans to the other side's tiles that share a bit, [N, 4, 4].

    Blocks are unmasked if every row shares a bit with every key and `may` allows it. `base` is the index of block 0 of a tile's
    sequence among all tiles of the other side.
    """
    group_N, kind_G = _group_by_bits(mine_3N)
    keep_GM, full_GM = _find_shared_bits(mine_3N[:, kind_G], theirs_3M)
    keep, full = _find_row_runs(keep_GM), _find_row_runs(full_GM & may_M)
    tile_E, span_E = (spans_NS4[..., 3] > spans_NS4[..., 0]).nonzero()
    span_4E = spans_NS4[tile_E, span_E].T
    shift_E = group_N[tile_E] * WIDE + base_N[tile_E]
    home_E = tile_E * WIDE - shift_E
    hull = _select_runs(keep, span_4E[0] + shift_E, span_4E[3] + shift_E, home_E, MOST_RUNS, True)
    core = _select_runs(full, span_4E[1] + shift_E, span_4E[2] + shift_E, home_E, _MOST_CORES, False)
    return make_spans(join_touching_runs(*hull), join_touching_runs(*core), len(spans_NS4))


def _group_by_bits(bits_3N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group tiles by their bits, and return each tile's group and a tile per group.

    Tiles are compared by 64-bit codes, because unique over rows takes 20 times as long.
    """
    some_N, every_N, lit_N = bits_3N.astype(np.int64)
    words_N = np.unique((some_N << 32) | (every_N & 0xFFFFFFFF), return_inverse=True)[1]
    kind_G, group_N = np.unique(2 * words_N + lit_N, return_index=True, return_inverse=True)[1:]
    return group_N, kind_G


def _find_shared_bits(mine_3G: np.ndarray, theirs_3M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the pairs [G, M] that share a bit, and those in which every row shares a bit with every key."""
    (any_G, all_G, lit_G), (any_M, all_M, lit_M) = mine_3G[:, :, None], theirs_3M
    keep = (any_G & any_M) != 0
    whole = (all_G & all_M) != 0  # All of them share a bit.
    whole |= ((any_M & ~all_G) == 0) & (lit_M != 0)  # Every row has all bits of the block's words.
    whole |= ((any_G & ~all_M) == 0) & (lit_G != 0)
    return keep, whole & keep


def _find_row_runs(seen_GM: np.ndarray) -> Runs:
    """Find the runs of true entries, row by row."""
    groups, places = seen_GM.shape
    edge = np.zeros((groups, places + 2), dtype=np.int8)
    edge[:, 1:-1] = seen_GM
    edge = np.diff(edge, axis=1)
    begin, end = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
    row = begin // (places + 1)
    return begin + row * (WIDE - places - 1), end + row * (WIDE - places - 1)


def _select_runs(
    runs: Runs, low_E: np.ndarray, high_E: np.ndarray, home_E: np.ndarray, most: int, swallow: bool
) -> Runs:
    """Select at most `most` runs in each [low, high); with `swallow` the last includes all that follow."""
    begin_R, end_R = runs
    if not len(begin_R):
        return begin_R, end_R
    first_E1 = np.searchsorted(end_R, low_E, side="right")[:, None]
    count_E1 = np.searchsorted(begin_R, high_E)[:, None] - first_E1
    number_J = np.arange(most)
    at_EJ = first_E1 + number_J
    held_EJ = (number_J < count_E1) & (low_E < high_E)[:, None]
    to_EJ = at_EJ
    if swallow:
        to_EJ = np.where(number_J == most - 1, np.maximum(at_EJ, first_E1 + count_E1 - 1), at_EJ)
    begin_EJ = np.maximum(begin_R.take(at_EJ, mode="clip"), low_E[:, None]) + home_E[:, None]
    end_EJ = np.minimum(end_R.take(to_EJ, mode="clip"), high_E[:, None]) + home_E[:, None]
    return begin_EJ[held_EJ], end_EJ[held_EJ]

"""Tiles of masks that also speak of key columns or of class words: their spans cut to what these leave.

A pair of tiles falls away when no row is in any key's column, or no class bit is shared; it goes unmasked only when every
row is in every key's column and every word meets every row's. Runs are cut, never pairs: a column is an interval of
query tiles a key tile, and tiles of the same class bits share one list of runs. 65,536 tokens in one row take 3 to 5 ms,
where its half a million pairs took 50.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.plan_runs import MOST_RUNS, WIDE, Runs, joined, runs_of, spans_of, stacked
from nonet.attention.plan_spans import FAR, tokens_of
from nonet.attention.table import IntervalTable

# Shapes: N query tiles, M key tiles, S spans of a tile, G groups of tiles with the same class bits, E spans in use.
_MOST_CORES = 8  # unmasked runs of a span that are looked at for the longest


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The tiles of queries or of keys, in packed order."""

    place: Tensor  # [N, 2] sequence and tile within it
    first: Tensor  # [N] first packed token
    rows: Tensor  # [N]
    base: Tensor  # [B + 1] the first tile of each sequence
    size: int


def refined(table: IntervalTable, spans_NS4: Tensor, query: Side, key: Side) -> tuple[Tensor, Tensor]:
    """Spans by query tile [N, 4, 4] and by key tile [M, 4, 4]."""
    hull = runs_of(spans_NS4[..., [0, 3]], query.place, key.base)
    core = runs_of(spans_NS4[..., 1:3], query.place, key.base)
    if table.column_start is not None and table.column_stop is not None:
        hull, core = _columns(table.column_start, table.column_stop, hull, core, query, key)
        back = [
            runs_of(stacked(runs, len(key.place), swallow=runs is hull), key.place, query.base)
            for runs in (hull, core)
        ]
        by_query = spans_of(back[0], back[1], len(query.place))
    else:
        by_query = spans_NS4
    whole_B = query.base.diff() - (_lengths(query) % query.size != 0).int()
    by_key = spans_of(hull, _clipped(core, None, whole_B[key.place[:, 0]]), len(key.place))
    if table.sees is not None and table.word is not None:
        bits_N, bits_M = _bits(table.sees, query), _bits(table.word, key)
        every_M = torch.ones(len(key.place), dtype=torch.bool)
        by_query = _classes(by_query, bits_N, bits_M, key.base[query.place[:, 0]], every_M)
        by_key = _classes(by_key, bits_M, bits_N, query.base[key.place[:, 0]], query.rows == query.size)
    return by_query, by_key


def _lengths(side: Side) -> Tensor:
    """Tokens of each sequence [B]."""
    rows_B = torch.zeros(len(side.base) - 1, dtype=side.rows.dtype)
    return rows_B.index_add_(0, side.place[:, 0], side.rows)


def _columns(
    start_S: Tensor, stop_S: Tensor, hull: Runs, core: Runs, query: Side, key: Side
) -> tuple[Runs, Runs]:
    """Runs of query tiles cut to those that some key's column meets, and to those within every key's column."""
    token_MR = tokens_of(key.first, key.rows, key.size)
    start_MR, stop_MR = (
        x.index_select(0, token_MR.flatten()).view(token_MR.shape) for x in (start_S, stop_S)
    )
    seen_MR = (stop_MR > start_MR).to(start_MR.dtype)
    begin, end = (start_MR + (1 - seen_MR) * FAR).amin(1), (stop_MR * seen_MR).amax(1)
    inner, outer = start_MR.amax(1), stop_MR.amin(1)
    # A tile that its sequence does not fill ends with the sequence.
    sequence_M = key.place[:, 0]
    last = torch.where(
        outer >= _lengths(query)[sequence_M], query.base.diff()[sequence_M], outer // query.size
    )
    return (
        _clipped(hull, begin // query.size, -(-end // query.size)),
        _clipped(core, -(-inner // query.size), last),
    )


def _clipped(runs: Runs, low_M: Tensor | None, high_M: Tensor) -> Runs:
    """Each run cut to [low, high) of its group."""
    begin, end = runs
    group = begin // WIDE
    if low_M is not None:
        begin = torch.maximum(begin, group * WIDE + low_M[group])
    end = torch.minimum(end, group * WIDE + high_M[group])
    held = begin < end
    return begin[held], end[held]


def _bits(word_T: Tensor, side: Side) -> Tensor:
    """[N, 3]: bits that any row of a tile has, that all have, and whether none is without bits."""
    token_NR = tokens_of(side.first, side.rows, side.size)
    word_NR = word_T.index_select(0, token_NR.flatten()).view(token_NR.shape).int()
    lit_N = word_NR.ne(0).all(1)
    bits = torch.cat([word_NR, ~word_NR])  # bits that all have are those that none lacks
    while bits.shape[1] > 1:
        half = bits.shape[1] // 2
        bits = bits[:, :half] | bits[:, half:]
    some_N, lacking_N = bits[:, 0].chunk(2)
    return torch.stack([some_N, ~lacking_N, lit_N.int()], 1)


def _classes(spans_NS4: Tensor, mine_N3: Tensor, theirs_M3: Tensor, base_N: Tensor, may_M: Tensor) -> Tensor:
    """[N, 4, 4]: spans cut to the other side's tiles that share a bit.

    Unmasked where every row shares a bit with every key and `may` allows it; base: the number that block 0 of a tile's
    sequence has among all tiles of the other side.
    """
    group_N, kind_G = _groups(mine_N3)
    keep_GM, full_GM = _shared(mine_N3[kind_G], theirs_M3)
    keep, full = _rows(keep_GM), _rows(full_GM & may_M)
    tile_E, span_E = (spans_NS4[..., 3] > spans_NS4[..., 0]).nonzero(as_tuple=True)
    span_E4 = spans_NS4[tile_E, span_E].long()
    shift_E = group_N[tile_E] * WIDE + base_N.long()[tile_E]
    home_E = tile_E * WIDE - shift_E
    hull = _within(keep, span_E4[:, 0] + shift_E, span_E4[:, 3] + shift_E, home_E, MOST_RUNS, True)
    core = _within(full, span_E4[:, 1] + shift_E, span_E4[:, 2] + shift_E, home_E, _MOST_CORES, False)
    return spans_of(joined(*hull), joined(*core), len(spans_NS4))


def _groups(bits_N3: Tensor) -> tuple[Tensor, Tensor]:
    """Group of each tile by its bits, and a tile of each group. By 64-bit codes: unique over rows takes 20 times as long."""
    some_N, every_N, lit_N = bits_N3.long().unbind(1)
    words_N = ((some_N << 32) | (every_N & 0xFFFFFFFF)).unique(return_inverse=True)[1]
    kinds_G, group_N = (2 * words_N + lit_N).unique(return_inverse=True)
    return group_N, kinds_G.scatter(0, group_N, torch.arange(len(group_N)))


def _shared(mine_G3: Tensor, theirs_M3: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs [G, M] that share a bit, and pairs of which every row shares a bit with every key."""
    (any_G, all_G, lit_G), (any_M, all_M, lit_M) = mine_G3[:, :, None].unbind(1), theirs_M3.unbind(1)
    keep = (any_G & any_M) != 0
    whole = (all_G & all_M) != 0  # one bit that all have
    whole |= ((any_M & ~all_G) == 0) & (lit_M != 0)  # every row has all bits of the block's words
    whole |= ((any_G & ~all_M) == 0) & (lit_G != 0)
    return keep, whole & keep


def _rows(seen_GM: Tensor) -> Runs:
    """Runs of true entries, row by row."""
    edge = torch.nn.functional.pad(seen_GM.to(torch.int8), (1, 1)).diff(dim=1)
    group, begin = (edge == 1).nonzero(as_tuple=True)
    end = (edge == -1).nonzero(as_tuple=True)[1]
    return group * WIDE + begin, group * WIDE + end


def _within(runs: Runs, low_E: Tensor, high_E: Tensor, home_E: Tensor, most: int, swallow: bool) -> Runs:
    """The runs in each [low, high), at most `most`; with `swallow` the last takes all that follow. Codes move by `home`."""
    begin_R, end_R = runs
    if not len(begin_R):
        return begin_R, end_R
    first_E1 = torch.searchsorted(end_R, low_E, right=True)[:, None]
    count_E1 = torch.searchsorted(begin_R, high_E)[:, None] - first_E1
    number_J = torch.arange(most)
    at_EJ = first_E1 + number_J
    held_EJ = (number_J < count_E1) & (low_E < high_E)[:, None]
    to_EJ = at_EJ
    if swallow:
        to_EJ = torch.where(number_J == most - 1, torch.maximum(at_EJ, first_E1 + count_E1 - 1), at_EJ)
    top = len(begin_R) - 1
    begin_EJ = torch.maximum(begin_R[at_EJ.clamp_max(top)], low_E[:, None]) + home_E[:, None]
    end_EJ = torch.minimum(end_R[to_EJ.clamp_max(top)], high_E[:, None]) + home_E[:, None]
    return begin_EJ[held_EJ], end_EJ[held_EJ]

"""Tiles of masks that also speak of key columns or of class words: each tile pair is looked at, hull by hull.

A pair falls away when no row of the tile is in any key's column, or no class bit is shared; it is unmasked only when
every row is in every key's column and every word meets every row's. Costs O(visible tile pairs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.attention.plan_runs import ramps, spans_of_pairs
from nonet.attention.plan_spans import FAR, rows_of_tiles
from nonet.attention.table import IntervalTable

# Shapes: N query tiles, M key tiles, R rows of a tile, P tile pairs, S spans.


def refined(
    table: IntervalTable,
    spans_NS4: Tensor,
    query: tuple[Tensor, Tensor, Tensor],
    key: tuple[Tensor, Tensor, Tensor],
    key_base_B1: Tensor,
    sizes: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Spans by query tile [N, 4, 4] and by key tile [M, 4, 4]. query, key: place, first token and rows of each tile."""
    place_N2, token_N, rows_N = query
    tile_P, block_P = ramps(
        spans_NS4[..., 0].flatten().long(), (spans_NS4[..., 3] - spans_NS4[..., 0]).flatten().long()
    )
    span_P4 = spans_NS4.flatten(0, 1)[tile_P]
    full_P = (block_P >= span_P4[:, 1]) & (block_P < span_P4[:, 2])
    tile_P = tile_P // spans_NS4.shape[1]
    key_P = key_base_B1.long()[place_N2[tile_P, 0].long()] + block_P
    keep_P = torch.ones_like(full_P)
    if table.column_start is not None and table.column_stop is not None:
        first_P = place_N2[tile_P, 1] * sizes[0]
        seen, whole = _columns(table, key, sizes[1], first_P, first_P + rows_N[tile_P], key_P)
        keep_P, full_P = keep_P & seen, full_P & whole
    if table.sees is not None and table.word is not None:
        seen, whole = _classes(table, (token_N, rows_N), key[1:], sizes, tile_P, key_P)
        keep_P, full_P = keep_P & seen, full_P & whole
    full_P = full_P & keep_P
    tile_P, block_P, key_P, full_P = tile_P[keep_P], block_P[keep_P], key_P[keep_P], full_P[keep_P]
    by_query = spans_of_pairs(tile_P, block_P, full_P, len(place_N2))
    order = key_P.argsort(stable=True)
    whole_P = full_P & (rows_N[tile_P] == sizes[0])
    member_P = place_N2[tile_P, 1].long()
    return by_query, spans_of_pairs(key_P[order], member_P[order], whole_P[order], len(key[0]))


def _columns(
    table: IntervalTable,
    key: tuple[Tensor, Tensor, Tensor],
    size: int,
    first_P: Tensor,
    last_P: Tensor,
    key_P: Tensor,
) -> tuple[Tensor, Tensor]:
    """Pairs that some key's column meets, and pairs that lie within every key's column."""
    assert table.column_start is not None
    assert table.column_stop is not None
    token_MR, real_MR = rows_of_tiles(key[1], key[2], size, len(table.column_start))
    start_MR, stop_MR = table.column_start[token_MR], table.column_stop[token_MR]
    seen_MR = real_MR & (stop_MR > start_MR)
    begin = torch.where(seen_MR, start_MR, FAR).amin(1)[key_P]
    end = torch.where(seen_MR, stop_MR, 0).amax(1)[key_P]
    inner = torch.where(real_MR, start_MR, 0).amax(1)[key_P]
    outer = torch.where(real_MR, stop_MR, FAR).amin(1)[key_P]
    return (begin < last_P) & (end > first_P), (inner <= first_P) & (outer >= last_P)


def _classes(
    table: IntervalTable,
    query: tuple[Tensor, Tensor],
    key: tuple[Tensor, Tensor],
    sizes: tuple[int, int],
    tile_P: Tensor,
    key_P: Tensor,
) -> tuple[Tensor, Tensor]:
    """Pairs that share a bit, and pairs of which every row shares a bit with every key."""
    assert table.sees is not None
    assert table.word is not None
    any_N, all_N, lit_N = _bits(table.sees, *query, sizes[0])
    any_M, all_M, lit_M = _bits(table.word, *key, sizes[1])
    q_any, q_all, k_any, k_all = any_N[tile_P], all_N[tile_P], any_M[key_P], all_M[key_P]
    whole = (q_all & k_all) != 0  # one bit that all have
    whole |= ((k_any & ~q_all) == 0) & lit_M[key_P]  # every row has all bits of the block's words
    whole |= ((q_any & ~k_all) == 0) & lit_N[tile_P]
    return (q_any & k_any) != 0, whole


def _bits(word_T: Tensor, first_N: Tensor, rows_N: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bits that any row of a tile has, that all have, and whether none is without bits."""
    token_NR, real_NR = rows_of_tiles(first_N, rows_N, size, len(word_T))
    word_NR = word_T[token_NR].int()
    some, every = word_NR.masked_fill(~real_NR, 0), word_NR.masked_fill(~real_NR, -1)
    lit_N = ((word_NR != 0) | ~real_NR).all(1)
    while some.shape[1] > 1:
        half = some.shape[1] // 2
        some, every = some[:, :half] | some[:, half:], every[:, :half] & every[:, half:]
    return some[:, 0], every[:, 0], lit_N

"""Tile pairs turned into spans: the same pairs seen from the key tiles, for the backward that owns keys.

Consecutive query tiles differ in few key blocks, so a run of query tiles is found where a block comes in or falls out:
O(tiles + runs), never O(tiles^2); 65,536 tokens in one causal sequence take 1,024 events. A tile of more than 4 runs
has its last ones merged: more is computed under the mask, the result is the same.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

MOST_RUNS = 4
WIDE = 2**31
_MOST_STACKED = 32
Runs: TypeAlias = tuple[Tensor, Tensor]  # sorted codes, group * WIDE + place, of begins and of ends

# Shapes: N query tiles in packed order, B sequences, S spans of a tile, M key tiles, E events.


def transposed(spans_NS4: Tensor, place_N2: Tensor, full_rows_N: Tensor, key_base_B1: Tensor) -> Tensor:
    """[M, 4, 4]: per key tile the spans of query tiles that compute it; cores hold complete query tiles only.

    spans: rising, disjoint, tiles in packed order. place: sequence and tile within it. key_base: the first key tile of
    every sequence. A query tile that its sequence does not fill is never unmasked here, its rows need a bound.
    """
    tiles, outer = int(key_base_B1[-1]), spans_NS4[..., [0, 3]]
    inner = spans_NS4[..., 1:3].masked_fill(~full_rows_N[:, None, None], 0)
    hull, core = runs_of(outer, place_N2, key_base_B1), runs_of(inner, place_N2, key_base_B1)
    return spans_of(hull, core, tiles)


def joined(begin_R: Tensor, end_R: Tensor) -> Runs:
    """Sorted runs with those that touch made one."""
    if not len(begin_R):
        return begin_R, end_R
    apart = torch.ones(len(begin_R) + 1, dtype=torch.bool, device=begin_R.device)
    apart[1:-1] = begin_R[1:] != end_R[:-1]
    return begin_R[apart[:-1]], end_R[apart[1:]]


def stacked(runs: Runs, groups: int, swallow: bool) -> Tensor:
    """Runs as intervals [groups, R, 2], empty ones (0, 0). Past the 32nd of a group they are left out; with `swallow`
    the 32nd takes them all.
    """
    (begin, end), group = runs, runs[0] // WIDE
    number = _numbers(group, groups)
    if not swallow:
        begin, end, group, number = (x[number < _MOST_STACKED] for x in (begin, end, group, number))
    number = number.clamp_max(_MOST_STACKED - 1)
    most = int(number.max()) + 1 if len(number) else 1
    slot = group * most + number
    stack = begin.new_full((groups * most, 2), WIDE)
    stack[:, 0].scatter_reduce_(0, slot, begin % WIDE, "amin")
    stack[:, 1] = stack.new_zeros(len(stack)).scatter_reduce(0, slot, (end - 1) % WIDE + 1, "amax")
    stack[stack[:, 1] == 0] = 0
    return stack.view(groups, most, 2).int()


def _numbers(group_R: Tensor, groups: int) -> Tensor:
    """Place of each run among those of its group; groups rise."""
    counts = group_R.bincount(minlength=groups)
    return torch.arange(len(group_R), device=group_R.device) - (counts.cumsum(0) - counts)[group_R]


def runs_of(interval_NS2: Tensor, place_N2: Tensor, key_base_B1: Tensor) -> Runs:
    """Sorted codes (key tile, query tile) of where runs begin, and of where the same runs end."""
    rows, tiles_B = len(interval_NS2), place_N2[:, 0].bincount(minlength=len(key_base_B1) - 1)
    sequences = len(tiles_B)
    # One empty row behind every sequence's tiles, and one in front of all: each row is compared with the one before.
    to_N = torch.arange(rows, device=interval_NS2.device) + place_N2[:, 0] + 1
    padded = interval_NS2.new_zeros(rows + sequences + 1, *interval_NS2.shape[1:])
    padded[to_N] = interval_NS2
    sequence = torch.zeros(len(padded), dtype=torch.long, device=interval_NS2.device)
    tile = torch.zeros_like(sequence)
    sequence[to_N], tile[to_N] = place_N2[:, 0].long(), place_N2[:, 1].long()
    behind_B = tiles_B.cumsum(0) + torch.arange(1, sequences + 1, device=tiles_B.device)
    sequence[behind_B], tile[behind_B] = torch.arange(sequences, device=tiles_B.device), tiles_B
    base = key_base_B1.long()[sequence[1:]]
    begin = _events(padded[1:], padded[:-1], base, tile[1:])
    end = _events(padded[:-1], padded[1:], base, tile[1:])
    return begin, end


def _events(of_NS2: Tensor, without_NS2: Tensor, base_N: Tensor, tile_N: Tensor) -> Tensor:
    """Sorted codes (key tile, query tile) of the blocks in `of` that are not in `without`, row by row."""
    # The gaps between the other row's spans. Its empty spans must not open one: they become points at the far end.
    far = 2**30
    empty = without_NS2[..., 0] >= without_NS2[..., 1]
    other = torch.where(empty[..., None], far, without_NS2).sort(dim=1).values
    gap_begin = torch.cat([torch.zeros_like(other[:, :1, 1]), other[..., 1]], 1)
    gap_end = torch.cat([other[..., 0], torch.full_like(other[:, :1, 0], far)], 1)
    begin = torch.maximum(of_NS2[:, :, None, 0], gap_begin[:, None])
    end = torch.minimum(of_NS2[:, :, None, 1], gap_end[:, None])
    at, span, gap = (begin < end).nonzero(as_tuple=True)
    first = begin[at, span, gap].long()
    count = end[at, span, gap].long() - first
    block = _ramps(first, count)
    at = at.repeat_interleave(count)
    return ((base_N[at] + block) * WIDE + tile_N[at]).sort().values


def _ramps(first_E: Tensor, count_E: Tensor) -> Tensor:
    """first, first + 1, ... for `count` steps, one after the other."""
    before = count_E.cumsum(0) - count_E
    return torch.arange(int(count_E.sum()), device=first_E.device) + (first_E - before).repeat_interleave(
        count_E
    )


def spans_of(hull: Runs, core: Runs, groups: int) -> Tensor:
    """Runs by group (codes) into [groups, 4, 4]; of a run's cores the longest is kept."""
    (begin, end), (core_begin, core_end) = hull, core
    group = begin // WIDE
    slot = group * MOST_RUNS + _numbers(group, groups).clamp_max(MOST_RUNS - 1)
    spans = begin.new_zeros(groups * MOST_RUNS, 4)
    spans[:, 0] = begin.new_full((len(spans),), WIDE).scatter_reduce(0, slot, begin % WIDE, "amin")
    spans[:, 3].scatter_reduce_(0, slot, (end - 1) % WIDE + 1, "amax")
    home = slot[torch.searchsorted(begin, core_begin, right=True) - 1]
    best = spans.new_zeros(len(spans)).scatter_reduce(
        0, home, (core_end - core_begin) * WIDE + core_begin % WIDE, "amax"
    )
    length, at = best // WIDE, best % WIDE
    spans[:, 1] = torch.where(length > 0, at, spans[:, 0])
    spans[:, 2] = spans[:, 1] + length
    spans[spans[:, 3] == 0] = 0
    return spans.view(groups, MOST_RUNS, 4).int()

"""Tile pairs turned into spans: the same pairs seen from the key tiles, for the backward that owns keys.

Consecutive query tiles differ in few key blocks, so a run of query tiles is found where a block comes in or falls out:
O(tiles + runs), never O(tiles^2); 65,536 tokens in one causal sequence take 1,024 events. A tile of more than 4 runs
has its last ones merged: more is computed under the mask, the result is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_RUNS = 4
_WIDE = 2**31

# Shapes: N query tiles in packed order, B sequences, S spans of a tile, M key tiles, E events.


def transposed(spans_NS4: Tensor, place_N2: Tensor, full_rows_N: Tensor, key_base_B1: Tensor) -> Tensor:
    """[M, 4, 4]: per key tile the spans of query tiles that compute it; cores hold complete query tiles only.

    spans: rising, disjoint, tiles in packed order. place: sequence and tile within it. key_base: the first key tile of
    every sequence. A query tile that its sequence does not fill is never unmasked here, its rows need a bound.
    """
    tiles, outer = int(key_base_B1[-1]), spans_NS4[..., [0, 3]]
    inner = spans_NS4[..., 1:3].masked_fill(~full_rows_N[:, None, None], 0)
    begin, end = _runs(outer, place_N2, key_base_B1)
    core_begin, core_end = _runs(inner, place_N2, key_base_B1)
    return _spans(begin, end, core_begin, core_end, tiles)


def spans_of_pairs(group_P: Tensor, member_P: Tensor, full_P: Tensor, groups: int) -> Tensor:
    """[groups, 4, 4]: spans over the members of each group. Pairs come sorted by group, then member."""
    code = group_P * _WIDE + member_P
    begin, end = _runs_of_sorted(code)
    core_begin, core_end = _runs_of_sorted(code[full_P])
    return _spans(begin, end, core_begin, core_end, groups)


def _runs_of_sorted(code_P: Tensor) -> tuple[Tensor, Tensor]:
    """Begin and end codes of the maximal runs of consecutive codes."""
    jump = torch.ones(len(code_P) + 1, dtype=torch.bool, device=code_P.device)
    if len(code_P) > 1:
        jump[1:-1] = code_P[1:] != code_P[:-1] + 1
    if not len(code_P):
        return code_P, code_P
    return code_P[jump[:-1]], code_P[jump[1:]] + 1


def _runs(interval_NS2: Tensor, place_N2: Tensor, key_base_B1: Tensor) -> tuple[Tensor, Tensor]:
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
    return ((base_N[at] + block) * _WIDE + tile_N[at]).sort().values


def _ramps(first_E: Tensor, count_E: Tensor) -> Tensor:
    """first, first + 1, ... for `count` steps, one after the other."""
    before = count_E.cumsum(0) - count_E
    return torch.arange(int(count_E.sum()), device=first_E.device) + (first_E - before).repeat_interleave(
        count_E
    )


def ramps(first_E: Tensor, count_E: Tensor) -> tuple[Tensor, Tensor]:
    """Which ramp, and its value, for ramps first, first + 1, ... of `count` steps."""
    which = torch.arange(len(first_E), device=first_E.device).repeat_interleave(count_E)
    return which, _ramps(first_E, count_E)


def _spans(begin: Tensor, end: Tensor, core_begin: Tensor, core_end: Tensor, groups: int) -> Tensor:
    """Runs by group (codes) into [groups, 4, 4]; of a run's cores the longest is kept."""
    group = begin // _WIDE
    counts = group.bincount(minlength=groups)
    number = torch.arange(len(group), device=group.device) - (counts.cumsum(0) - counts)[group]
    slot = group * MOST_RUNS + number.clamp_max(MOST_RUNS - 1)
    spans = begin.new_zeros(groups * MOST_RUNS, 4)
    spans[:, 0] = begin.new_full((len(spans),), _WIDE).scatter_reduce(0, slot, begin % _WIDE, "amin")
    spans[:, 3].scatter_reduce_(0, slot, (end - 1) % _WIDE + 1, "amax")
    home = slot[torch.searchsorted(begin, core_begin, right=True) - 1]
    core = spans.new_zeros(len(spans)).scatter_reduce(
        0, home, (core_end - core_begin) * _WIDE + core_begin % _WIDE, "amax"
    )
    length, at = core // _WIDE, core % _WIDE
    spans[:, 1] = torch.where(length > 0, at, spans[:, 0])
    spans[:, 2] = spans[:, 1] + length
    spans[spans[:, 3] == 0] = 0
    return spans.view(groups, MOST_RUNS, 4).int()

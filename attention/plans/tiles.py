"""Tiles of queries and keys, and the plans that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: N tiles, S spans of a tile, B sequences.


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Tiles of queries (or keys) and the blocks of keys (or queries) that each one reads, the tiles with most work first.

    A span is four block numbers (a, b, c, d) within the sequence: blocks [a, b) need a mask, [b, c) need none, [c, d) need one.

    Attributes:
        place: The sequence of each tile (-1: no tile), its number within the sequence and its spans in use, int32 [N, 3].
        spans: The disjoint spans of each tile, int32 [N, S, 4].
    """

    place: Tensor
    spans: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TilePlan:
    """The work of the kernels for one mask and one batch, on the table's device."""

    block_q: int
    block_k: int
    query: Tiles  # Tiles of queries with spans of key blocks, for the forward and dQ kernels.
    key: Tiles  # Tiles of keys with spans of query blocks, for the dK and dV kernel.


@dataclass(frozen=True, slots=True, eq=False)
class TilePlans:
    """The plans of one mask and batch for the three kernels; kernels with equal blocks share a plan."""

    forward: TilePlan
    dq: TilePlan
    dkv: TilePlan


def bound_tiles(tokens: int, sequences: int, block: int) -> int:
    """Return the maximum number of tiles of this many packed tokens, for any lengths of the sequences."""
    return tokens // block + min(sequences, tokens)


def count_tiles_before(cuts_B1: Tensor, block: int) -> Tensor:
    """Compute the number of tiles before each sequence, [B + 1]."""
    base_B1 = torch.zeros_like(cuts_B1)
    base_B1[1:] = (-(-cuts_B1.diff() // block)).cumsum(0)
    return base_B1


def sort_by_work(place_N2: Tensor, spans_NS4: Tensor) -> Tiles:
    """Sort tiles by their number of blocks, descending, so that no long tile starts when the others have ended."""
    work_N = (spans_NS4[..., 3] - spans_NS4[..., 0]).sum(1)
    order_N = work_N.argsort(descending=True, stable=True)
    used_N1 = (spans_NS4[..., 3] > spans_NS4[..., 0]).sum(1, keepdim=True)
    place_N3 = torch.cat([place_N2, used_N1.to(place_N2.dtype)], 1)
    return Tiles(place_N3[order_N].int().contiguous(), spans_NS4[order_N].int().contiguous())

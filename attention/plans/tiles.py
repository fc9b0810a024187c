"""Tiles of queries and keys, and the plans that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: N tiles, S spans of a tile, B sequences.


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Tiles of one side and the blocks of the other side that each computes, sorted by work, longest first.

    A span is four block numbers within the sequence: masked [0, 1), unmasked [1, 2), masked [2, 3).
    """

    place: Tensor  # [N, 3] int32: sequence (-1: no tile), tile within the sequence, spans in use
    spans: Tensor  # [N, S, 4] int32, disjoint


@dataclass(frozen=True, slots=True, eq=False)
class TilePlan:
    """The work of the kernels for one mask and one batch, on the table's device."""

    block_q: int
    block_k: int
    query: Tiles  # tiles of queries, spans over blocks of keys: forward and dQ
    key: Tiles  # tiles of keys, spans over blocks of queries: dK and dV

    def count_bytes(self) -> int:
        """Return the size of the plan without the table."""
        tensors = (self.query.place, self.query.spans, self.key.place, self.key.spans)
        return sum(x.numel() * x.element_size() for x in tensors)


@dataclass(frozen=True, slots=True, eq=False)
class TilePlans:
    """The plans of one mask and batch for the three kernels; kernels with equal blocks share a plan."""

    forward: TilePlan
    dq: TilePlan
    dkv: TilePlan


def bound_tiles(tokens: int, sequences: int, block: int) -> int:
    """Return the maximum number of tiles for any lengths."""
    return tokens // block + min(sequences, tokens)


def count_tiles_before(cuts_B1: Tensor, block: int) -> Tensor:
    """Compute the number of tiles before each sequence, [B + 1]."""
    base_B1 = torch.zeros_like(cuts_B1)
    base_B1[1:] = (-(-cuts_B1.diff() // block)).cumsum(0)
    return base_B1


def sort_by_work(place_N2: Tensor, spans_NS4: Tensor) -> Tiles:
    """Sort the longest work first, so that no long tile starts when the others are done."""
    work_N = (spans_NS4[..., 3] - spans_NS4[..., 0]).sum(1)
    order_N = work_N.argsort(descending=True, stable=True)
    used_N1 = (spans_NS4[..., 3] > spans_NS4[..., 0]).sum(1, keepdim=True)
    place_N3 = torch.cat([place_N2, used_N1.to(place_N2.dtype)], 1)
    return Tiles(place_N3[order_N].int().contiguous(), spans_NS4[order_N].int().contiguous())

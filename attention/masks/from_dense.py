"""Rules that convert a dense or callable mask to intervals exactly, or raise an error.

A row of more than four runs is tried as columns (each key seen by one run of queries). Reading costs O(N^2) once,
in blocks of rows, and produces O(N) integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.masks.intersection import MOST_SLOTS
from nonet.attention.masks.packed import MaskRows, PackedGeometry
from nonet.errors import ConfigError

# Shapes: n_q queries and n_k keys of one sequence, T packed query tokens, S packed key tokens, K slots.
_BLOCK = 1 << 22  # Dense entries per block.


@dataclass(frozen=True, slots=True, eq=False)
class DenseRule:
    """One bool [n_q, n_k] for each sequence."""

    seen: Sequence[Tensor]

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        lengths = list(zip(geometry.cu_q.diff().tolist(), geometry.cu_k.diff().tolist(), strict=True))
        shapes = [tuple(seen.shape) for seen in self.seen]
        if shapes != lengths:
            raise ConfigError(
                f"the dense mask has shapes {shapes[:4]}, this batch's sequences are {lengths[:4]} [queries, keys]; "
                "give one bool matrix for each sequence."
            )
        return read_rows(
            geometry, lambda b, first, last: self.seen[b][first:last].to(geometry.cu_q.device).bool()
        )


@dataclass(frozen=True, slots=True, eq=False)
class MaskModRule:
    """FlexAttention's mask_mod(b, h, q, k) -> bool, with q and k in places of the own sequence and b its number."""

    mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    heads: int

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        keys = geometry.cu_k.diff().tolist()
        return read_rows(
            geometry,
            lambda b, first, last: self._evaluate_block(b, torch.arange(first, last), keys[b], geometry),
        )

    def _evaluate_block(self, b: int, row: Tensor, keys: int, at: PackedGeometry) -> Tensor:
        """Evaluate the mask for query rows of sequence b, and check that all heads agree."""
        device = at.cu_q.device
        grid_q, grid_k = row.to(device)[:, None], torch.arange(keys, device=device)[None]
        number = torch.tensor(b, device=device)
        heads = [
            torch.broadcast_to(
                self.mod(number, torch.tensor(h, device=device), grid_q, grid_k), (len(row), keys)
            )
            for h in range(self.heads)
        ]
        if any(not torch.equal(heads[0], other) for other in heads[1:]):
            raise ConfigError(
                "this mask_mod differs between heads; a UniMask is one mask for all heads. Split the call by head."
            )
        return heads[0].bool()


def read_rows(geometry: PackedGeometry, evaluate_block: Callable[[int, int, int], Tensor]) -> MaskRows:
    """Convert a dense mask, given in blocks, to row intervals, or to columns if rows need too many runs."""
    slots: list[list[Tensor]] = [[] for _ in range(2 * MOST_SLOTS)]
    most = 0
    for b, first, last, _ in _iterate_blocks(geometry):
        starts, stops, runs = _find_runs(evaluate_block(b, first, last))
        most = max(most, runs)
        for j in range(MOST_SLOTS):
            slots[2 * j].append(starts[j])
            slots[2 * j + 1].append(stops[j])
    if most > MOST_SLOTS:
        return _read_columns(geometry, evaluate_block, most)
    empty = torch.zeros(0, dtype=torch.int64, device=geometry.cu_q.device)
    packed = [torch.cat([empty, *slot]) for slot in slots]
    return MaskRows(tuple((packed[2 * j], packed[2 * j + 1]) for j in range(max(most, 1))))


def _read_columns(at: PackedGeometry, dense: Callable[[int, int, int], Tensor], most: int) -> MaskRows:
    """Convert a dense mask to the column form: full rows, and one run of queries per key."""
    starts, stops = [], []
    for b, (n_q, n_k) in enumerate(zip(at.cu_q.diff().tolist(), at.cu_k.diff().tolist(), strict=True)):
        seen = [dense(b, first, last) for b_of, first, last, _ in _iterate_blocks(at) if b_of == b]
        start, stop, runs = (
            _find_runs(torch.cat(seen).T) if n_q and n_k else ([at.cu_q.new_zeros(n_k)] * 4,) * 2 + (0,)
        )
        if runs > 1:
            raise ConfigError(
                f"this mask needs {most} intervals in a row and {runs} in a column; uni_attention expresses "
                f"{MOST_SLOTS} a row or 1 a column. Split it into masks and merge by log-sum-exp, or use FlexAttention."
            )
        starts.append(start[0])
        stops.append(stop[0])
    whole = (torch.zeros_like(at.keys_T), at.keys_T)
    return MaskRows((whole,), column=(torch.cat(starts), torch.cat(stops)))


def _iterate_blocks(at: PackedGeometry) -> Iterator[tuple[int, int, int, int]]:
    """Yield sequence, first row, row past the last, and keys of blocks of bounded size."""
    for b, (n_q, n_k) in enumerate(zip(at.cu_q.diff().tolist(), at.cu_k.diff().tolist(), strict=True)):
        size = max(1, _BLOCK // max(n_k, 1))
        for first in range(0, n_q, size):
            yield b, first, min(first + size, n_q), n_k


def _find_runs(seen_QN: Tensor) -> tuple[list[Tensor], list[Tensor], int]:
    """Return the first four runs of each row, start and stop [Q] each, and the largest number of runs in a row."""
    pad = torch.nn.functional.pad(seen_QN.to(torch.int8), (1, 1))
    edge = pad[:, 1:] - pad[:, :-1]
    rank = (edge == 1).cumsum(1)
    most = int(rank[:, -1].max()) if rank.numel() else 0
    starts, stops = [], []
    place = torch.arange(edge.shape[1], device=edge.device)
    ended = (edge == -1).cumsum(1)
    for j in range(1, MOST_SLOTS + 1):
        starts.append(((edge == 1) & (rank == j)).mul(place).sum(1))
        stops.append(((edge == -1) & (ended == j)).mul(place).sum(1))
    return starts, stops, most

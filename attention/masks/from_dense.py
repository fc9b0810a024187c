"""Rules that convert a dense or callable mask to intervals exactly, or raise an error.

A run is a maximal interval of visible keys in a row. If a row has more than four runs, the mask is converted to columns, in
which each key has one run of queries that see it. The mask is evaluated in blocks of rows, once for rows and a second time for
columns, each in O(N^2) operations, and gives O(N) integers.
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
_BLOCK_ENTRIES = 1 << 22  # The maximum number of entries of the dense mask that are evaluated at a time.


@dataclass(frozen=True, slots=True, eq=False)
class DenseRule:
    """A mask that is given as one bool matrix [n_q, n_k] for each sequence, true for visible pairs."""

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
    """A mask that is given as FlexAttention's mask_mod(b, h, q, k) -> bool.

    b is the number of the sequence; q is the number of the query and k that of the key in their sequence.
    """

    mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    heads: int

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        keys = geometry.cu_k.diff().tolist()
        return read_rows(
            geometry,
            lambda b, first, last: self._evaluate_block(b, torch.arange(first, last), keys[b], geometry),
        )

    def _evaluate_block(self, b: int, row: Tensor, keys: int, geometry: PackedGeometry) -> Tensor:
        """Evaluate the mask for query rows of sequence b and its keys, and check that all heads agree.

        Returns:
            The mask of these rows, bool [len(row), keys].
        """
        device = geometry.cu_q.device
        grid_q, grid_k = row.to(device)[:, None], torch.arange(keys, device=device)[None]
        sequence = torch.tensor(b, device=device)
        mask_by_head = [
            torch.broadcast_to(
                self.mod(sequence, torch.tensor(h, device=device), grid_q, grid_k), (len(row), keys)
            )
            for h in range(self.heads)
        ]
        if any(not torch.equal(mask_by_head[0], other) for other in mask_by_head[1:]):
            raise ConfigError(
                "this mask_mod differs between heads; a UniMask is one mask for all heads. Split the call by head."
            )
        return mask_by_head[0].bool()


def read_rows(geometry: PackedGeometry, evaluate_block: Callable[[int, int, int], Tensor]) -> MaskRows:
    """Convert a dense mask to row intervals, or to columns if a row needs more than four intervals.

    Args:
        geometry: The sequences of the batch.
        evaluate_block: Returns the mask of rows [first, last) of sequence b, bool [last - first, n_k], given (b, first, last).
    """
    # By slot, the starts of each block, and the stops; the first part of each is empty.
    empty = torch.zeros(0, dtype=torch.int64, device=geometry.cu_q.device)
    starts: list[list[Tensor]] = [[empty] for _ in range(MOST_SLOTS)]
    stops: list[list[Tensor]] = [[empty] for _ in range(MOST_SLOTS)]
    max_runs = 0
    for b, first, last in _iterate_blocks(geometry):
        block_starts, block_stops, runs = _find_runs(evaluate_block(b, first, last))
        max_runs = max(max_runs, runs)
        for slot in range(MOST_SLOTS):
            starts[slot].append(block_starts[slot])
            stops[slot].append(block_stops[slot])
    if max_runs > MOST_SLOTS:
        return _read_columns(geometry, evaluate_block, max_runs)
    slots = range(max(max_runs, 1))
    return MaskRows(tuple((torch.cat(starts[slot]), torch.cat(stops[slot])) for slot in slots))


def _read_columns(
    geometry: PackedGeometry, evaluate_block: Callable[[int, int, int], Tensor], row_runs: int
) -> MaskRows:
    """Convert a dense mask to the column form: full rows, and one run of queries per key.

    Raises:
        ConfigError: If a key needs several runs; the message also has `row_runs`, the number of runs that rows need.
    """
    n_keys = geometry.cu_k.diff().tolist()
    starts, stops, run_counts, last_rows = (
        [torch.zeros(n_k, dtype=torch.int64, device=geometry.cu_k.device) for n_k in n_keys] for _ in range(4)
    )
    for b, first, last in _iterate_blocks(geometry):
        seen = evaluate_block(b, first, last).long()
        edge = torch.cat([last_rows[b][None], seen]).diff(
            dim=0
        )  # 1 where a run starts, -1 where one has stopped
        place = torch.arange(first, last, device=edge.device)[:, None]
        run_counts[b] += (edge == 1).sum(0)
        starts[b] += ((edge == 1) * place).sum(0)  # the place of a single run
        stops[b] += ((edge == -1) * place).sum(0)
        last_rows[b] = seen[-1]
    for b, n_q in enumerate(geometry.cu_q.diff().tolist()):
        stops[b] += last_rows[b] * n_q
        runs = int(run_counts[b].max()) if len(run_counts[b]) else 0
        if runs > 1:
            raise ConfigError(
                f"this mask needs {row_runs} intervals in a row and {runs} in a column; uni_attention expresses "
                f"{MOST_SLOTS} a row or 1 a column. Split it into masks and merge by log-sum-exp, or use FlexAttention."
            )
    all_keys = (torch.zeros_like(geometry.keys_T), geometry.keys_T)
    return MaskRows((all_keys,), column=(torch.cat(starts), torch.cat(stops)))


def _iterate_blocks(geometry: PackedGeometry) -> Iterator[tuple[int, int, int]]:
    """Yield the sequence, the first row and the row past the last of blocks of rows of bounded size."""
    lengths = zip(geometry.cu_q.diff().tolist(), geometry.cu_k.diff().tolist(), strict=True)
    for b, (n_q, n_k) in enumerate(lengths):
        size = max(1, _BLOCK_ENTRIES // max(n_k, 1))
        for first in range(0, n_q, size):
            yield b, first, min(first + size, n_q)


def _find_runs(seen_QN: Tensor) -> tuple[list[Tensor], list[Tensor], int]:
    """Find the runs of visible keys in each row.

    Returns:
        The starts [Q] and the stops [Q] of the first four runs of each row (0 if a row has fewer), and the largest number of
        runs in a row.
    """
    padded = torch.nn.functional.pad(seen_QN.to(torch.int8), (1, 1))
    edge = padded[:, 1:] - padded[:, :-1]  # 1 where a run starts, -1 where one stops.
    runs_started, runs_stopped = (edge == 1).cumsum(1), (edge == -1).cumsum(1)
    max_runs = int(runs_started[:, -1].max()) if runs_started.numel() else 0
    starts, stops = [], []
    place = torch.arange(edge.shape[1], device=edge.device)
    for j in range(1, MOST_SLOTS + 1):
        starts.append(((edge == 1) & (runs_started == j)).mul(place).sum(1))
        stops.append(((edge == -1) & (runs_stopped == j)).mul(place).sum(1))
    return starts, stops, max_runs

"""A tile plan: which blocks each tile computes, and which of these need no mask.

`make_plan(table, block_q, block_k)` reads a mask's integers once per batch; forward, backward and all layers share it. Tiles
never cross sequences, long tiles come first, and the backward's view by key tile is the exact transpose. 65,536 tokens take 2 to
5 ms on one CPU thread, and 1 to 3 bytes per token in addition to the mask's own integers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nonet.attention.masks import IntervalTable
from nonet.attention.plans.refine import TileSide, refine_spans
from nonet.attention.plans.runs import transpose_spans
from nonet.attention.plans.spans import compute_slot_spans, make_disjoint
from nonet.attention.plans.tile_configs import TileConfig
from nonet.attention.plans.tiles import TilePlan, TilePlans, Tiles, count_tiles_before, sort_by_work
from nonet.errors import ConfigError

# Shapes: N tiles, S spans of a tile, T tokens, B sequences, K slots.
_BLOCK_SIZES = (16, 32, 64, 128, 256)


def make_plans(table: IntervalTable, config: TileConfig) -> TilePlans:
    """Make the plans of the forward and backward kernels for these tile sizes; kernels with equal sizes share a plan."""
    plans: dict[tuple[int, int], TilePlan] = {}
    for tile in (config.forward, config.dq, config.dkv):
        sizes = tile.block_q, tile.block_k
        plans[sizes] = plans.get(sizes) or make_plan(table, *sizes)
    forward, dq, dkv = (plans[tile.block_q, tile.block_k] for tile in (config.forward, config.dq, config.dkv))
    return TilePlans(forward, dq, dkv)


def make_plan(table: IntervalTable, block_q: int, block_k: int) -> TilePlan:
    """Plan tiles of block_q queries by block_k keys; both are powers of two from 16 to 256.

    On a GPU the plan is made on the device, without a transfer to the host. It then has room for the maximum number of tiles, and
    unused ones have sequence -1.
    """
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block not in _BLOCK_SIZES:
            raise ConfigError(
                f"plan: {name} is {block}; it must be one of {', '.join(map(str, _BLOCK_SIZES))}."
            )
    if table.start.device.type != "cpu":
        from nonet.attention.plans.on_device import plan_on_device  # it imports Triton

        return plan_on_device(table, block_q, block_k)
    query, key = _make_tiles(table.cu_q, block_q), _make_tiles(table.cu_k, block_k)
    spans_NS4 = _compute_spans(table, query, block_k)
    if table.column_start is None and table.sees is None:
        by_key = transpose_spans(spans_NS4, query.place, query.rows == block_q, key.base)
    else:
        spans_NS4, by_key = refine_spans(table, spans_NS4, query, key)
    return TilePlan(block_q, block_k, _sort_side_by_work(query, spans_NS4), _sort_side_by_work(key, by_key))


def _make_tiles(cuts_B1: Tensor, block: int) -> TileSide:
    """Cut the tokens of each sequence into tiles of at most `block` rows."""
    cuts = cuts_B1.numpy().astype(np.int64)
    base_B1 = count_tiles_before(cuts_B1, block).numpy().astype(np.int64)
    sequence_N = np.arange(len(cuts) - 1).repeat(np.diff(base_B1))
    tile_N = np.arange(len(sequence_N)) - base_B1[sequence_N]
    first_N = cuts[sequence_N] + tile_N * block
    rows_N = np.minimum(cuts[sequence_N + 1] - first_N, block)
    return TileSide(np.stack([sequence_N, tile_N], 1), first_N, rows_N, base_B1, block)


def _compute_spans(table: IntervalTable, query: TileSide, block_k: int) -> np.ndarray:
    """Compute the disjoint spans of key blocks that each tile of queries reads, [N, S, 4], at most one per slot."""
    if not len(query.first):
        return np.zeros((0, len(table.start), 4), dtype=np.int32)
    start_KT, stop_KT = table.start.numpy(), table.stop.numpy()
    return make_disjoint(
        compute_slot_spans(start_KT, stop_KT, query.first, query.rows, (query.size, block_k))
    )


def _sort_side_by_work(side: TileSide, spans_NS4: np.ndarray) -> Tiles:
    return sort_by_work(torch.from_numpy(side.place), torch.from_numpy(np.ascontiguousarray(spans_NS4)))

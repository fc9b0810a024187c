"""Tile plans made by Triton kernels on the device of the mask.

The numbers of tiles are upper bounds computed from tensor shapes, so no transfer to the host is needed. A plan takes about 30
kernel launches of fixed shape; it can therefore be part of a CUDA graph, and ragged batches cause no recompilation.
"""

from __future__ import annotations

from nonet.attention.masks import IntervalTable
from nonet.attention.plans.runs import MOST_RUNS
from nonet.attention.plans.tiles import TilePlan, Tiles, bound_tiles, count_tiles_before, sort_by_work
from nonet.attention.plans.triton_plan import key_kernel, query_kernel, summary_kernel


def plan_on_device(table: IntervalTable, block_q: int, block_k: int) -> TilePlan:
    """Make a tile plan with Triton kernels on the device of the table; unused tiles have sequence -1."""
    sequences = len(table.cu_q) - 1
    queries = bound_tiles(table.start.shape[1], sequences, block_q)
    keys = bound_tiles(_bound_keys(table), sequences, block_k)
    base_q, base_k = count_tiles_before(table.cu_q, block_q), count_tiles_before(table.cu_k, block_k)
    refined = table.column_start is not None or table.sees is not None
    max_spans = MOST_RUNS if refined else len(table.start)
    zeros = table.start.new_zeros
    query = Tiles(zeros(queries, 3), zeros(queries, max_spans, 4))
    key = Tiles(zeros(keys, 3), zeros(keys, MOST_RUNS, 4))
    rows, search_steps = zeros(queries), sequences.bit_length() + 1
    summary = zeros(keys, 8) if refined else None
    if summary is not None and keys:
        summary_kernel[(keys,)](
            *(summary, base_k, table.cu_k, table.column_start, table.column_stop, table.word),
            *(sequences, search_steps),
            BN=block_k,  # pyright: ignore[reportArgumentType]
        )
    if queries:
        query_kernel[(queries,)](
            *(
                query.place,
                query.spans,
                rows,
                base_q,
                base_k,
                table.cu_q,
                table.start,
                table.stop,
                table.sees,
            ),
            *(
                summary,
                zeros(queries, 16) if refined else None,
                sequences,
                search_steps,
                table.start.shape[1],
            ),
            K=len(table.start),
            S=max_spans,
            BM=block_q,
            BN=block_k,
            COLUMNS=table.column_start is not None,
            num_warps=1,  # pyright: ignore[reportCallIssue]
        )
    if keys:
        key_kernel[(keys,)](
            *(key.place, key.spans, base_k, base_q, query.place, query.spans, rows, sequences, search_steps),
            S=max_spans,
            R=MOST_RUNS,
            BM=block_q,
            num_warps=1,  # pyright: ignore[reportCallIssue]
        )
    return TilePlan(
        block_q,
        block_k,
        sort_by_work(query.place[:, :2], query.spans),
        sort_by_work(key.place[:, :2], key.spans),
    )


def _bound_keys(table: IntervalTable) -> int:
    """Return an upper bound of the number of packed keys without reading from the device."""
    for column in (table.column_start, table.word):
        if column is not None:
            return len(column)
    if table.cu_k is table.cu_q:
        return table.start.shape[1]
    return table.max_k * (len(table.cu_k) - 1)

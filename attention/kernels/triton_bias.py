"""The kernel for the gradients of the bias tables.

A program sums the gradients of one diagonal of square pieces of the score matrix in a fixed order, without atomics. The score
gradients of a piece are skewed (row i is rotated by i columns) so that pairs at equal distance are in one column. The time
differences of a piece fall into few buckets, which are summed one after the other. Each program stores its own partial sums,
for 2 BT distances and for the buckets, and torch adds these in order. This takes O(tokens) memory, and two matrix products per
piece in addition to the seven of the backward pass.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false
# (the code below is Triton's language: its constants, loops and tuples are not Python's, and its stubs change by version)

from __future__ import annotations

import triton
import triton.language as tl

from nonet.attention.kernels.triton_backward import compute_score_gradients
from nonet.attention.kernels.triton_score import (
    compute_time_buckets,
    compute_visible,
    dot,
    load_bounds,
    load_level,
    load_rows,
)

# Shapes: BT queries and BT keys of a piece, BM queries and BN keys of a tile of the plan, W time buckets, padded to a power of
# two.


@triton.jit
def is_touched(SPANS, tile, used, low, high, S: tl.constexpr, BN: tl.constexpr):
    """Return whether keys [low, high) overlap any span of the tile."""
    touches = 0
    for span in range(used):
        begin = tl.load(SPANS + (tile * S + span) * 4) * BN
        end = tl.load(SPANS + (tile * S + span) * 4 + 3) * BN
        touches = touches | tl.where((low < end) & (high > begin), 1, 0)
    return touches


@triton.jit
def gather_rows(X, row, width, stride, WIDTH: tl.constexpr):
    """Load the rows with indices `row` of the sequence at X; all of them must exist."""
    column = tl.arange(0, WIDTH)[None, :]
    return tl.load(X + row[:, None].to(tl.int64) * stride + column, mask=column < width, other=0.0)


@triton.jit(do_not_specialize=["tokens", "tiles", "lowest"])
def bias_kernel(
    Q, K, V, GRAD_OUT, LSE, DELTA, PARTIAL, PARTIAL_TIME, tiles, lowest,
    PLACE, SPANS, CU_Q, CU_K, START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets,
    tokens, heads, group, q_t, q_h, k_t, k_h, v_t, v_h, d_t, d_h,
    SLOTS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, SILU: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Compute the partial gradients for one diagonal, head and split.

    A tile of the plan has BM / BT pieces of queries. The splits share the pieces of queries of the diagonal. A piece of queries
    is combined with the BT keys that are (lowest + diagonal) * BT positions after it; `lowest` is negative for keys before the
    queries.
    """
    diagonal, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    mask = (START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD)
    bias = (POSITION, TIME, TIME_Q, TIME_K, position_stride, time_stride, reach, steps, buckets)
    scales = (inner_scale, outer_scale, silu_scale, soft_cap)
    FULL: tl.constexpr = (D == WD) and (E == WE)
    place = tl.arange(0, BT)
    # Column j of skewed row i is column (i + j) % BT of the row: a pair at distance j from the piece's diagonal if i + j < BT,
    # else at distance j - BT.
    skew = (place[None, :] + place[:, None]) % BT
    near = (place[None, :] + place[:, None]) < BT
    upper = tl.zeros([BT], tl.float32)
    lower = tl.zeros([BT], tl.float32)
    by_time = tl.zeros([W], tl.float32)
    for number in range(split, tiles * (BM // BT), tl.num_programs(2)):
        tile = number // (BM // BT)
        used = tl.load(PLACE + tile * 3 + 2)
        bounds = load_bounds(CU_Q, CU_K, tl.maximum(tl.load(PLACE + tile * 3), 0), tokens, head)
        q_first, k_first, rows, keys, _tokens, _head = bounds
        start = tl.load(PLACE + tile * 3 + 1) * BM + number % (BM // BT) * BT
        row = start + place
        low = start + keys - rows + (lowest + diagonal) * BT
        if is_touched(SPANS, tile, used, low, low + BT, S, BN) != 0:
            key = low + place
            real = row < rows
            inside = (key >= 0) & (key < keys)
            q_long, k_long = q_first.to(tl.int64), k_first.to(tl.int64)
            q = load_rows(Q + q_long * q_t + head * q_h, start, rows, D, q_t, True, BT, WD, FULL)
            grad_out = load_rows(
                GRAD_OUT + q_long * d_t + head * d_h, start, rows, E, d_t, True, BT, WE, FULL
            )
            # Positions without a key read the nearest existing key; `seen` excludes them below.
            nearest = tl.minimum(tl.maximum(key, 0), keys - 1)
            k = gather_rows(K + k_long * k_t + (head // group) * k_h, nearest, D, k_t, WD)
            v = gather_rows(V + k_long * v_t + (head // group) * v_h, nearest, E, v_t, WE)
            level = tl.zeros([BT], tl.float32)
            delta = tl.zeros([BT], tl.float32)
            if not SILU:
                lse_index = head.to(tl.int64) * tokens + q_first + row
                level = load_level(LSE, lse_index, real)
                delta = tl.load(DELTA + lse_index, mask=real, other=0.0)
            seen = inside[None, :] & compute_visible(mask, bounds, row[:, None], nearest[None, :], SLOTS)
            _weight, grad, _uncapped_grad = compute_score_gradients(
                dot(q, tl.trans(k), tl.zeros([BT, BT], tl.float32)),
                dot(grad_out, tl.trans(v), tl.zeros([BT, BT], tl.float32)),
                level[:, None], delta[:, None], seen, scales, bias, bounds, row[:, None], nearest[None, :], SILU, True,
            )  # fmt: skip
            if POSITION is not None:
                skewed = tl.gather(grad, skew, 1)
                upper += tl.sum(tl.where(near, skewed, 0.0), 0)
                lower += tl.sum(tl.where(near, 0.0, skewed), 0)
            if TIME is not None:
                bucket = compute_time_buckets(bias, bounds, row[:, None], nearest[None, :])
                first = tl.min(tl.where(seen, bucket, W))
                last = tl.max(tl.where(seen, bucket, -1))
                for bucket_index in range(first, last + 1):
                    share = tl.sum(tl.where(bucket == bucket_index, grad, 0.0))
                    by_time += tl.where(tl.arange(0, W) == bucket_index, share, 0.0)
    program = (head * tl.num_programs(2) + split) * tl.num_programs(0) + diagonal
    if POSITION is not None:
        # Distances from (lowest + diagonal - 1) * BT to (lowest + diagonal + 1) * BT: the lower half, then the upper half.
        tl.store(PARTIAL + program * (2 * BT) + place, lower)
        tl.store(PARTIAL + program * (2 * BT) + BT + place, upper)
    if TIME is not None:
        tl.store(PARTIAL_TIME + program * W + tl.arange(0, W), by_time)

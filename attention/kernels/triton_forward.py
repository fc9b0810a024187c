"""The forward kernel, with one program per tile of queries and head.

Each span of key blocks has two loops: one with a mask over the blocks at its edges, and one without a mask over the blocks
inside, which has no compare, select or bounds check on the score tile. The activation is an online softmax in base 2, or SiLU.
For a row that sees no key, the output is 0 and the log-sum-exp -inf. The order of work is that of FlashAttention-2 (Dao, 2023),
the spans are those of FlashMask.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false
# (the code below is Triton's language: its constants, loops and tuples are not Python's, and its stubs change by version)

from __future__ import annotations

import triton
import triton.language as tl

from nonet.attention.kernels.triton_score import (
    LN_2,
    LOG2_E,
    cast_to_nearest,
    compute_scores,
    compute_visible,
    dot,
    get_masked_block,
    load_rows,
    load_span,
    load_tile,
    sigmoid,
    store_rows,
)

# Shapes: BM queries and BN keys of a tile, D and E widths of q, k and of v, WD and WE the next powers of two. The tuples mask,
# bias, scales and bounds are described in triton_score.py. Strides of tokens end in _t, strides of heads in _h.


@triton.jit
def accumulate_block(
    q, block, top, total, acc, K, V, mask, bias, scales, bounds, row, stride_k, stride_v, D, E,
    SLOTS: tl.constexpr, BN: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, FULL: tl.constexpr,
    SILU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the accumulators of the rows: compute its scores and weights, and add the weighted values.

    `top` is the maximum score so far in base 2, `total` the sum of exp2(score - top), and `acc` the sum of the weighted values.
    Returns all three; SiLU uses only `acc`.
    """
    _inner_scale, outer_scale, _silu_scale, _soft_cap = scales
    _q_first, _k_first, _rows, keys, _tokens, _head = bounds
    key = block * BN + tl.arange(0, BN)
    k = load_rows(K, block * BN, keys, D, stride_k, MASKED, BN, WD, FULL)
    score = dot(q, tl.trans(k), tl.zeros([q.shape[0], BN], tl.float32))
    score = compute_scores(score, scales, bias, bounds, row[:, None], key[None, :])
    v = load_rows(V, block * BN, keys, E, stride_v, MASKED, BN, WE, FULL)
    if MASKED:
        seen = compute_visible(mask, bounds, row[:, None], key[None, :], SLOTS)
    if SILU:
        score = score * outer_scale
        weight = score * sigmoid(score)
        if MASKED:
            weight = tl.where(seen, weight, 0.0)
        acc = dot(cast_to_nearest(weight, v.dtype), v, acc)
    else:
        if MASKED:
            score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * outer_scale)
        shift = new_top
        if MASKED:  # A row that has seen no key yet: -inf - -inf would be NaN.
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp2(score * outer_scale - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weight, 1)
        acc = dot(cast_to_nearest(weight, v.dtype), v, acc * decay[:, None])
        top = new_top
    return top, total, acc


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    Q, K, V, OUT, LSE, SINK,
    PLACE, SPANS, CU_Q, CU_K, START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets,
    tokens, heads, group, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h,
    SLOTS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Compute OUT and, for softmax, LSE [H, tokens] in nats; there is one program per query tile and query head."""
    tile, head, sequence, number, used, bounds = load_tile(PLACE, CU_Q, CU_K, tokens, heads)  # pyright: ignore[reportGeneralTypeIssues]
    if sequence < 0:
        return
    q_first, k_first, rows, _keys, _tokens, _head = bounds
    mask = (START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD)
    bias = (POSITION, TIME, TIME_Q, TIME_K, position_stride, time_stride, reach, steps, buckets)
    scales = (inner_scale, outer_scale, silu_scale, soft_cap)
    first = number * BM
    row = first + tl.arange(0, BM)
    FULL: tl.constexpr = (D == WD) and (E == WE)
    q = load_rows(Q + q_first.to(tl.int64) * q_t + head * q_h, first, rows, D, q_t, True, BM, WD, FULL)
    K += k_first.to(tl.int64) * k_t + (head // group) * k_h
    V += k_first.to(tl.int64) * v_t + (head // group) * v_h
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, WE], tl.float32)
    for span in range(used):
        begin, inner, outer, end = load_span(SPANS, tile * S + span)
        for iteration in range(begin, end - (outer - inner)):
            top, total, acc = accumulate_block(
                q, get_masked_block(iteration, inner, outer), top, total, acc, K, V, mask, bias, scales, bounds, row,
                k_t, v_t, D, E, SLOTS, BN, WD, WE, FULL, SILU, True,
            )  # fmt: skip
        for block in range(inner, outer):
            top, total, acc = accumulate_block(
                q, block, top, total, acc, K, V, mask, bias, scales, bounds, row,
                k_t, v_t, D, E, SLOTS, BN, WD, WE, FULL, SILU, False,
            )  # fmt: skip
    if SILU:
        acc = acc * silu_scale
    else:
        if SINK is not None:
            logit = tl.load(SINK + head).to(tl.float32) * LOG2_E
            new_top = tl.maximum(top, logit)
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.exp2(logit - new_top)
            acc = acc * decay[:, None]
            top = new_top
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        acc = acc / total[:, None]
        lse = tl.where(empty, -float("inf"), (top + tl.log2(total)) * LN_2)
        tl.store(LSE + head.to(tl.int64) * tokens + q_first + row, lse, mask=row < rows)
    store_rows(OUT + head * o_h + q_first.to(tl.int64) * o_t, acc, row, rows, E, o_t, WE)

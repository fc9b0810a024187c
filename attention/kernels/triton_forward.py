"""The forward kernel: one program a tile of queries and head; a masked loop over span edges, an unmasked one inside.

The unmasked loop has no compare, select or bounds mask on the score tile. Online softmax in base 2, or SiLU; a row that
sees nothing gives 0 and a log-sum-exp of -inf. Flash attention's order of work (Dao, 2023), spans after FlashMask.
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

# Shapes: BM queries and BN keys of a tile, WD and WE widths of q, k and of v as powers of two. Tuples: triton_score.py.


@triton.jit
def accumulate_block(
    q, block, top, total, acc, K, V, mask, bias, scales, bounds, row, stride_k, stride_v, D, E,
    SLOTS: tl.constexpr, BN: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, FULL: tl.constexpr,
    SILU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one block of keys: compute scores and weights, and add the values."""
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
        above = tl.maximum(top, tl.max(score, 1) * outer_scale)
        shift = above
        if MASKED:
            shift = tl.where(above == -float("inf"), 0.0, above)
        weight = tl.exp2(score * outer_scale - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weight, 1)
        acc = dot(cast_to_nearest(weight, v.dtype), v, acc * decay[:, None])
        top = above
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
    """Compute outputs and LSE [H, tokens] in nats; programs are [tiles * heads]."""
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
            above = tl.maximum(top, logit)
            decay = tl.exp2(top - above)
            total = total * decay + tl.exp2(logit - above)
            acc = acc * decay[:, None]
            top = above
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        acc = acc / total[:, None]
        sums = tl.where(empty, -float("inf"), (top + tl.log2(total)) * LN_2)
        tl.store(LSE + head.to(tl.int64) * tokens + q_first + row, sums, mask=row < rows)
    store_rows(OUT + head * o_h + q_first.to(tl.int64) * o_t, acc, row, rows, E, o_t, WE)

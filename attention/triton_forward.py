"""The forward kernel: one program a tile of queries and head; a masked loop over span edges, an unmasked one inside.

The unmasked loop has no compare, select or bounds mask on the score tile. Online softmax in base 2, or SiLU; a row that
sees nothing gives 0 and a log-sum-exp of -inf. Flash attention's order of work (Dao, 2023), spans after FlashMask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nonet.attention.triton_score import LN_2, LOG2_E, dot, load_rows, narrow, scores, sigmoid, visible

# Shapes: BM queries and BN keys of a tile, WD and WE widths of q, k and of v as powers of two.


@triton.jit
def step(
    q, block, top, total, acc, K, V,
    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, soft_cap, position_stride, time_stride, reach, steps, buckets, head,
    q_first, k_first, row, rows, keys, tokens, stride_k, stride_v, D, E,
    SLOTS: tl.constexpr, BN: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, FULL: tl.constexpr,
    SILU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: scores, weights, values added."""
    key = block * BN + tl.arange(0, BN)
    k = load_rows(K, block * BN, keys, D, stride_k, MASKED, BN, WD, FULL)
    score = dot(q, tl.trans(k), tl.zeros([q.shape[0], BN], tl.float32))
    score = scores(
        score, inner_scale, soft_cap, POSITION, TIME, TIME_Q, TIME_K, position_stride, time_stride, head,
        q_first, k_first, row[:, None], key[None, :], rows, keys, reach, steps, buckets,
    )  # fmt: skip
    v = load_rows(V, block * BN, keys, E, stride_v, MASKED, BN, WE, FULL)
    if MASKED:
        seen = visible(
            START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD,
            q_first, k_first, row[:, None], key[None, :], rows, keys, tokens, SLOTS,
        )  # fmt: skip
    if SILU:
        score = score * outer_scale
        weight = score * sigmoid(score)
        if MASKED:
            weight = tl.where(seen, weight, 0.0)
        acc = dot(narrow(weight, v.dtype), v, acc)
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
        acc = dot(narrow(weight, v.dtype), v, acc * decay[:, None])
        top = above
    return top, total, acc


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    Q, K, V, OUT, LSE, PLACE, SPANS, CU_Q, CU_K,
    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, SINK, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets,
    tokens, heads, group, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h,
    SLOTS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Programs [tiles * heads], the heads of a tile side by side; LSE [H, tokens] in nats."""
    tile = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    sequence = tl.load(PLACE + tile * 3)
    if sequence < 0:
        return
    first = tl.load(PLACE + tile * 3 + 1) * BM
    row = first + tl.arange(0, BM)
    used = tl.load(PLACE + tile * 3 + 2)
    q_first, k_first = tl.load(CU_Q + sequence), tl.load(CU_K + sequence)
    rows, keys = tl.load(CU_Q + sequence + 1) - q_first, tl.load(CU_K + sequence + 1) - k_first
    FULL: tl.constexpr = (D == WD) and (E == WE)
    q = load_rows(Q + q_first.to(tl.int64) * q_t + head * q_h, first, rows, D, q_t, True, BM, WD, FULL)
    K += k_first.to(tl.int64) * k_t + (head // group) * k_h
    V += k_first.to(tl.int64) * v_t + (head // group) * v_h
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, WE], tl.float32)
    for span in range(used):
        at = SPANS + (tile * S + span) * 4
        begin, inner, outer, end = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        for number in range(begin, end - (outer - inner)):
            block = number + tl.where(number < inner, 0, outer - inner)
            top, total, acc = step(
                q, block, top, total, acc, K, V,
                START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
                inner_scale, outer_scale, soft_cap, position_stride, time_stride, reach, steps, buckets, head,
                q_first, k_first, row, rows, keys, tokens, k_t, v_t, D, E,
                SLOTS, BN, WD, WE, FULL, SILU, True,
            )  # fmt: skip
        for block in range(inner, outer):
            top, total, acc = step(
                q, block, top, total, acc, K, V,
                START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
                inner_scale, outer_scale, soft_cap, position_stride, time_stride, reach, steps, buckets, head,
                q_first, k_first, row, rows, keys, tokens, k_t, v_t, D, E,
                SLOTS, BN, WD, WE, FULL, SILU, False,
            )  # fmt: skip
    real = row < rows
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
        tl.store(LSE + head.to(tl.int64) * tokens + q_first + row, sums, mask=real)
    column = tl.arange(0, WE)
    at = OUT + head * o_h + q_first.to(tl.int64) * o_t + row[:, None] * o_t + column[None, :]
    tl.store(at, narrow(acc, OUT.dtype.element_ty), mask=real[:, None] & (column[None, :] < E))

"""The backward kernels: dQ by tile of queries, dK and dV by tile of keys. No atomics, so the same bits every run.

Weights are computed again from the log-sum-exp, 7 matrix products where a fused kernel with atomics has 5. dQ runs first
and leaves delta = sum(out * grad) - grad_lse for the other. All query heads of a key head are summed by one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nonet.attention.triton_score import LOG2_E, cap_slope, dot, load_rows, narrow, scores, sigmoid, visible

# Shapes: BM queries and BN keys of a tile, WD and WE widths of q, k and of v as powers of two.


@triton.jit
def slopes(
    product, grad_weight, level, delta, seen, inner_scale, outer_scale, silu_scale, soft_cap,
    POSITION, TIME, TIME_Q, TIME_K, position_stride, time_stride, head,
    q_first, k_first, row, key, rows, keys, reach, steps, buckets,
    SILU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Weights of a tile, and the gradient of its scores before and behind the soft cap.

    level, delta: log2-sum-exp and delta of the rows, shaped like row. For SiLU both are unused.
    """
    score = scores(
        product, inner_scale, soft_cap, POSITION, TIME, TIME_Q, TIME_K, position_stride, time_stride, head,
        q_first, k_first, row, key, rows, keys, reach, steps, buckets,
    )  # fmt: skip
    if SILU:
        score = score * outer_scale
        gate = sigmoid(score)
        weight = score * gate * silu_scale
        grad = grad_weight * silu_scale * gate * (1.0 + score * (1.0 - gate))
        if MASKED:
            weight = tl.where(seen, weight, 0.0)
            grad = tl.where(seen, grad, 0.0)
    else:
        weight = tl.exp2(score * outer_scale - level)
        if MASKED:
            weight = tl.where(seen, weight, 0.0)
        grad = weight * (grad_weight - delta)
    bent = grad
    if soft_cap is not None:
        bent = grad * cap_slope(product, inner_scale, soft_cap)
    return weight, grad, bent


@triton.jit
def dq_step(
    q, grad_out, block, level, delta, acc, K, V,
    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets, head,
    q_first, k_first, row, rows, keys, tokens, stride_k, stride_v, D, E,
    SLOTS: tl.constexpr, BN: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, FULL: tl.constexpr,
    SILU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to dQ."""
    key = block * BN + tl.arange(0, BN)
    k = load_rows(K, block * BN, keys, D, stride_k, MASKED, BN, WD, FULL)
    v = load_rows(V, block * BN, keys, E, stride_v, MASKED, BN, WE, FULL)
    product = dot(q, tl.trans(k), tl.zeros([q.shape[0], BN], tl.float32))
    grad_weight = dot(grad_out, tl.trans(v), tl.zeros([q.shape[0], BN], tl.float32))
    seen = True
    if MASKED:
        seen = visible(
            START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD,
            q_first, k_first, row[:, None], key[None, :], rows, keys, tokens, SLOTS,
        )  # fmt: skip
    _weight, _grad, bent = slopes(
        product, grad_weight, level[:, None], delta[:, None], seen, inner_scale, outer_scale, silu_scale, soft_cap,
        POSITION, TIME, TIME_Q, TIME_K, position_stride, time_stride, head,
        q_first, k_first, row[:, None], key[None, :], rows, keys, reach, steps, buckets, SILU, MASKED,
    )  # fmt: skip
    return dot(narrow(bent, k.dtype), k, acc)


@triton.jit(do_not_specialize=["tokens"])
def dq_kernel(
    Q, K, V, OUT, GRAD_OUT, LSE, GRAD_LSE, DELTA, GRAD_Q, PLACE, SPANS, CU_Q, CU_K,
    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets, scale,
    tokens, heads, group, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, d_t, d_h, g_t, g_h,
    SLOTS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Programs [tiles * heads]; writes GRAD_Q and, for softmax, DELTA [H, tokens]."""
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
    q_long, k_long = q_first.to(tl.int64), k_first.to(tl.int64)
    q = load_rows(Q + q_long * q_t + head * q_h, first, rows, D, q_t, True, BM, WD, FULL)
    grad_out = load_rows(GRAD_OUT + q_long * d_t + head * d_h, first, rows, E, d_t, True, BM, WE, FULL)
    real = row < rows
    level = tl.zeros([BM], tl.float32)
    delta = tl.zeros([BM], tl.float32)
    if not SILU:
        line = head.to(tl.int64) * tokens + q_first + row
        sums = tl.load(LSE + line, mask=real, other=float("inf"))
        # A row that sees nothing has no weight: exp2(score - inf) is 0 where exp2(score + inf) would not be.
        level = tl.where(sums == -float("inf"), float("inf"), sums * LOG2_E)
        out = load_rows(OUT + q_long * o_t + head * o_h, first, rows, E, o_t, True, BM, WE, FULL)
        delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
        if GRAD_LSE is not None:
            delta -= tl.load(GRAD_LSE + line, mask=real, other=0.0)
        tl.store(DELTA + line, delta, mask=real)
    K += k_long * k_t + (head // group) * k_h
    V += k_long * v_t + (head // group) * v_h
    acc = tl.zeros([BM, WD], tl.float32)
    for span in range(used):
        at = SPANS + (tile * S + span) * 4
        begin, inner, outer, end = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        for number in range(begin, end - (outer - inner)):
            block = number + tl.where(number < inner, 0, outer - inner)
            acc = dq_step(
                q, grad_out, block, level, delta, acc, K, V,
                START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
                inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets,
                head, q_first, k_first, row, rows, keys, tokens, k_t, v_t, D, E,
                SLOTS, BN, WD, WE, FULL, SILU, True,
            )  # fmt: skip
        for block in range(inner, outer):
            acc = dq_step(
                q, grad_out, block, level, delta, acc, K, V,
                START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
                inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets,
                head, q_first, k_first, row, rows, keys, tokens, k_t, v_t, D, E,
                SLOTS, BN, WD, WE, FULL, SILU, False,
            )  # fmt: skip
    column = tl.arange(0, WD)
    at = GRAD_Q + q_long * g_t + head * g_h + row[:, None] * g_t + column[None, :]
    tl.store(at, narrow(acc * scale, GRAD_Q.dtype.element_ty), mask=real[:, None] & (column[None, :] < D))


@triton.jit
def dkv_step(
    k, v, block, grad_k, grad_v, Q, GRAD_OUT, LSE, DELTA,
    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets, head,
    q_first, k_first, key, rows, keys, tokens, stride_q, stride_d, D, E,
    SLOTS: tl.constexpr, BM: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, FULL: tl.constexpr,
    SILU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one block of queries to dK and dV; the score tile is [BN, BM] here."""
    row = block * BM + tl.arange(0, BM)
    q = load_rows(Q, block * BM, rows, D, stride_q, MASKED, BM, WD, FULL)
    grad_out = load_rows(GRAD_OUT, block * BM, rows, E, stride_d, MASKED, BM, WE, FULL)
    product = dot(k, tl.trans(q), tl.zeros([k.shape[0], BM], tl.float32))
    grad_weight = dot(v, tl.trans(grad_out), tl.zeros([k.shape[0], BM], tl.float32))
    level = tl.zeros([BM], tl.float32)
    delta = tl.zeros([BM], tl.float32)
    seen = True
    if MASKED:
        if not SILU:
            level = tl.load(LSE + row, mask=row < rows, other=float("inf"))
            level = tl.where(level == -float("inf"), float("inf"), level * LOG2_E)
            delta = tl.load(DELTA + row, mask=row < rows, other=0.0)
        seen = visible(
            START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD,
            q_first, k_first, row[None, :], key[:, None], rows, keys, tokens, SLOTS,
        )  # fmt: skip
    else:
        if not SILU:
            level = tl.load(LSE + row) * LOG2_E
            delta = tl.load(DELTA + row)
    weight, _grad, bent = slopes(
        product, grad_weight, level[None, :], delta[None, :], seen, inner_scale, outer_scale, silu_scale, soft_cap,
        POSITION, TIME, TIME_Q, TIME_K, position_stride, time_stride, head,
        q_first, k_first, row[None, :], key[:, None], rows, keys, reach, steps, buckets, SILU, MASKED,
    )  # fmt: skip
    grad_v = dot(narrow(weight, grad_out.dtype), grad_out, grad_v)
    grad_k = dot(narrow(bent, q.dtype), q, grad_k)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["tokens"])
def dkv_kernel(
    Q, K, V, GRAD_OUT, LSE, DELTA, GRAD_K, GRAD_V, PLACE, SPANS, CU_Q, CU_K,
    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets, scale,
    tokens, key_heads, group, q_t, q_h, k_t, k_h, v_t, v_h, d_t, d_h, gk_t, gk_h, gv_t, gv_h,
    SLOTS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Programs [tiles * key heads]; PLACE and SPANS are those of the key tiles."""
    tile = tl.program_id(0) // key_heads
    key_head = tl.program_id(0) % key_heads
    sequence = tl.load(PLACE + tile * 3)
    if sequence < 0:
        return
    first = tl.load(PLACE + tile * 3 + 1) * BN
    key = first + tl.arange(0, BN)
    used = tl.load(PLACE + tile * 3 + 2)
    q_first, k_first = tl.load(CU_Q + sequence), tl.load(CU_K + sequence)
    rows, keys = tl.load(CU_Q + sequence + 1) - q_first, tl.load(CU_K + sequence + 1) - k_first
    FULL: tl.constexpr = (D == WD) and (E == WE)
    q_long, k_long = q_first.to(tl.int64), k_first.to(tl.int64)
    k = load_rows(K + k_long * k_t + key_head * k_h, first, keys, D, k_t, True, BN, WD, FULL)
    v = load_rows(V + k_long * v_t + key_head * v_h, first, keys, E, v_t, True, BN, WE, FULL)
    grad_k = tl.zeros([BN, WD], tl.float32)
    grad_v = tl.zeros([BN, WE], tl.float32)
    for number in range(used * group):
        span = number % used
        head = key_head * group + number // used
        q_head = Q + q_long * q_t + head * q_h
        d_head = GRAD_OUT + q_long * d_t + head * d_h
        lse_head = LSE + head.to(tl.int64) * tokens + q_first
        delta_head = DELTA + head.to(tl.int64) * tokens + q_first
        at = SPANS + (tile * S + span) * 4
        begin, inner, outer, end = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        for turn in range(begin, end - (outer - inner)):
            block = turn + tl.where(turn < inner, 0, outer - inner)
            grad_k, grad_v = dkv_step(
                k, v, block, grad_k, grad_v, q_head, d_head, lse_head, delta_head,
                START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
                inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets,
                head, q_first, k_first, key, rows, keys, tokens, q_t, d_t, D, E,
                SLOTS, BM, WD, WE, FULL, SILU, True,
            )  # fmt: skip
        for block in range(inner, outer):
            grad_k, grad_v = dkv_step(
                k, v, block, grad_k, grad_v, q_head, d_head, lse_head, delta_head,
                START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
                inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets,
                head, q_first, k_first, key, rows, keys, tokens, q_t, d_t, D, E,
                SLOTS, BM, WD, WE, FULL, SILU, False,
            )  # fmt: skip
    real = (key < keys)[:, None]
    column = tl.arange(0, WD)[None, :]
    at = GRAD_K + k_long * gk_t + key_head * gk_h + key[:, None] * gk_t + column
    tl.store(at, narrow(grad_k * scale, GRAD_K.dtype.element_ty), mask=real & (column < D))
    column = tl.arange(0, WE)[None, :]
    at = GRAD_V + k_long * gv_t + key_head * gv_h + key[:, None] * gv_t + column
    tl.store(at, narrow(grad_v, GRAD_V.dtype.element_ty), mask=real & (column < E))

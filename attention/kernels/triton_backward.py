"""The backward kernels: one computes dQ for tiles of queries, the other dK and dV for tiles of keys.

They use no atomics, so the results are deterministic bit for bit. Both recompute the weights from the log-sum-exp, which takes 7
matrix products instead of the 5 of a fused kernel with atomics. The dQ kernel runs first and stores delta = sum(out * grad) -
grad_lse for the dK/dV kernel. One program of the dK/dV kernel sums over all query heads of a key head.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false
# (the code below is Triton's language: its constants, loops and tuples are not Python's, and its stubs change by version)

from __future__ import annotations

import triton
import triton.language as tl

from nonet.attention.kernels.triton_score import (
    LOG2_E,
    cast_to_nearest,
    compute_cap_slope,
    compute_scores,
    compute_visible,
    dot,
    get_masked_block,
    load_level,
    load_rows,
    load_span,
    load_tile,
    sigmoid,
    store_rows,
)

# Shapes: BM queries and BN keys of a tile, D and E widths of q, k and of v, WD and WE the next powers of two. The tuples mask,
# bias, scales and bounds are described in triton_score.py. Strides of tokens end in _t, strides of heads in _h.
_DELTA_COLUMNS = tl.constexpr(64)  # Columns of out and grad per chunk of delta.
_PRODUCT_COLUMNS = tl.constexpr(32)  # Columns per chunk of a wide float32 product.


@triton.jit
def compute_score_gradients(
    product, grad_weight, level, delta, seen, scales, bias, bounds, row, key,
    SILU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute the attention weights of a tile and the gradients of its scores.

    `product` is q @ k.T, `grad_weight` is grad_out @ v.T. `level` and `delta` are the base-2 log-sum-exp and the delta of the
    rows, with the shape of `row`; SiLU does not use them.

    Returns:
        The weights, the gradient of the scores after the soft cap, and the gradient of the scores before it.
    """
    inner_scale, outer_scale, silu_scale, soft_cap = scales
    score = compute_scores(product, scales, bias, bounds, row, key)
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
    uncapped_grad = grad
    if soft_cap is not None:
        uncapped_grad = grad * compute_cap_slope(product, inner_scale, soft_cap)
    return weight, grad, uncapped_grad


@triton.jit
def compute_delta(
    OUT, GRAD_OUT, first, rows, E, stride_o, stride_d, BM: tl.constexpr, WE: tl.constexpr, FULL: tl.constexpr
):
    """Compute sum(out * grad_out) of each row [BM] in chunks of columns, because complete rows do not fit into the registers."""
    CHUNK: tl.constexpr = WE if WE < _DELTA_COLUMNS else _DELTA_COLUMNS
    delta = tl.zeros([BM], tl.float32)
    for column in tl.static_range(0, WE, CHUNK):
        out = load_rows(OUT + column, first, rows, E - column, stride_o, True, BM, CHUNK, FULL)
        grad = load_rows(GRAD_OUT + column, first, rows, E - column, stride_d, True, BM, CHUNK, FULL)
        delta += tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    return delta


@triton.jit
def multiply_rows(
    A, a_first, a_rows, stride_a, B, b_first, b_rows, stride_b, width, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Compute A @ B.T for rows of A and B, in chunks of columns.

    Without chunks, a float32 product needs one row of each operand in the registers of every thread: 512 registers for a width of
    256, half of which would spill. The barrier prevents the compiler from loading the next chunk early.
    """
    CHUNK: tl.constexpr = WIDTH if WIDTH < _PRODUCT_COLUMNS else _PRODUCT_COLUMNS
    acc = tl.zeros([BM, BN], tl.float32)
    for column in tl.static_range(0, WIDTH, CHUNK):
        a = load_rows(A + column, a_first, a_rows, width - column, stride_a, True, BM, CHUNK, FULL)
        b = load_rows(B + column, b_first, b_rows, width - column, stride_b, MASKED, BN, CHUNK, FULL)
        acc = dot(a, tl.trans(b), acc)
        tl.debug_barrier()
    return acc


@triton.jit
def accumulate_dq(
    q, grad_out, block, level, delta, acc, Q, GRAD_OUT, K, V, mask, bias, scales, bounds, first,
    stride_q, stride_d, stride_k, stride_v, D, E, SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WD: tl.constexpr, WE: tl.constexpr, FULL: tl.constexpr, SILU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one block of keys to dQ."""
    _q_first, _k_first, rows, keys, _tokens, _head = bounds
    row = first + tl.arange(0, BM)
    key = block * BN + tl.arange(0, BN)
    k = load_rows(K, block * BN, keys, D, stride_k, MASKED, BN, WD, FULL)
    v = load_rows(V, block * BN, keys, E, stride_v, MASKED, BN, WE, FULL)
    WIDE: tl.constexpr = (K.dtype.element_ty == tl.float32) and (WD + WE > 256)
    if WIDE:
        product = multiply_rows(
            Q, first, rows, stride_q, K, block * BN, keys, stride_k, D, MASKED, BM, BN, WD, FULL
        )
        grad_weight = multiply_rows(
            GRAD_OUT, first, rows, stride_d, V, block * BN, keys, stride_v, E, MASKED, BM, BN, WE, FULL
        )
    else:
        product = dot(q, tl.trans(k), tl.zeros([BM, BN], tl.float32))
        grad_weight = dot(grad_out, tl.trans(v), tl.zeros([BM, BN], tl.float32))
    seen = True
    if MASKED:
        seen = compute_visible(mask, bounds, row[:, None], key[None, :], SLOTS)
    _weight, _grad, uncapped_grad = compute_score_gradients(
        product, grad_weight, level[:, None], delta[:, None], seen, scales, bias, bounds, row[:, None], key[None, :],
        SILU, MASKED,
    )  # fmt: skip
    return dot(cast_to_nearest(uncapped_grad, k.dtype), k, acc)


@triton.jit(do_not_specialize=["tokens"])
def dq_kernel(
    Q, K, V, OUT, GRAD_OUT, LSE, GRAD_LSE, DELTA, GRAD_Q, scale,
    PLACE, SPANS, CU_Q, CU_K, START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets,
    tokens, heads, group, q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, d_t, d_h, g_t, g_h,
    SLOTS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Compute GRAD_Q and, for softmax, store DELTA [H, tokens]; there is one program per query tile and query head."""
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
    q_long, k_long = q_first.to(tl.int64), k_first.to(tl.int64)
    Q += q_long * q_t + head * q_h
    GRAD_OUT += q_long * d_t + head * d_h
    q = load_rows(Q, first, rows, D, q_t, True, BM, WD, FULL)
    level = tl.zeros([BM], tl.float32)
    delta = tl.zeros([BM], tl.float32)
    if not SILU:
        lse_index = head.to(tl.int64) * tokens + q_first + row
        level = load_level(LSE, lse_index, row < rows)
        delta = compute_delta(
            OUT + q_long * o_t + head * o_h, GRAD_OUT, first, rows, E, o_t, d_t, BM, WE, FULL
        )
        if GRAD_LSE is not None:
            delta -= tl.load(GRAD_LSE + lse_index, mask=row < rows, other=0.0)
        tl.store(DELTA + lse_index, delta, mask=row < rows)
    grad_out = load_rows(GRAD_OUT, first, rows, E, d_t, True, BM, WE, FULL)
    K += k_long * k_t + (head // group) * k_h
    V += k_long * v_t + (head // group) * v_h
    acc = tl.zeros([BM, WD], tl.float32)
    for span in range(used):
        begin, inner, outer, end = load_span(SPANS, tile * S + span)
        for iteration in range(begin, end - (outer - inner)):
            acc = accumulate_dq(
                q, grad_out, get_masked_block(iteration, inner, outer), level, delta, acc, Q, GRAD_OUT, K, V, mask, bias,
                scales, bounds, first, q_t, d_t, k_t, v_t, D, E, SLOTS, BM, BN, WD, WE, FULL, SILU, True,
            )  # fmt: skip
        for block in range(inner, outer):
            acc = accumulate_dq(
                q, grad_out, block, level, delta, acc, Q, GRAD_OUT, K, V, mask, bias,
                scales, bounds, first, q_t, d_t, k_t, v_t, D, E, SLOTS, BM, BN, WD, WE, FULL, SILU, False,
            )  # fmt: skip
    store_rows(GRAD_Q + q_long * g_t + head * g_h, acc * scale, row, rows, D, g_t, WD)


@triton.jit
def accumulate_dkv(
    k, v, block, grad_k, grad_v, Q, GRAD_OUT, LSE, DELTA, mask, bias, scales, bounds, key, stride_q, stride_d, D, E,
    SLOTS: tl.constexpr, BM: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, FULL: tl.constexpr,
    SILU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one block of queries to dK and dV; the score tile is transposed, [BN, BM]."""
    _q_first, _k_first, rows, _keys, _tokens, _head = bounds
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
            level = load_level(LSE, row, row < rows)
            delta = tl.load(DELTA + row, mask=row < rows, other=0.0)
        seen = compute_visible(mask, bounds, row[None, :], key[:, None], SLOTS)
    else:
        if not SILU:
            level = tl.load(LSE + row) * LOG2_E
            delta = tl.load(DELTA + row)
    weight, _grad, uncapped_grad = compute_score_gradients(
        product, grad_weight, level[None, :], delta[None, :], seen, scales, bias, bounds, row[None, :], key[:, None],
        SILU, MASKED,
    )  # fmt: skip
    grad_v = dot(cast_to_nearest(weight, grad_out.dtype), grad_out, grad_v)
    grad_k = dot(cast_to_nearest(uncapped_grad, q.dtype), q, grad_k)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["tokens"])
def dkv_kernel(
    Q, K, V, GRAD_OUT, LSE, DELTA, GRAD_K, GRAD_V, scale,
    PLACE, SPANS, CU_Q, CU_K, START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD, POSITION, TIME, TIME_Q, TIME_K,
    inner_scale, outer_scale, silu_scale, soft_cap, position_stride, time_stride, reach, steps, buckets,
    tokens, heads, group, q_t, q_h, k_t, k_h, v_t, v_h, d_t, d_h, gk_t, gk_h, gv_t, gv_h,
    SLOTS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WD: tl.constexpr, WE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Compute GRAD_K and GRAD_V; there is one program per key tile and key head.

    PLACE and SPANS are those of the key tiles; blocks are blocks of queries.
    """
    tile, key_head, sequence, number, used, bounds = load_tile(PLACE, CU_Q, CU_K, tokens, heads // group)  # pyright: ignore[reportGeneralTypeIssues]
    if sequence < 0:
        return
    q_first, k_first, rows, keys, _tokens, _head = bounds
    mask = (START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD)
    bias = (POSITION, TIME, TIME_Q, TIME_K, position_stride, time_stride, reach, steps, buckets)
    scales = (inner_scale, outer_scale, silu_scale, soft_cap)
    first = number * BN
    key = first + tl.arange(0, BN)
    FULL: tl.constexpr = (D == WD) and (E == WE)
    q_long, k_long = q_first.to(tl.int64), k_first.to(tl.int64)
    k = load_rows(K + k_long * k_t + key_head * k_h, first, keys, D, k_t, True, BN, WD, FULL)
    v = load_rows(V + k_long * v_t + key_head * v_h, first, keys, E, v_t, True, BN, WE, FULL)
    grad_k = tl.zeros([BN, WD], tl.float32)
    grad_v = tl.zeros([BN, WE], tl.float32)
    for index in range(used * group):
        head = key_head * group + index // used
        bounds = (q_first, k_first, rows, keys, tokens, head)
        q_head = Q + q_long * q_t + head * q_h
        d_head = GRAD_OUT + q_long * d_t + head * d_h
        lse_head = LSE + head.to(tl.int64) * tokens + q_first
        delta_head = DELTA + head.to(tl.int64) * tokens + q_first
        begin, inner, outer, end = load_span(SPANS, tile * S + index % used)
        for iteration in range(begin, end - (outer - inner)):
            grad_k, grad_v = accumulate_dkv(
                k, v, get_masked_block(iteration, inner, outer), grad_k, grad_v, q_head, d_head, lse_head, delta_head,
                mask, bias, scales, bounds, key, q_t, d_t, D, E, SLOTS, BM, WD, WE, FULL, SILU, True,
            )  # fmt: skip
        for block in range(inner, outer):
            grad_k, grad_v = accumulate_dkv(
                k, v, block, grad_k, grad_v, q_head, d_head, lse_head, delta_head,
                mask, bias, scales, bounds, key, q_t, d_t, D, E, SLOTS, BM, WD, WE, FULL, SILU, False,
            )  # fmt: skip
    store_rows(GRAD_K + k_long * gk_t + key_head * gk_h, grad_k * scale, key, keys, D, gk_t, WD)
    store_rows(GRAD_V + k_long * gv_t + key_head * gv_h, grad_v, key, keys, E, gv_t, WE)

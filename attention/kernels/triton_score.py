"""Triton functions that the forward and backward kernels share: loading tiles, matrix products, visibility, scores, activations.

The functions take query positions (`row`) and key positions (`key`) within the sequence as tensors that broadcast to the score
tile: [BM, 1] and [1, BN], or [1, BM] and [BN, 1] for the transposed tile of dK and dV. Only plain Triton is used, without
extensions for one vendor.

Related arguments are passed as one tuple, which adds no instructions to the compiled kernel:
    mask    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD: the tensors of the `IntervalTable`
    bias    POSITION, TIME: the tables [H or 1, 2 * reach - 1] and [H or 1, buckets]; TIME_Q, TIME_K: times of the tokens;
            position_stride, time_stride: head strides of the tables; reach: number of distances per direction (larger ones are
            clipped); steps: buckets per doubling of the time difference; buckets
    scales  inner_scale, outer_scale, silu_scale, soft_cap: see `_compute_scales` in launch.py
    bounds  q_first, k_first: the sequence's first packed query and key; rows, keys: its numbers of queries and keys;
            tokens: number of queries in the batch; head: the query head
"""

# ruff: noqa: RET505, SIM102
from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, acc):
    """Compute acc + a @ b with full fp32 products; operands are cast to fp32 for the interpreter, which cannot multiply bf16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast_to_nearest(x, dtype: tl.constexpr):
    """Cast x to dtype, rounding to nearest; the interpreter truncates bf16, so the rounding is explicit there."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = bits + 0x7FFF + ((bits >> 16) & 1)
            x = (bits & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def load_rows(
    X, first, limit, width, stride,
    BOUNDED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Load rows `first` to `first` + ROWS of the sequence at X as [ROWS, WIDTH].

    Columns past `width` are 0 unless FULL (WIDTH equals `width`). Rows from `limit` on are 0 if BOUNDED; otherwise all rows must
    exist.

    The block's address is one scalar, and the offsets within it are the same in every iteration of a loop.
    """
    row_offset = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    address = X + tl.cast(first, tl.int64) * stride + (row_offset * stride + column)
    if FULL:
        if BOUNDED:
            return tl.load(address, mask=row_offset < limit - first, other=0.0)
        else:
            return tl.load(address)
    else:
        if BOUNDED:
            return tl.load(address, mask=(row_offset < limit - first) & (column < width), other=0.0)
        else:
            return tl.load(address, mask=column < width, other=0.0)


@triton.jit
def load_tile(PLACE, CU_Q, CU_K, tokens, lanes):
    """Load the tile of this program.

    The grid is [tiles * lanes]; a lane is one of the heads that compute the same tile, and consecutive programs are the lanes of
    one tile.

    Returns:
        The index of the tile, the lane, the tile's sequence, its number within the sequence, the number of spans in use, and
        `bounds`. The sequence is -1 for an unused tile; `bounds` is then that of sequence 0.
    """
    tile = tl.program_id(0) // lanes
    lane = tl.program_id(0) % lanes
    sequence = tl.load(PLACE + tile * 3)
    number, used = tl.load(PLACE + tile * 3 + 1), tl.load(PLACE + tile * 3 + 2)
    return tile, lane, sequence, number, used, load_bounds(CU_Q, CU_K, tl.maximum(sequence, 0), tokens, lane)


@triton.jit
def load_bounds(CU_Q, CU_K, sequence, tokens, head):
    """Load the first tokens and lengths of a sequence and return the tuple `bounds` described at the top of this file."""
    q_first, k_first = tl.load(CU_Q + sequence), tl.load(CU_K + sequence)
    rows, keys = tl.load(CU_Q + sequence + 1) - q_first, tl.load(CU_K + sequence + 1) - k_first
    return q_first, k_first, rows, keys, tokens, head


@triton.jit
def load_span(SPANS, number):
    """Load the span with this number: begin, inner, outer and end.

    Blocks [inner, outer) need no mask; the others in [begin, end) do.
    """
    address = SPANS + number * 4
    return tl.load(address), tl.load(address + 1), tl.load(address + 2), tl.load(address + 3)


@triton.jit
def get_masked_block(iteration, inner, outer):
    """Return the block for an iteration of the loop over [begin, end - (outer - inner)), which skips blocks [inner, outer)."""
    return iteration + tl.where(iteration < inner, 0, outer - inner)


@triton.jit
def load_level(LSE, at, real):
    """Load the log-sum-exp of the rows `at` and convert it to base 2, with +inf for missing rows and rows without visible keys.

    Their stored value is -inf. With +inf, their weights exp2(score - level) become 0.
    """
    lse = tl.load(LSE + at, mask=real, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E)


@triton.jit
def store_rows(X, x, at, limit, width, stride, WIDTH: tl.constexpr):
    """Store x as the rows with indices `at` of the sequence at X, except those from `limit` on; cast to the dtype of X."""
    column = tl.arange(0, WIDTH)[None, :]
    address = X + at[:, None] * stride + column
    tl.store(address, cast_to_nearest(x, X.dtype.element_ty), mask=(at < limit)[:, None] & (column < width))


@triton.jit
def compute_visible(mask, bounds, row, key, SLOTS: tl.constexpr):
    """Compute which queries of the tile see which keys.

    A key is visible if it is in one of the row's intervals, the row is in the key's column interval (if there are columns), and
    both share a class bit (if there are classes).
    """
    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD = mask
    q_first, k_first, rows, keys, tokens, _head = bounds
    exists = row < rows
    seen = (row < 0) & (key < 0)
    for slot in tl.static_range(SLOTS):  # pyright: ignore[reportGeneralTypeIssues]
        row_index = slot * tokens + q_first + row
        begin = tl.load(START + row_index, mask=exists, other=0)
        end = tl.load(STOP + row_index, mask=exists, other=0)
        seen = seen | ((key >= begin) & (key < end))
    if COLUMN_START is not None:
        begin = tl.load(COLUMN_START + k_first + key, mask=key < keys, other=0)
        end = tl.load(COLUMN_STOP + k_first + key, mask=key < keys, other=0)
        seen = seen & (row >= begin) & (row < end)
    if WORD is not None:
        bits = tl.load(SEES + q_first + row, mask=exists, other=0)
        word = tl.load(WORD + k_first + key, mask=key < keys, other=0)
        seen = seen & ((bits & word) != 0)
    return seen


@triton.jit
def tanh(x):
    """Approximate tanh within 3e-7 relative error by the rational function of Eigen's ptanh, without branches."""
    # Beyond these bounds, the float32 result is 1 or -1.
    x = tl.minimum(tl.maximum(x, -7.90531110763549805), 7.90531110763549805)
    squared = x * x
    numerator = squared * -2.76076847742355e-16 + 2.00018790482477e-13
    numerator = squared * numerator - 8.60467152213735e-11
    numerator = squared * numerator + 5.12229709037114e-08
    numerator = squared * numerator + 1.48572235717979e-05
    numerator = squared * numerator + 6.37261928875436e-04
    numerator = squared * numerator + 4.89352455891786e-03
    denominator = squared * 1.19825839466702e-06 + 1.18534705686654e-04
    denominator = squared * denominator + 2.26843463243900e-03
    denominator = squared * denominator + 4.89352518554385e-03
    return x * numerator / denominator


@triton.jit
def sigmoid(x):
    """Compute the logistic function of x."""
    return 1.0 / (1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def compute_offsets(bounds, row, key, reach):
    """Compute each pair's index into the position table; the position of a query is row + keys - rows."""
    _q_first, _k_first, rows, keys, _tokens, _head = bounds
    distance = key - (row + (keys - rows))
    return tl.minimum(tl.maximum(distance, 1 - reach), reach - 1) + (reach - 1)


@triton.jit
def compute_time_buckets(bias, bounds, row, key):
    """Compute the bucket of each pair's time difference, as `compute_bucket` in calls/bias.py does.

    Rows and keys past the end use the time of the last one.
    """
    _POSITION, _TIME, TIME_Q, TIME_K, _position_stride, _time_stride, _reach, steps, buckets = bias
    q_first, k_first, rows, keys, _tokens, _head = bounds
    time_q = tl.load(TIME_Q + q_first + tl.minimum(row, rows - 1))
    time_k = tl.load(TIME_K + k_first + tl.minimum(key, keys - 1))
    difference = tl.maximum(tl.abs(time_q - time_k), 1).to(tl.float32)
    octaves = (difference.to(tl.int32, bitcast=True) - 0x3F800000) >> 8
    return tl.minimum((octaves.to(tl.float32) * (steps * (1.0 / 32768.0))).to(tl.int32), buckets - 1)


@triton.jit
def compute_scores(qk, scales, bias, bounds, row, key):
    """Convert the products q @ k.T to scores, without the factor `outer_scale`, which the caller applies."""
    inner_scale, _outer_scale, _silu_scale, soft_cap = scales
    POSITION, TIME, _TIME_Q, _TIME_K, position_stride, time_stride, reach, _steps, _buckets = bias
    _q_first, _k_first, _rows, _keys, _tokens, head = bounds
    if soft_cap is not None:
        qk = soft_cap * tanh(qk * inner_scale)
    else:
        if (POSITION is not None) or (TIME is not None):
            qk = qk * inner_scale
    if POSITION is not None:
        qk += tl.load(POSITION + head * position_stride + compute_offsets(bounds, row, key, reach)).to(
            tl.float32
        )
    if TIME is not None:
        qk += tl.load(TIME + head * time_stride + compute_time_buckets(bias, bounds, row, key)).to(tl.float32)
    return qk


@triton.jit
def compute_cap_slope(qk, inner_scale, soft_cap):
    """Compute 1 - tanh(inner_scale * qk)^2, the derivative of the soft cap with respect to its scaled input."""
    capped = tanh(qk * inner_scale)
    return 1.0 - capped * capped

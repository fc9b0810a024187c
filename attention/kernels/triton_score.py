"""Device code that forward and backward share: a program's tile, products, visibility, scores, activations.

Everything takes its row and key numbers as tensors that broadcast to the score tile, [BM, 1] and [1, BN] or the other
way round, so the transposed tile of dK and dV is the same code. Plain Triton: no vendor's extension.

What belongs together travels as one tuple, which costs no instruction:
    mask    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD: the table's integers
    bias    POSITION, TIME, TIME_Q, TIME_K, position_stride, time_stride, reach, steps, buckets
    scales  inner_scale, outer_scale, silu_scale, soft_cap
    here    q_first, k_first, rows, keys, tokens, head: the sequence's first tokens and lengths, all queries, the head
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
    """Compute acc + a @ b with full fp32 products; the interpreter multiplies bit patterns of bf16, so it gets fp32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast_to_nearest(x, dtype: tl.constexpr):
    """Round x to the nearest of dtype; the interpreter truncates bf16, so it is rounded explicitly there."""
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
    """Load rows [ROWS, WIDTH] of the sequence at X from row `first` on; zeros from `limit` on if BOUNDED, and past `width`.

    The block's address is one scalar, and the offsets within it are the same in every iteration of a loop.
    """
    place = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    at = X + tl.cast(first, tl.int64) * stride + (place * stride + column)
    if FULL:
        if BOUNDED:
            return tl.load(at, mask=place < limit - first, other=0.0)
        else:
            return tl.load(at)
    else:
        if BOUNDED:
            return tl.load(at, mask=(place < limit - first) & (column < width), other=0.0)
        else:
            return tl.load(at, mask=column < width, other=0.0)


@triton.jit
def load_tile(PLACE, CU_Q, CU_K, tokens, lanes):
    """Load this program's tile, its lane (head) of `lanes`, sequence, tile within it, spans in use, and `here`.

    Programs are [tiles * lanes], the lanes of a tile side by side. The sequence is -1 if there is no tile; the rest
    is then that of sequence 0.
    """
    tile = tl.program_id(0) // lanes
    lane = tl.program_id(0) % lanes
    sequence = tl.load(PLACE + tile * 3)
    number, used = tl.load(PLACE + tile * 3 + 1), tl.load(PLACE + tile * 3 + 2)
    return tile, lane, sequence, number, used, load_bounds(CU_Q, CU_K, tl.maximum(sequence, 0), tokens, lane)


@triton.jit
def load_bounds(CU_Q, CU_K, sequence, tokens, head):
    """Load the first tokens and lengths of a sequence and return them as `here`."""
    q_first, k_first = tl.load(CU_Q + sequence), tl.load(CU_K + sequence)
    rows, keys = tl.load(CU_Q + sequence + 1) - q_first, tl.load(CU_K + sequence + 1) - k_first
    return q_first, k_first, rows, keys, tokens, head


@triton.jit
def load_span(SPANS, at):
    """Load span number `at`: begin, first and past the last unmasked block, end."""
    at = SPANS + at * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def get_masked_block(turn, inner, outer):
    """Return the block of a turn of the loop over [begin, end - (outer - inner)), which skips the core."""
    return turn + tl.where(turn < inner, 0, outer - inner)


@triton.jit
def load_level(LSE, at, real):
    """Load the log2-sum-exp of rows; +inf for missing rows and rows without visible keys.

    exp2(score - inf) is 0, but exp2(score + inf) is not.
    """
    sums = tl.load(LSE + at, mask=real, other=float("inf"))
    return tl.where(sums == -float("inf"), float("inf"), sums * LOG2_E)


@triton.jit
def store_rows(X, x, at, limit, width, stride, WIDTH: tl.constexpr):
    """Store rows `at` below `limit` of the sequence at X, rounded to the nearest of its type."""
    column = tl.arange(0, WIDTH)[None, :]
    to = X + at[:, None] * stride + column
    tl.store(to, cast_to_nearest(x, X.dtype.element_ty), mask=(at < limit)[:, None] & (column < width))


@triton.jit
def compute_visible(mask, here, row, key, SLOTS: tl.constexpr):
    """Compute which pairs of the tile see each other: by any of the row's intervals, the key's column, a shared class bit."""
    START, STOP, COLUMN_START, COLUMN_STOP, SEES, WORD = mask
    q_first, k_first, rows, keys, tokens, _head = here
    real = row < rows
    seen = (row < 0) & (key < 0)
    for slot in tl.static_range(SLOTS):  # pyright: ignore[reportGeneralTypeIssues]
        at = slot * tokens + q_first + row
        begin = tl.load(START + at, mask=real, other=0)
        end = tl.load(STOP + at, mask=real, other=0)
        seen = seen | ((key >= begin) & (key < end))
    if COLUMN_START is not None:
        begin = tl.load(COLUMN_START + k_first + key, mask=key < keys, other=0)
        end = tl.load(COLUMN_STOP + k_first + key, mask=key < keys, other=0)
        seen = seen & (row >= begin) & (row < end)
    if WORD is not None:
        bits = tl.load(SEES + q_first + row, mask=real, other=0)
        word = tl.load(WORD + k_first + key, mask=key < keys, other=0)
        seen = seen & ((bits & word) != 0)
    return seen


@triton.jit
def tanh(x):
    """Approximate tanh within 3e-7 relative error without a select: the rational function of Eigen's ptanh, x clamped to 7.9."""
    x = tl.minimum(tl.maximum(x, -7.90531110763549805), 7.90531110763549805)
    y = x * x
    up = y * -2.76076847742355e-16 + 2.00018790482477e-13
    up = y * up - 8.60467152213735e-11
    up = y * up + 5.12229709037114e-08
    up = y * up + 1.48572235717979e-05
    up = y * up + 6.37261928875436e-04
    up = y * up + 4.89352455891786e-03
    down = y * 1.19825839466702e-06 + 1.18534705686654e-04
    down = y * down + 2.26843463243900e-03
    down = y * down + 4.89352518554385e-03
    return x * up / down


@triton.jit
def sigmoid(x):
    """Compute the logistic function of x."""
    return 1.0 / (1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def compute_offsets(here, row, key, reach):
    """Compute the entry of the position table for each pair; the query is at position row + keys - rows."""
    _q_first, _k_first, rows, keys, _tokens, _head = here
    apart = key - (row + (keys - rows))
    return tl.minimum(tl.maximum(apart, 1 - reach), reach - 1) + (reach - 1)


@triton.jit
def compute_time_buckets(bias, here, row, key):
    """Bucket of each pair's time difference; rows and keys that are not there read the last one's time."""
    _POSITION, _TIME, TIME_Q, TIME_K, _position_stride, _time_stride, _reach, steps, buckets = bias
    q_first, k_first, rows, keys, _tokens, _head = here
    time_q = tl.load(TIME_Q + q_first + tl.minimum(row, rows - 1))
    time_k = tl.load(TIME_K + k_first + tl.minimum(key, keys - 1))
    between = tl.maximum(tl.abs(time_q - time_k), 1).to(tl.float32)
    octaves = (between.to(tl.int32, bitcast=True) - 0x3F800000) >> 8
    return tl.minimum((octaves.to(tl.float32) * (steps * (1.0 / 32768.0))).to(tl.int32), buckets - 1)


@triton.jit
def compute_scores(qk, scales, bias, here, row, key):
    """Convert products to scores except for a last factor, which the caller merges with that of the exponent."""
    inner_scale, _outer_scale, _silu_scale, soft_cap = scales
    POSITION, TIME, _TIME_Q, _TIME_K, position_stride, time_stride, reach, _steps, _buckets = bias
    _q_first, _k_first, _rows, _keys, _tokens, head = here
    if soft_cap is not None:
        qk = soft_cap * tanh(qk * inner_scale)
    else:
        if (POSITION is not None) or (TIME is not None):
            qk = qk * inner_scale
    if POSITION is not None:
        qk += tl.load(POSITION + head * position_stride + compute_offsets(here, row, key, reach)).to(
            tl.float32
        )
    if TIME is not None:
        qk += tl.load(TIME + head * time_stride + compute_time_buckets(bias, here, row, key)).to(tl.float32)
    return qk


@triton.jit
def compute_cap_slope(qk, inner_scale, soft_cap):
    """Compute the derivative of the soft cap at these products, without the scale."""
    bent = tanh(qk * inner_scale)
    return 1.0 - bent * bent

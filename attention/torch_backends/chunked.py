"""The chunked reference for what fused CPU kernels do not support: SiLU, bias tables and the soft cap.

A block consists of some rows of a long sequence, or of short sequences of similar length. Its scores [B, H, rows, keys] of at
most 2^22 entries exist only while it is computed, so memory stays O(N). The backward computes each block again with autograd. It
is plain torch and runs on any device and in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from nonet.attention.calls import AttentionCall, RelativeBias, compute_bucket
from nonet.attention.masks import IntervalTable, compute_visible
from nonet.attention.torch_backends.buckets import BucketSide, compute_bucket_mask, group_sequences, make_side

# Shapes: T packed query tokens, S packed key tokens, H query heads, D width, E value width; of a block B sequences, n rows
# and m keys per sequence, t and s its real ones.
_MAX_SCORES = 1 << 22  # Maximum number of scores of a block of rows of a long sequence.
_MAX_SHARED_SCORES = (
    1 << 18
)  # Maximum number of scores of a block of short sequences, which fit a core's cache.
_MAX_ROWS = 256  # Maximum number of rows of a block, and of queries and keys of a short sequence.


@dataclass(frozen=True, slots=True, eq=False)
class _ScoreBlock:
    """Rows and keys of B sequences, padded to the longest.

    Attributes:
        sequences: The number of sequences B.
        query: The query tokens.
        key: The key tokens.
        seen: Whether each pair is visible, bool [B, n, m], false in the padding.
        distance: The position of the key minus that of the query [B, n, m].
    """

    sequences: int
    query: BucketSide
    key: BucketSide
    seen: Tensor
    distance: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Compute output [T, H, E] and log-sum-exp [T, H] (meaningless for SiLU)."""
    sum_dtype = _get_sum_dtype(q)
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=sum_dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=sum_dtype, device=q.device)
    if call.sink is not None:
        lse = lse.logaddexp(call.sink.to(sum_dtype))
    for block in _iterate_blocks(call, q.shape[1], len(q), len(k)):
        part, part_lse = _attend(*_pad_inputs(block, q, k, v), call, block)
        out.index_copy_(0, block.query.token, block.query.pack(part))
        lse.index_copy_(0, block.query.token, block.query.pack(part_lse[..., None])[..., 0])
    return out.to(q.dtype), lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> list[Tensor | None]:
    """Compute the gradients of q, k, v, sink, and the bias's position and time tables; None for inputs that do not exist."""
    sum_dtype, bias = _get_sum_dtype(q), call.bias or RelativeBias()
    inputs = (q, k, v, call.sink, bias.position, bias.time)
    sums = [None if x is None else torch.zeros(x.shape, dtype=sum_dtype, device=x.device) for x in inputs]
    for block in _iterate_blocks(call, q.shape[1], len(q), len(k)):
        tensors = (*_pad_inputs(block, q, k, v), *inputs[3:])
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
        block_call = replace(call, sink=leaves[3], bias=replace(bias, position=leaves[4], time=leaves[5]))
        with torch.enable_grad():
            part, _ = _attend(*leaves[:3], block_call, block)  # type: ignore[arg-type]
            present = [x for x in leaves if x is not None]
            gradients = iter(
                torch.autograd.grad(
                    part, present, block.query.pad_with_zeros(grad, block.sequences).to(part.dtype)
                )
            )
        # q, k and v are packed tokens of one side; sink and tables are shared by all blocks.
        sides = (block.query, block.key, block.key, None, None, None)
        for sum_, side in zip(sums, sides, strict=True):
            if sum_ is not None and side is not None:
                sum_.index_add_(0, side.token, side.pack(next(gradients)).to(sum_dtype))
            elif sum_ is not None:
                sum_ += next(gradients)
    return [None if s is None or x is None else s.to(x.dtype) for s, x in zip(sums, inputs, strict=True)]


def _pad_inputs(block: _ScoreBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad queries, keys and values to [B, H, n, D], [B, G, m, D] and [B, G, m, E]."""
    n = block.sequences
    return block.query.pad_with_last(q, n), block.key.pad_with_last(k, n), block.key.pad_with_last(v, n)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, block: _ScoreBlock
) -> tuple[Tensor, Tensor]:
    """Compute output [B, H, n, E] and log-sum-exp [B, H, n] of a block; differentiable."""
    sum_dtype, groups = _get_sum_dtype(q), q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    q, k, v = (x.to(sum_dtype) for x in (q, k, v))
    score, seen = q @ k.mT * call.scale, block.seen[:, None]
    if call.soft_cap is not None:
        score = call.soft_cap * (score / call.soft_cap).tanh()
    bias = None if call.bias is None else _compute_bias(call.bias, block)
    score = score if bias is None else score + bias.to(sum_dtype)
    if call.activation == "silu":
        weight = torch.where(seen, torch.nn.functional.silu(score), 0.0) / call.scaling_length
        return weight @ v, torch.zeros_like(score[..., 0])
    score = score.masked_fill(~seen, -torch.inf)
    if call.sink is not None:
        sink = call.sink.to(sum_dtype)[:, None, None].expand(len(score), -1, score.shape[2], 1)
        score = torch.cat([score, sink], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    # Rows without visible keys and sink: their weights become 0 without a NaN in the gradients.
    is_blind = (score.detach() == -torch.inf).all(-1, keepdim=True)
    lse = score.masked_fill(is_blind, 0.0).logsumexp(-1, keepdim=True)
    weight = (score - lse).exp()
    return weight @ v, lse.masked_fill(is_blind, -torch.inf)[..., 0]


def _compute_bias(bias: RelativeBias, block: _ScoreBlock) -> Tensor | None:
    """Compute the bias [B, H or 1, n, m] from the O(N) tables."""
    total = None
    if bias.position is not None:
        reach = (bias.position.shape[1] + 1) // 2
        total = bias.position[:, block.distance.clamp(1 - reach, reach - 1) + reach - 1].transpose(0, 1)
    if bias.time is not None and bias.time_q is not None and bias.time_k is not None:
        n = block.sequences
        rows, keys = block.query.filler.view(n, -1, 1), block.key.filler.view(n, 1, -1)
        between = bias.time_q[rows].long() - bias.time_k[keys].long()
        by_time = bias.time[:, compute_bucket(between, bias.steps, bias.time.shape[1])].transpose(0, 1)
        total = by_time if total is None else total + by_time
    return total


def _iterate_blocks(call: AttentionCall, heads: int, tokens_q: int, tokens_k: int) -> Iterator[_ScoreBlock]:
    """Yield the blocks of scores: short sequences share blocks, and long ones are cut into rows."""
    table = call.build_table(tokens_q, tokens_k)
    cu_q, cu_k = table.cu_q.tolist(), table.cu_k.tolist()
    n_q, n_k = ([stop - start for start, stop in pairwise(cuts)] for cuts in (cu_q, cu_k))
    short = [b for b in range(len(n_q)) if max(n_q[b], n_k[b]) <= _MAX_ROWS]
    for group in group_sequences(n_q, n_k, short, heads, _MAX_SHARED_SCORES):
        yield _make_shared_block(table, torch.tensor(group, device=table.start.device))
    for b in sorted(set(range(len(n_q))) - set(short)):
        size = min(_MAX_ROWS, max(1, _MAX_SCORES // max(heads * n_k[b], 1)))
        for first in range(0, n_q[b], size):
            row = torch.arange(first, min(first + size, n_q[b]), device=table.start.device)
            place = _list_keys(table, row + cu_q[b])
            if len(place):
                seen = compute_visible(table, row + cu_q[b], place + cu_k[b], row, place)
                distance = place - (row[:, None] + (n_k[b] - n_q[b]))
                query_side, key_side = (
                    _make_unpadded_side(row + cu_q[b]),
                    _make_unpadded_side(place + cu_k[b]),
                )
                yield _ScoreBlock(1, query_side, key_side, seen[None], distance[None])


def _make_shared_block(table: IntervalTable, index_B: Tensor) -> _ScoreBlock:
    """Make a block of the short sequences `index_B`."""
    cuts_q, cuts_k = table.cu_q.long(), table.cu_k.long()
    query, key = make_side(cuts_q, index_B), make_side(cuts_k, index_B)
    seen = compute_bucket_mask(index_B, cuts_q, cuts_k, query.longest, key.longest, table)
    row, place = (torch.arange(x.longest, device=index_B.device) for x in (query, key))
    shift_B = (cuts_k.diff() - cuts_q.diff())[index_B]
    distance = place - (row[:, None] + shift_B[:, None, None])
    return _ScoreBlock(len(index_B), query, key, seen, distance)


def _make_unpadded_side(token: Tensor) -> BucketSide:
    """Make one side of a block from some packed tokens of one sequence, which need no padding."""
    return BucketSide(
        token, torch.arange(len(token), device=token.device), token, longest=len(token), whole=False
    )


def _list_keys(table: IntervalTable, query: Tensor) -> Tensor:
    """List the positions in their sequence, ascending, of all keys that the rows `query` may see.

    For each slot, these are the keys from the lowest start to the highest stop of its intervals.
    """
    start, stop = table.start[:, query], table.stop[:, query]
    filled = start < stop
    first = torch.where(filled, start, torch.iinfo(torch.int32).max).amin(1).tolist()
    last = torch.where(filled, stop, 0).amax(1).tolist()
    hulls: list[list[int]] = []  # Disjoint [start, stop] over all slots.
    for a, b in sorted((a, b) for a, b in zip(first, last, strict=True) if a < b):
        if hulls and a <= hulls[-1][1]:
            hulls[-1][1] = max(hulls[-1][1], b)
        else:
            hulls.append([a, b])
    ranges = [torch.arange(a, b, device=query.device) for a, b in hulls]
    return torch.cat(ranges) if ranges else query[:0]


def _get_sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x: float32 for half precision, else x's own."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype

"""Chunked reference for what fused CPU kernels do not support (SiLU, bias tables, soft cap), in blocks of rows over their keys.

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
_ENTRIES = 1 << 22
_SHARED = 1 << 18  # Maximum number of scores of a block of short sequences, which fit a core's cache.
_MOST_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class _ScoreBlock:
    """Rows and keys of B sequences, padded to the longest; seen [B, n, m], false in the padding."""

    sequences: int
    query: BucketSide
    key: BucketSide
    seen: Tensor
    distance: Tensor  # [B, n, m] position of the key minus that of the query


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Compute output [T, H, E] and log-sum-exp [T, H] (meaningless for SiLU)."""
    total = _get_sum_dtype(q)
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=total, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=total, device=q.device)
    if call.sink is not None:
        lse = lse.logaddexp(call.sink.to(total))
    for block in _iterate_blocks(call, q.shape[1], len(q), len(k)):
        part, part_lse = _attend(*_pad_inputs(block, q, k, v), call, block)
        out.index_copy_(0, block.query.token, block.query.pack(part))
        lse.index_copy_(0, block.query.token, block.query.pack(part_lse[..., None])[..., 0])
    return out.to(q.dtype), lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> list[Tensor | None]:
    """Compute the gradients of q, k, v, sink, and the bias's position and time tables; None for inputs that do not exist."""
    total, bias = _get_sum_dtype(q), call.bias or RelativeBias()
    inputs = (q, k, v, call.sink, bias.position, bias.time)
    sums = [None if x is None else torch.zeros(x.shape, dtype=total, device=x.device) for x in inputs]
    for block in _iterate_blocks(call, q.shape[1], len(q), len(k)):
        tensors = (*_pad_inputs(block, q, k, v), *inputs[3:])
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
        own = replace(call, sink=leaves[3], bias=replace(bias, position=leaves[4], time=leaves[5]))
        with torch.enable_grad():
            part, _ = _attend(*leaves[:3], own, block)  # type: ignore[arg-type]
            present = [x for x in leaves if x is not None]
            gradients = iter(
                torch.autograd.grad(
                    part, present, block.query.pad_with_zeros(grad, block.sequences).to(part.dtype)
                )
            )
        for whole, part_of in zip(sums, (block.query, block.key, block.key, None, None, None), strict=True):
            if whole is not None and part_of is not None:
                whole.index_add_(0, part_of.token, part_of.pack(next(gradients)).to(total))
            elif whole is not None:
                whole += next(gradients)
    return [None if s is None or x is None else s.to(x.dtype) for s, x in zip(sums, inputs, strict=True)]


def _pad_inputs(block: _ScoreBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad queries, keys and values to [B, H, n, D], [B, G, m, D] and [B, G, m, E]."""
    n = block.sequences
    return block.query.pad_with_last(q, n), block.key.pad_with_last(k, n), block.key.pad_with_last(v, n)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, block: _ScoreBlock
) -> tuple[Tensor, Tensor]:
    """Compute output [B, H, n, E] and log-sum-exp [B, H, n] of a block; differentiable."""
    total, groups = _get_sum_dtype(q), q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    q, k, v = (x.to(total) for x in (q, k, v))
    score, seen = q @ k.mT * call.scale, block.seen[:, None]
    if call.soft_cap is not None:
        score = call.soft_cap * (score / call.soft_cap).tanh()
    bias = None if call.bias is None else _compute_bias(call.bias, block)
    score = score if bias is None else score + bias.to(total)
    if call.activation == "silu":
        weight = torch.where(seen, torch.nn.functional.silu(score), 0.0) / call.scaling_length
        return weight @ v, torch.zeros_like(score[..., 0])
    score = score.masked_fill(~seen, -torch.inf)
    if call.sink is not None:
        sink = call.sink.to(total)[:, None, None].expand(len(score), -1, score.shape[2], 1)
        score = torch.cat([score, sink], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    blind = (score.detach() == -torch.inf).all(-1, keepdim=True)
    lse = score.masked_fill(blind, 0.0).logsumexp(-1, keepdim=True)
    weight = (score - lse).exp()
    return weight @ v, lse.masked_fill(blind, -torch.inf)[..., 0]


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
    n_q, n_k = ([b - a for a, b in pairwise(cuts)] for cuts in (cu_q, cu_k))
    short = [b for b in range(len(n_q)) if max(n_q[b], n_k[b]) <= _MOST_ROWS]
    for group in group_sequences(n_q, n_k, short, heads, _SHARED):
        yield _make_shared_block(table, torch.tensor(group, device=table.start.device))
    for b in sorted(set(range(len(n_q))) - set(short)):
        size = min(_MOST_ROWS, max(1, _ENTRIES // max(heads * n_k[b], 1)))
        for first in range(0, n_q[b], size):
            row = torch.arange(first, min(first + size, n_q[b]), device=table.start.device)
            place = _list_keys(table, row + cu_q[b])
            if len(place):
                seen = compute_visible(table, row + cu_q[b], place + cu_k[b], row, place)
                distance = place - (row[:, None] + (n_k[b] - n_q[b]))
                yield _ScoreBlock(
                    1, _make_run(row + cu_q[b]), _make_run(place + cu_k[b]), seen[None], distance[None]
                )


def _make_shared_block(table: IntervalTable, index_B: Tensor) -> _ScoreBlock:
    """Make a block of several short sequences."""
    cuts_q, cuts_k = table.cu_q.long(), table.cu_k.long()
    query, key = make_side(cuts_q, index_B), make_side(cuts_k, index_B)
    seen = compute_bucket_mask(index_B, cuts_q, cuts_k, query.longest, key.longest, table)
    row, place = (torch.arange(x.longest, device=index_B.device) for x in (query, key))
    behind_B = (cuts_k.diff() - cuts_q.diff())[index_B]
    distance = place - (row[:, None] + behind_B[:, None, None])
    return _ScoreBlock(len(index_B), query, key, seen, distance)


def _make_run(token: Tensor) -> BucketSide:
    """Make a block of some tokens of one sequence."""
    return BucketSide(token, torch.arange(len(token), device=token.device), token, len(token), False)


def _list_keys(table: IntervalTable, query: Tensor) -> Tensor:
    """List the positions of the keys in the slots' hulls over these rows, ascending."""
    start, stop = table.start[:, query], table.stop[:, query]
    used = start < stop
    first = torch.where(used, start, torch.iinfo(torch.int32).max).amin(1).tolist()
    last = torch.where(used, stop, 0).amax(1).tolist()
    hulls: list[list[int]] = []
    for a, b in sorted((a, b) for a, b in zip(first, last, strict=True) if a < b):
        if hulls and a <= hulls[-1][1]:
            hulls[-1][1] = max(hulls[-1][1], b)
        else:
            hulls.append([a, b])
    parts = [torch.arange(a, b, device=query.device) for a, b in hulls]
    return torch.cat(parts) if parts else query[:0]


def _get_sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype

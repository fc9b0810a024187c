"""Chunked reference: what no fused CPU kernel speaks (SiLU, bias tables, soft cap), in blocks of rows over their keys.

A block's scores exist only while it is computed, [H, rows, keys] of at most 2^22 entries, so memory stays O(N). The
backward computes each block again and lets autograd differentiate it. Plain torch: it runs on any device and in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nonet.attention.bias import RelativeBias, bucket_of
from nonet.attention.call import Call
from nonet.attention.dense import visible
from nonet.attention.table import IntervalTable

# Shapes: T packed query tokens, S packed key tokens, H query heads, D width, E value width; n rows and m keys of a block.
_ENTRIES = 1 << 22
_MOST_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Rows [n] and keys [m] as packed tokens and as places of their sequence; seen [n, m]."""

    rows: slice
    keys: Tensor
    distance: Tensor  # [n, m] place of the key less that of the query
    seen: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Output [T, H, E] and log-sum-exp [T, H] (meaningless for SiLU)."""
    total = _sums(q)
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=total, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=total, device=q.device)
    if call.sink is not None:
        lse = lse.logaddexp(call.sink.to(total))
    for block in _blocks(call, q.shape[1], len(q), len(k)):
        part, part_lse = _attend(q[block.rows], k[block.keys], v[block.keys], call, block)
        out[block.rows], lse[block.rows] = part, part_lse
    return out.to(q.dtype), lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[Tensor | None]:
    """Gradients of q, k, v, sink, and the bias's position and time tables; None of a part that is not there."""
    total, bias = _sums(q), call.bias or RelativeBias()
    inputs = (q, k, v, call.sink, bias.position, bias.time)
    sums = [None if x is None else torch.zeros(x.shape, dtype=total, device=x.device) for x in inputs]
    for block in _blocks(call, q.shape[1], len(q), len(k)):
        index = (block.rows, block.keys, block.keys, ..., ..., ...)
        leaves = [
            None if x is None else x.detach()[i].requires_grad_() for x, i in zip(inputs, index, strict=True)
        ]
        own = replace(call, sink=leaves[3], bias=replace(bias, position=leaves[4], time=leaves[5]))
        with torch.enable_grad():
            part, _ = _attend(*leaves[:3], own, block)  # type: ignore[arg-type]
            found = torch.autograd.grad(
                part, [x for x in leaves if x is not None], grad[block.rows].to(part.dtype)
            )
        given = iter(found)
        for whole, i in zip(sums, index, strict=True):
            if whole is not None and isinstance(i, Tensor):
                whole.index_add_(0, i, next(given).to(total))
            elif whole is not None:
                whole[i] += next(given)
    return [
        None if s is None else s.to(x.dtype)
        for s, x in zip(sums, inputs, strict=True)
        if x is not None or s is None
    ]  # type: ignore[union-attr]


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call, block: _Block) -> tuple[Tensor, Tensor]:
    """Output [n, H, E] and log-sum-exp [n, H] of a block; differentiable."""
    total, groups = _sums(q), q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    q, k, v = (x.to(total).transpose(0, 1) for x in (q, k, v))
    score = q @ k.mT * call.scale
    if call.soft_cap is not None:
        score = call.soft_cap * (score / call.soft_cap).tanh()
    bias = None if call.bias is None else _bias(call.bias, block)
    score = score if bias is None else score + bias.to(total)
    if call.activation == "silu":
        weight = torch.where(block.seen, torch.nn.functional.silu(score), 0.0) / call.scaling_length
        return (weight @ v).transpose(0, 1), torch.zeros_like(score[..., 0].T)
    score = score.masked_fill(~block.seen, -torch.inf)
    if call.sink is not None:
        sink = call.sink.to(total)[:, None, None].expand(-1, score.shape[1], 1)
        score = torch.cat([score, sink], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    blind = (score.detach() == -torch.inf).all(-1, keepdim=True)
    lse = score.masked_fill(blind, 0.0).logsumexp(-1, keepdim=True)
    weight = (score - lse).exp()
    return (weight @ v).transpose(0, 1), lse.masked_fill(blind, -torch.inf)[..., 0].T


def _bias(bias: RelativeBias, block: _Block) -> Tensor | None:
    """[H or 1, n, m] from the O(N) tables."""
    total = None
    if bias.position is not None:
        reach = (bias.position.shape[1] + 1) // 2
        total = bias.position[:, block.distance.clamp(1 - reach, reach - 1) + reach - 1]
    if bias.time is not None and bias.time_q is not None and bias.time_k is not None:
        between = bias.time_q[block.rows, None].long() - bias.time_k[block.keys].long()
        by_time = bias.time[:, bucket_of(between, bias.steps, bias.time.shape[1])]
        total = by_time if total is None else total + by_time
    return total


def _blocks(call: Call, heads: int, tokens_q: int, tokens_k: int) -> Iterator[_Block]:
    table = call.whole_table(tokens_q, tokens_k)
    cu_q, cu_k = table.cu_q.tolist(), table.cu_k.tolist()
    device = table.start.device
    for b in range(len(cu_q) - 1):
        n_q, n_k = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        size = min(_MOST_ROWS, max(1, _ENTRIES // max(heads * n_k, 1)))
        for first in range(0, n_q, size):
            row = torch.arange(first, min(first + size, n_q), device=device)
            place = _keys(table, row + cu_q[b])
            if len(place):
                seen = visible(table, row + cu_q[b], place + cu_k[b], row, place)
                distance = place - (row[:, None] + (n_k - n_q))
                rows = slice(cu_q[b] + first, cu_q[b] + first + len(row))
                yield _Block(rows, place + cu_k[b], distance, seen)


def _keys(table: IntervalTable, query: Tensor) -> Tensor:
    """Places of the keys that the slots' hulls over these rows hold, rising."""
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


def _sums(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype

"""Launches of the backward kernels: dQ first, which stores delta, then dK and dV, then the bias tables if there are any.

Every sum has a fixed order: a program adds its blocks in sequence, and torch adds the programs' partial sums. So gradients are
bitwise reproducible, at the cost of 7 matrix products per pair of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.attention.kernels.forward_pass import AttentionGradients, check, infer_config
from nonet.attention.kernels.launch import (
    KernelOptions,
    get_strides,
    make_constants,
    make_shared_arguments,
    resolve_scale,
    round_to_power_of_two,
)
from nonet.attention.masks import IntervalTable
from nonet.attention.plans import KernelTile, TileConfig, TilePlan, TilePlans

# Shapes: T packed query tokens, S packed key tokens, H query heads, G key heads, D and E widths, A block diagonals.
_MAX_PROGRAMS = (
    1024  # The bias kernel splits its sums until it has about this many programs, which fill any device.
)
_MAX_SPLITS = 16


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: IntervalTable,
    plans: TilePlans,
    options: KernelOptions | None = None,
    config: TileConfig | None = None,
    grad_lse: Tensor | None = None,
) -> AttentionGradients:
    """Compute the gradients of all inputs from forward's out and lse.

    `grad_lse` [H, T] is given if the log-sum-exp was used too. `plans` and `config` are those of forward.
    """
    options = options or KernelOptions()
    config = config or infer_config(q, v, table, options)
    check(q, k, v, table, plans.dq, options, config.dq)
    check(q, k, v, table, plans.dkv, options, config.dkv)
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    delta = torch.empty_like(lse)
    grad_q = _compute_grad_q(
        grad_out, (q, k, v, out), lse, grad_lse, delta, table, plans.dq, options, config.dq
    )
    grad_k, grad_v = _compute_grad_kv(grad_out, (q, k, v), lse, delta, table, plans.dkv, options, config.dkv)
    grad_sink = None
    if options.sink is not None:
        grad_sink = -(torch.exp(options.sink.float()[:, None] - lse) * delta).sum(1)
    position, time = _compute_grad_bias(
        grad_out, (q, k, v), lse, delta, table, plans.dq, options, config.dq, config.piece
    )
    return AttentionGradients(grad_q, grad_k, grad_v, grad_sink, position, time)


def _compute_grad_q(
    grad_out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    grad_lse: Tensor | None,
    delta: Tensor,
    table: IntervalTable,
    plan: TilePlan,
    options: KernelOptions,
    tile: KernelTile,
) -> Tensor:
    """Launch the kernel that computes the gradient of the queries."""
    from nonet.attention.kernels.triton_backward import dq_kernel

    q, k, v, out = inputs
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    if grad_q.numel():
        dq_kernel[(len(plan.query.place) * q.shape[1],)](
            *(q, k, v, out, grad_out, lse),
            *(None if grad_lse is None else grad_lse.contiguous(), delta, grad_q, resolve_scale(q, options)),
            *make_shared_arguments(q, k, table, plan.query, options),
            *get_strides(q, k, v, out, grad_out, grad_q),
            **make_constants(q, v, table, plan.query, options, tile),
        )
    return grad_q


def _compute_grad_kv(
    grad_out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    table: IntervalTable,
    plan: TilePlan,
    options: KernelOptions,
    tile: KernelTile,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel that computes the gradients of keys and values."""
    from nonet.attention.kernels.triton_backward import dkv_kernel

    q, k, v = inputs
    grad_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    grad_v = torch.empty_like(v, memory_format=torch.contiguous_format)
    if len(k):
        dkv_kernel[(len(plan.key.place) * k.shape[1],)](
            *(q, k, v, grad_out, lse, delta, grad_k, grad_v, resolve_scale(q, options)),
            *make_shared_arguments(q, k, table, plan.key, options),
            *get_strides(q, k, v, grad_out, grad_k, grad_v),
            **make_constants(q, v, table, plan.key, options, tile),
        )
    return grad_k, grad_v


def _compute_grad_bias(
    grad_out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    table: IntervalTable,
    plan: TilePlan,
    options: KernelOptions,
    tile: KernelTile,
    piece: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of the position and the time table; None for a missing one.

    `piece` is the side of the square pieces into which the bias kernel divides the score matrix.
    """
    from nonet.attention.kernels.triton_bias import bias_kernel

    bias, (q, k, v) = options.bias, inputs
    if bias is None or (bias.position is None and bias.time is None):
        return None, None
    # The score matrix is divided into square pieces; a program sums the pieces of one diagonal.
    size, heads = min(piece, tile.block_q), q.shape[1]
    # A key is at most max_k - 1 positions before the query and max_q - 1 after it.
    diagonals_before, diagonals_after = -(-(table.max_k + size) // size), -(-(table.max_q + size) // size)
    diagonals = diagonals_before + diagonals_after + 1
    splits = max(
        min(
            _MAX_PROGRAMS // (diagonals * heads),
            len(plan.query.place) * (tile.block_q // size) // 4,
            _MAX_SPLITS,
        ),
        1,
    )
    buckets = 16 if bias.time is None else round_to_power_of_two(bias.time.shape[1])
    empty = q.new_zeros(0, dtype=torch.float32)
    distance_sums = empty if bias.position is None else empty.new_zeros(heads, splits, diagonals, 2, size)
    time_sums = empty if bias.time is None else empty.new_zeros(heads, splits, diagonals, buckets)
    if len(plan.query.place):
        bias_kernel[(diagonals, heads, splits)](
            *(
                q,
                k,
                v,
                grad_out,
                lse,
                delta,
                distance_sums,
                time_sums,
                len(plan.query.place),
                -diagonals_before,
            ),
            *make_shared_arguments(q, k, table, plan.query, options),
            *get_strides(q, k, v, grad_out),
            **make_constants(q, v, table, plan.query, options, tile),
            W=buckets,  # pyright: ignore[reportArgumentType]
            BT=size,  # pyright: ignore[reportArgumentType]
        )
    position = (
        None
        if bias.position is None
        else _sum_distances(distance_sums.sum(1), bias.position, diagonals_before * size)
    )
    if bias.time is None:
        return position, None
    return position, _sum_shared_heads(time_sums.sum((1, 2))[:, : bias.time.shape[1]], bias.time)


def _sum_distances(sums_HA2M: Tensor, table: Tensor, centre: int) -> Tensor:
    """Compute the gradient of the position table from the sums of the bias kernel.

    A diagonal has two halves of M distances, and the upper half of one has the same distances as the lower half of the next.
    Distances beyond the table belong to its first and last entry.

    Args:
        sums_HA2M: The sums of score gradients by head, diagonal, half and distance.
        table: The position table.
        centre: The number of distances from the first diagonal to distance 0.
    """
    heads, diagonals, _, size = sums_HA2M.shape
    by_distance = sums_HA2M.new_zeros(heads, diagonals + 1, size)
    by_distance[:, :-1] += sums_HA2M[:, :, 0]
    by_distance[:, 1:] += sums_HA2M[:, :, 1]
    by_distance, zero = by_distance.flatten(1), centre + size  # `zero` is the index of distance 0.
    reach = (table.shape[1] + 1) // 2
    pad = max(reach - zero, zero + reach - by_distance.shape[1], 0)
    by_distance, zero = torch.nn.functional.pad(by_distance, (pad, pad)), zero + pad
    grad = by_distance[:, zero - reach + 1 : zero + reach].clone()
    grad[:, 0] += by_distance[:, : zero - reach + 1].sum(1)
    grad[:, -1] += by_distance[:, zero + reach :].sum(1)
    return _sum_shared_heads(grad, table)


def _sum_shared_heads(grad: Tensor, table: Tensor) -> Tensor:
    """Sum a gradient [H, entries] over the heads if they share the one row of `table`."""
    return grad.sum(0, keepdim=True) if len(table) == 1 else grad

"""The forward pass of the Triton kernels, as a function of tensors, the interval table of the mask and its tile plan.

`forward` is not differentiable; `backward_pass.backward` computes the gradients. Neither uses atomics, so both are bitwise
reproducible. Lengths and masks are passed as tensors, so they cause no recompilation. Triton is imported on first use. If
TRITON_INTERPRET=1 is set before that, CPU tensors work, but slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.kernels.launch import KernelOptions, get_strides, make_constants, make_shared_arguments
from nonet.attention.masks import IntervalTable
from nonet.attention.plans import PLAIN_SLOTS, KernelTile, TileConfig, TilePlan, TilePlans, select_config
from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, H query heads, G key heads (H a multiple), D and E widths.


@dataclass(frozen=True, slots=True, eq=False)
class AttentionGradients:
    """The gradients of the loss with respect to each input; None for an input that the call does not have."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None  # [H] float32
    position: Tensor | None = None  # float32, with the shape of bias.position
    time: Tensor | None = None  # float32, with the shape of bias.time


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: IntervalTable,
    plans: TilePlans,
    options: KernelOptions | None = None,
    config: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute outputs [T, H, E] in q's dtype and log-sum-exp [H, T] float32 in nats (empty, [H, 0], for "silu").

    For a query that sees no key the output is 0 and the log-sum-exp is -inf.

    Args:
        q: Queries [T, H, D].
        k: Keys [S, G, D].
        v: Values [S, G, E].
        table: The interval table of the mask.
        plans: The tile plans, made from this table and configuration by `make_plans`.
        options: Scale, activation, soft cap, sink and bias.
        config: The tile configuration; by default the shipped one for these inputs and their device.
    """
    options = options or KernelOptions()
    config = config or infer_config(q, v, table, options)
    plan, tile = plans.forward, config.forward
    check(q, k, v, table, plan, options, tile)
    from nonet.attention.kernels.triton_forward import forward_kernel

    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    silu = options.activation == "silu"
    lse = torch.empty(q.shape[1], 0 if silu else len(q), dtype=torch.float32, device=q.device)
    if len(plan.query.place) and q.shape[1]:
        forward_kernel[(len(plan.query.place) * q.shape[1],)](
            *(q, k, v, out, lse, options.sink),
            *make_shared_arguments(q, k, table, plan.query, options),
            *get_strides(q, k, v, out),
            **make_constants(q, v, table, plan.query, options, tile),
        )
    return out, lse


def infer_config(
    q: Tensor, v: Tensor, table: IntervalTable, options: KernelOptions | None = None
) -> TileConfig:
    """Select the shipped tile configuration for these inputs and their device."""
    options = options or KernelOptions()
    bias, silu = options.bias, options.activation == "silu"
    has_rich_mask = len(table.start) > PLAIN_SLOTS or table.column_start is not None or table.sees is not None
    rich = has_rich_mask or bias is not None or options.soft_cap is not None
    capability = 80  # That of the interpreter on a CPU.
    if q.is_cuda:
        major, minor = torch.cuda.get_device_capability(q.device)
        capability = 10 * major + minor
    return select_config(max(q.shape[2], v.shape[2]), q.dtype, capability, rich=rich, silu=silu)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: IntervalTable,
    plan: TilePlan,
    options: KernelOptions,
    tile: KernelTile,
) -> None:
    """Check that inputs, table, plan, options and tile of a kernel fit together; raise ConfigError otherwise."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2]:
        raise ConfigError(f"attention takes q [T, H, D], k [S, G, D] and v [S, G, E]; got {shapes}.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}; the heads of q must be a multiple of those of k."
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must share float32, bfloat16 or float16."
        )
    if any(x.stride(-1) != 1 for x in (q, k, v) if x.numel()):
        raise ConfigError(f"the last dimension of {shapes} must be contiguous. Call .contiguous() on it.")
    if table.start.shape[1] != len(q):
        raise ConfigError(f"The mask is made for {table.start.shape[1]} queries, but q has {len(q)}.")
    if (plan.block_q, plan.block_k) != (tile.block_q, tile.block_k):
        raise ConfigError(
            f"The plan has blocks of {plan.block_q} x {plan.block_k}, the kernel tiles of {tile.block_q} x {tile.block_k}. "
            "Make the plans with make_plans(table, config) and pass the same config."
        )
    if options.activation not in ("softmax", "silu"):
        raise ConfigError(f"activation is {options.activation!r}; it must be 'softmax' or 'silu'.")
    if (options.scale is not None and not options.scale > 0) or (
        options.soft_cap is not None and not options.soft_cap > 0
    ):
        raise ConfigError(f"scale {options.scale} and soft_cap {options.soft_cap} must be above 0.")
    if options.sink is not None and (options.activation == "silu" or options.sink.shape != (q.shape[1],)):
        raise ConfigError(
            f"sink {tuple(options.sink.shape)} must be [{q.shape[1]}], a logit per head, and needs a softmax; "
            f"activation is {options.activation!r}."
        )
    if options.bias is not None:
        options.bias.check(q.shape[1], len(q), len(k))

"""The arguments with which the attention kernels are launched.

Each of the four kernels declares its own tensors, then the shared arguments (`make_shared_arguments`), strides (`get_strides`)
and constants (`make_constants`), all in this order. Only this module converts a mask, a bias or a scale to integers, floats and
pointers. A feature whose argument is None is left out of the compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nonet.attention.calls import RelativeBias
from nonet.attention.masks import IntervalTable
from nonet.attention.plans import KernelTile, Tiles

# Shapes: T packed query tokens, H query heads, G key heads (H a multiple), D and E widths of q, k and of v.
Arguments: TypeAlias = tuple[Any, ...]  # Tensors, numbers or None.
_LOG2_E = 1.4426950408889634
_MAX_REGISTERS = 255  # Of a thread, the hardware's limit.


@dataclass(frozen=True, slots=True, eq=False)
class KernelOptions:
    """The operations that a kernel applies to the products of queries and keys, except the mask.

    Attributes:
        scale: The factor of the products, above 0; None for 1 / sqrt(D).
        activation: "softmax", or "silu": silu(score) / scaling_length without normalisation over the keys.
        scaling_length: The divisor of "silu", which is constant, so that a row's result does not depend on its batch.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap), before the bias.
        sink: One logit per head [H], which is added to the softmax's denominator.
        bias: A relative position and time bias.
    """

    scale: float | None = None
    activation: str = "softmax"
    scaling_length: float | None = None
    soft_cap: float | None = None
    sink: Tensor | None = None
    bias: RelativeBias | None = None


def make_shared_arguments(
    q: Tensor, k: Tensor, table: IntervalTable, tiles: Tiles, options: KernelOptions
) -> Arguments:
    """Return the arguments between a kernel's own tensors and its strides: tiles, mask, bias, scales and counts."""
    return (
        *(tiles.place, tiles.spans, table.cu_q, table.cu_k),
        *(table.start, table.stop, table.column_start, table.column_stop, table.sees, table.word),
        *_make_bias_arguments(options.bias),
        *_compute_scales(q, options),
        *_get_bias_sizes(options.bias),
        *(len(q), q.shape[1], q.shape[1] // k.shape[1]),
    )


def get_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the token stride and head stride of each tensor, one after the other."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def make_constants(
    q: Tensor, v: Tensor, table: IntervalTable, tiles: Tiles, options: KernelOptions, tile: KernelTile
) -> dict[str, Any]:
    """Build a kernel's compile-time constants and compiler options."""
    settings: dict[str, Any] = {
        "SLOTS": len(table.start),
        "S": tiles.spans.shape[1],
        "BM": tile.block_q,
        "BN": tile.block_k,
        "D": q.shape[2],
        "E": v.shape[2],
        "WD": round_to_power_of_two(q.shape[2]),
        "WE": round_to_power_of_two(v.shape[2]),
        "SILU": options.activation == "silu",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return settings | limit_registers(q.dtype)


def limit_registers(dtype: torch.dtype) -> dict[str, int]:
    """Return the option that lets float32 kernels use 255 registers; otherwise ptxas spills to fit one more block."""
    return {"maxnreg": _MAX_REGISTERS} if dtype == torch.float32 else {}


def resolve_scale(q: Tensor, options: KernelOptions) -> float:
    """Return the scale of the products, 1 / sqrt(D) by default."""
    return q.shape[2] ** -0.5 if options.scale is None else options.scale


def round_to_power_of_two(width: int) -> int:
    """Return the power of two that a width is padded to, at least 16 for matrix instructions."""
    return max(16, 1 << (width - 1).bit_length())


def _make_bias_arguments(bias: RelativeBias | None) -> Arguments:
    """Return the kernel arguments of a relative bias; None for each missing part."""
    if bias is None:
        return (None, None, None, None)
    position = None if bias.position is None else bias.position.contiguous()
    if bias.time is None:
        return (position, None, None, None)
    return (position, bias.time.contiguous(), bias.time_q, bias.time_k)


def _compute_scales(q: Tensor, options: KernelOptions) -> Arguments:
    """Return inner_scale, outer_scale, silu_scale and soft_cap.

    The score is outer_scale * f(inner_scale * product), where f applies the soft cap and adds the bias. Without both, f is not
    computed, and outer_scale contains all factors. silu_scale is 1 / scaling_length.
    """
    scale = resolve_scale(q, options)
    outer_scale = 1.0 if options.activation == "silu" else _LOG2_E  # Softmax uses exp2 instead of exp.
    silu_scale = 1.0 / (options.scaling_length or 1.0)
    if options.soft_cap is not None:
        return scale / options.soft_cap, outer_scale, silu_scale, options.soft_cap
    if options.bias is not None and (options.bias.position is not None or options.bias.time is not None):
        return scale, outer_scale, silu_scale, None
    return 1.0, scale * outer_scale, silu_scale, None


def _get_bias_sizes(bias: RelativeBias | None) -> Arguments:
    """Return position_stride, time_stride, reach, steps and buckets, which triton_score.py describes."""
    if bias is None:
        return 0, 0, 1, 1.0, 1
    position_stride = 0 if bias.position is None or len(bias.position) == 1 else bias.position.shape[1]
    time_stride = 0 if bias.time is None or len(bias.time) == 1 else bias.time.shape[1]
    reach = 1 if bias.position is None else (bias.position.shape[1] + 1) // 2
    return (
        position_stride,
        time_stride,
        reach,
        float(bias.steps),
        1 if bias.time is None else bias.time.shape[1],
    )

"""The kernels behind uni_attention, as functions of tensors, a mask's table and its plan; nothing here differentiates.

`forward` gives outputs and log-sum-exp, `backward` the gradients of all inputs from two kernels without atomics: the
same bits on every run. Metadata is tensors, so neither lengths nor masks recompile anything. Triton is imported on
first use; with TRITON_INTERPRET=1 in the environment before that, CPU tensors work, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.bias import RelativeBias
from nonet.attention.configs import PLAIN_SLOTS, Config, Tile, config_for
from nonet.attention.plan import Plan, Plans
from nonet.attention.table import IntervalTable
from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, H query heads, G key heads (H a multiple), D and E widths.
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What is done with a product of query and key, beside the mask."""

    scale: float | None = None  # 1 / sqrt(D) when left out; above 0
    activation: str = "softmax"  # or "silu": silu(score) / scaling_length, no normalisation over keys
    scaling_length: float | None = (
        None  # for "silu"; pinned, so that a row's result doesn't depend on its batch
    )
    soft_cap: float | None = None  # score -> soft_cap * tanh(score / soft_cap), before the bias
    sink: Tensor | None = None  # [H] a logit a head that takes weight and has no value
    bias: RelativeBias | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Of the loss, by input; None where the input was not given."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None  # [H] float32
    position: Tensor | None = None  # as bias.position, float32
    time: Tensor | None = None  # as bias.time, float32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: IntervalTable,
    plans: Plans,
    options: Options | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, E] in q's dtype and log-sum-exp [H, T] float32 in nats (empty, [H, 0], for "silu").

    plans are plan.plans(table, config), by default for config_of(...). A query that sees no key gives 0 and -inf.
    """
    options = options or Options()
    config = config or config_of(q, v, table, options)
    plan, tile = plans.forward, config.forward
    check(q, k, v, table, plan, options, tile)
    from nonet.attention.triton_forward import forward_kernel

    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    silu = options.activation == "silu"
    lse = torch.empty(q.shape[1], 0 if silu else len(q), dtype=torch.float32, device=q.device)
    tiles = len(plan.query.place)
    if tiles and q.shape[1]:
        forward_kernel[(tiles * q.shape[1],)](
            q,
            k,
            v,
            out,
            lse,
            plan.query.place,
            plan.query.spans,
            table.cu_q,
            table.cu_k,
            *mask_arguments(table),
            options.sink,
            *bias_arguments(options.bias),
            *scale_arguments(q, options),
            *bias_sizes(options.bias),
            len(q),
            q.shape[1],
            q.shape[1] // k.shape[1],
            *(stride for x in (q, k, v, out) for stride in x.stride()[:2]),
            **constants(q, v, table, plan.query.spans, tile),
            SILU=silu,
        )
    return out, lse


def config_of(q: Tensor, v: Tensor, table: IntervalTable, options: Options | None = None) -> Config:
    """The shipped configuration for these inputs on their device."""
    options = options or Options()
    bias, silu = options.bias, options.activation == "silu"
    rich = len(table.start) > PLAIN_SLOTS or table.column_start is not None or table.sees is not None
    rich = rich or bias is not None or options.soft_cap is not None
    capability = 80
    if q.is_cuda:
        major, minor = torch.cuda.get_device_capability(q.device)
        capability = 10 * major + minor
    return config_for(max(q.shape[2], v.shape[2]), q.dtype, capability, rich, silu)


def mask_arguments(table: IntervalTable) -> tuple[Tensor | None, ...]:
    return (
        table.start,
        table.stop,
        table.column_start,
        table.column_stop,
        table.sees,
        table.word,
    )


def bias_arguments(bias: RelativeBias | None) -> tuple[Tensor | None, ...]:
    if bias is None:
        return (None, None, None, None)
    position = None if bias.position is None else bias.position.contiguous()
    if bias.time is None:
        return (position, None, None, None)
    return (position, bias.time.contiguous(), bias.time_q, bias.time_k)


def scale_arguments(q: Tensor, options: Options) -> tuple[float | None, ...]:
    """inner, outer, silu and soft cap: a score is outer * f(inner * product); without cap and bias all is in outer."""
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    last = 1.0 if options.activation == "silu" else _LOG2_E
    length = 1.0 / (options.scaling_length or 1.0)
    if options.soft_cap is not None:
        return scale / options.soft_cap, last, length, options.soft_cap
    if options.bias is not None and (options.bias.position is not None or options.bias.time is not None):
        return scale, last, length, None
    return 1.0, scale * last, length, None


def bias_sizes(bias: RelativeBias | None) -> tuple[int | float, ...]:
    """Strides of the tables' heads, reach of positions, buckets per doubling and in all."""
    if bias is None:
        return 0, 0, 1, 1.0, 1
    position = 0 if bias.position is None or len(bias.position) == 1 else bias.position.shape[1]
    time = 0 if bias.time is None or len(bias.time) == 1 else bias.time.shape[1]
    reach = 1 if bias.position is None else (bias.position.shape[1] + 1) // 2
    return position, time, reach, float(bias.steps), 1 if bias.time is None else bias.time.shape[1]


def constants(q: Tensor, v: Tensor, table: IntervalTable, spans: Tensor, tile: Tile) -> dict[str, int]:
    return {
        "SLOTS": len(table.start),
        "S": spans.shape[1],
        "BM": tile.block_q,
        "BN": tile.block_k,
        "D": q.shape[2],
        "E": v.shape[2],
        "WD": _power(q.shape[2]),
        "WE": _power(v.shape[2]),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _power(width: int) -> int:
    """The power of two a width is padded to; a matrix instruction takes at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def check(
    q: Tensor, k: Tensor, v: Tensor, table: IntervalTable, plan: Plan, options: Options, tile: Tile
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2]:
        raise ConfigError(f"attention takes q [T, H, D], k [S, G, D] and v [S, G, E]; got {shapes}.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ConfigError(f"q has {q.shape[1]} heads, k {k.shape[1]}; q's must be a multiple of k's.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must share float32, bfloat16 or float16."
        )
    if any(x.stride(-1) != 1 for x in (q, k, v) if x.numel()):
        raise ConfigError(f"the last dimension of {shapes} must be contiguous. Call .contiguous() on it.")
    if table.start.shape[1] != len(q):
        raise ConfigError(f"the mask is made for {table.start.shape[1]} queries, there are {len(q)}.")
    if (plan.block_q, plan.block_k) != (tile.block_q, tile.block_k):
        raise ConfigError(
            f"the plan has blocks {plan.block_q} x {plan.block_k}, the kernel {tile.block_q} x {tile.block_k}. "
            "Make plans with plans(table, config)."
        )
    if options.activation not in ("softmax", "silu"):
        raise ConfigError(f"activation is {options.activation!r}; it must be 'softmax' or 'silu'.")
    if (options.scale is not None and not options.scale > 0) or (
        options.soft_cap is not None and not options.soft_cap > 0
    ):
        raise ConfigError(f"scale {options.scale} and soft_cap {options.soft_cap} must be above 0.")
    if options.sink is not None and (options.activation == "silu" or options.sink.shape != (q.shape[1],)):
        raise ConfigError(
            f"sink {tuple(options.sink.shape)} must be [{q.shape[1]}], a logit a head, and needs a softmax; "
            f"activation is {options.activation!r}."
        )
    if options.bias is not None:
        options.bias.check(q.shape[1], len(q), len(k))

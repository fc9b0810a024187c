"""uni_attention: attention over packed sequences of any length, under a mask that is data.

The signature is the same for every mask and device: q [T, H, D], k [S, G, D] and v [S, G, E] packed, or [B, H, N, D] dense. On a
CPU the mask is cut into pieces that torch's fused kernel computes without a mask. A mask is never ignored and never expanded to
an N x N tensor. The output of a query that sees no key is 0.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from nonet.attention.calls import AttentionCall, RelativeBias
from nonet.attention.masks import IntervalTable, UniMask, check_cuts
from nonet.attention.ops import attend
from nonet.attention.torch_backends import npu
from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, B sequences, H query heads, G key heads (H a multiple), D width,
# E value width, N queries and M keys of a dense batch.
BACKENDS = ("auto", "triton", "sdpa", "npu", "reference")
_MAX_WIDTH = 256  # The widest head that the kernels support.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def uni_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: UniMask | IntervalTable,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    activation: str = "softmax",
    scale: float | None = None,
    scaling_length: float | None = None,
    bias: RelativeBias | None = None,
    sink: Tensor | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Attend packed queries [T, H, D] to keys [S, G, D] and values [S, G, E].

    Inputs can also be dense, [B, H, N, D]; the output is then [B, H, N, E].

    Args:
        q: Queries, packed or dense.
        k: Keys, packed or dense.
        v: Values, packed or dense.
        mask: A UniMask, or the table that it built for this batch (one for all layers).
        cu_seqlens_q: Cuts of the queries into sequences [B + 1]; a dense batch needs none.
        cu_seqlens_k: Cuts of the keys; those of the queries by default.
        activation: "softmax", or "silu" for HSTU's silu(score) / scaling_length.
        scale: The factor of the products; 1 / sqrt(D) by default.
        scaling_length: The divisor of "silu".
        bias: A relative position and time bias.
        sink: A logit in addition to those of the keys [H].
        soft_cap: Scores become soft_cap * tanh(score / soft_cap), before the bias.
        return_lse: Whether to return the log-sum-exp too, without gradient.
        backend: "auto" selects "triton" on CUDA, "npu" on Ascend, "sdpa" on a CPU, or "reference" for what the last
            two do not support.

    Returns:
        The output [T, H, E], or with `return_lse` the output and the log-sum-exp [H, T] ([B, H, N] for dense inputs).
    """
    if q.ndim == 4:
        return _attend_dense(
            q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse,
            {"mask": mask, "activation": activation, "scale": scale, "scaling_length": scaling_length, "bias": bias, "sink": sink,
                 "soft_cap": soft_cap, "backend": backend},
        )  # fmt: skip
    _check_tensors(q, k, v)
    cu_q, cu_k = _resolve_cuts(q, k, cu_seqlens_q, cu_seqlens_k)
    form, table = _resolve_table(mask, cu_q, cu_k, len(q), len(k))
    _check_options(q, k, activation, scale, scaling_length, bias, sink, soft_cap)
    call = AttentionCall(
        cu_q if table is None else table.cu_q,
        cu_k if table is None else table.cu_k,
        form,
        table,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        activation,
        1.0 if scaling_length is None else float(scaling_length),
        soft_cap,
        sink,
        bias,
    )
    out, lse = attend(q, k, v, call, _select_backend(backend, q, v, call))
    return (out, lse) if return_lse else out


def _attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    return_lse: bool,
    options: dict[str, Any],
) -> Any:
    """Attend dense inputs [B, H, N, D] as B packed sequences of N; `options` are the other arguments of `uni_attention`."""
    if k.ndim != 4 or v.ndim != 4 or cu_q is not None or cu_k is not None or not len(q) == len(k) == len(v):
        raise ConfigError(
            f"dense q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} want [B, H, N, D], [B, G, M, D] and "
            "[B, G, M, E] and no cu_seqlens; for sequences of unlike lengths pack them: [T, H, D] with cu_seqlens_q."
        )
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    cuts = torch.arange(batch + 1, device=q.device, dtype=torch.int32)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    cu_seqlens_k = None if keys == queries else cuts * keys
    out, lse = uni_attention(
        *packed, cu_seqlens_q=cuts * queries, cu_seqlens_k=cu_seqlens_k, return_lse=True, **options
    )
    out = out.unflatten(0, (batch, queries)).transpose(1, 2)
    if not return_lse:
        return out
    has_lse = lse.shape[1] > 0  # "silu" has none.
    return out, lse.unflatten(1, (batch, -1)).transpose(0, 1) if has_lse else lse.new_empty(batch, heads, 0)


def _resolve_cuts(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Check the cuts of packed queries and keys and return both; those of the keys are by default those of the queries."""
    if cu_q is None:
        raise ConfigError(
            "packed q [T, H, D] needs cu_seqlens_q [B + 1], where each sequence begins and the last ends."
        )
    cu_k = cu_q if cu_k is None else cu_k
    for name, cuts in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cuts.device != q.device:
            raise ConfigError(
                f"{name} is on {cuts.device}, q on {q.device}; they must share a device. Move it with .to(q.device)."
            )
    check_cuts(cu_q, cu_k, len(q), len(k))
    if cu_k is cu_q and len(q) != len(k):
        raise ConfigError(
            f"q has {len(q)} tokens and k {len(k)}; if these differ, pass the cuts of k as cu_seqlens_k [B + 1]."
        )
    return cu_q, cu_k


def _resolve_table(
    mask: Any, cu_q: Tensor, cu_k: Tensor, tokens_q: int, tokens_k: int
) -> tuple[str, IntervalTable | None]:
    """Return the form of the mask in this batch, and its table if the form alone does not define it.

    Raises:
        ConfigError: If `mask` is of another type, or is a table that was built for another batch.
    """
    if isinstance(mask, UniMask):
        form = mask.form
        if form == "full" or (form == "causal" and cu_k is cu_q):
            return form, None
        return "table", mask.build_table(cu_q, cu_k, tokens_q=tokens_q, tokens_k=tokens_k)
    if not isinstance(mask, IntervalTable):
        raise ConfigError(
            f"uni_attention cannot express the mask {type(mask).__name__}; it takes a UniMask (UniMask.causal(), "
            "UniMask.from_dense(...), ...) or the table of one."
        )
    table_q, table_k = mask.start.shape[1], _count_keys(mask, tokens_k)
    fits = (table_q, table_k) == (tokens_q, tokens_k) and mask.start.device == cu_q.device
    if fits and cu_q.device.type == "cpu" and not torch.compiler.is_compiling():
        fits = torch.equal(mask.cu_q, cu_q.int()) and torch.equal(mask.cu_k, cu_k.int())
    if not fits:
        raise ConfigError(
            f"this mask's table was made for {table_q} queries and {table_k} keys in {len(mask.cu_q) - 1} sequences on "
            f"{mask.start.device}; this batch has {tokens_q} and {tokens_k} in {len(cu_q) - 1} on {cu_q.device}, or cuts them "
            "elsewhere. Make it with mask.build_table(cu_seqlens_q, cu_seqlens_k)."
        )
    return "table", mask


def _count_keys(table: IntervalTable, tokens_k: int) -> int:
    """Return the number of keys that a table was built for; if only a device knows it, return `tokens_k`."""
    key_values = table.column_start if table.column_start is not None else table.word
    if key_values is not None:
        return len(key_values)
    if table.cu_k.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(table.cu_k[-1])
    return tokens_k


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the shapes, dtypes, devices and widths of queries, keys and values."""
    shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"uni_attention takes q [T, H, D], k [S, G, D] and v [S, G, E], packed, or all of them dense [B, H, N, D]; "
            f"got {shapes}."
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"q {list(q.shape)} has {q.shape[1]} heads, k {list(k.shape)} has {k.shape[1]}; q's must be a multiple of k's."
        )
    if (not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES) and not torch.is_autocast_enabled(
        q.device.type
    ):
        raise ConfigError(
            f"q {shapes.split(',')[0]}..., k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must share one of "
            "float32, bfloat16, float16 and float64. Cast them with .to()."
        )
    if not q.device == k.device == v.device:
        raise ConfigError(
            f"q, k and v are on {q.device}, {k.device} and {v.device}; they must share a device."
        )
    for name, width in (("q and k", q.shape[2]), ("v", v.shape[2])):
        if not 0 < width <= _MAX_WIDTH:
            raise ConfigError(
                f"{name} have width {width} (shapes {shapes}); uni_attention takes 1 to {_MAX_WIDTH} per head."
            )


def _check_options(
    q: Tensor,
    k: Tensor,
    activation: str,
    scale: float | None,
    scaling_length: float | None,
    bias: Any,
    sink: Tensor | None,
    soft_cap: float | None,
) -> None:
    """Check the options of a call: activation, scales, sink and bias."""
    if activation not in ("softmax", "silu"):
        raise ConfigError(f"activation is {activation!r}; it must be 'softmax' or 'silu'.")
    if activation == "silu" and (scaling_length is None or scaling_length <= 0):
        raise ConfigError(
            f"scaling_length is {scaling_length}; activation 'silu' divides by it. Pin it to the longest sequence the model "
            "is built for, not the batch's, or training and serving differ."
        )
    for name, value in (("scale", scale), ("soft_cap", soft_cap)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}; it must be above 0.")
    if sink is not None and (
        activation == "silu" or tuple(sink.shape) != (q.shape[1],) or sink.device != q.device
    ):
        raise ConfigError(
            f"sink has shape {list(sink.shape)} on {sink.device}; it must be [{q.shape[1]}], a logit per head, on {q.device}, "
            f"and needs a softmax; activation is {activation!r}."
        )
    if bias is not None:
        if not isinstance(bias, RelativeBias):
            raise ConfigError(
                f"bias is a {type(bias).__name__}; it must be a RelativeBias (tables of O(N), not a dense [N, N])."
            )
        bias.check(q.shape[1], len(q), len(k))


def _select_backend(name: str, q: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Return the name of the backend of a call: the requested one, or the best one for "auto".

    Raises:
        ConfigError: If the requested backend does not exist or does not support the call.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend is {name!r}; there are {', '.join(BACKENDS)}.")
    is_cpu = q.device.type == "cpu"
    if name == "auto":
        # The variable selects one backend on all devices, so that results can be compared bitwise.
        requested = os.environ.get("NONET_ATTENTION", "auto")
        if requested != "auto":
            return requested
        if q.is_cuda and q.dtype != torch.float64:
            return "triton"
        if npu.is_available(q, v, call):
            return "npu"
        return "sdpa" if is_cpu and call.plain else "reference"
    if name == "triton" and not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"backend 'triton' runs on CUDA; q is on {q.device}. Leave backend to 'auto', or set TRITON_INTERPRET=1 to "
            "interpret the kernels on a CPU."
        )
    if name == "npu" and not npu.is_available(q, v, call):
        raise ConfigError(
            f"backend 'npu' computes a softmax without sink, bias or soft cap, of equal widths, on an Ascend device; q is on "
            f"{q.device}. Use 'auto' or 'reference'."
        )
    if name == "sdpa" and not (is_cpu and call.plain):
        raise ConfigError(
            f"backend 'sdpa' computes a softmax without bias or soft cap on a CPU; this call has activation {call.activation!r}, "
            f"soft_cap {call.soft_cap}, bias {'yes' if call.bias else 'no'}, on {q.device}. Use 'auto' or 'reference'."
        )
    return name

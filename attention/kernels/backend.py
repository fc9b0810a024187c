"""The Triton kernels as a backend of uni_attention: plans are made once per table, for all layers and both directions.

This module is imported by the first call that uses Triton, and by nothing else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nonet.attention.calls import AttentionCall
from nonet.attention.kernels import backward_pass as kernels_backward  # type: ignore[attr-defined]
from nonet.attention.kernels import forward_pass as kernels  # type: ignore[attr-defined]
from nonet.attention.kernels.launch import KernelOptions
from nonet.attention.masks import IntervalTable
from nonet.attention.plans import make_plans  # type: ignore[import-not-found]

# Shapes: T packed query tokens, H query heads, E value width.
# The `start` tensor of a table -> (its version, plans by configuration).
_PLANS: Any = WeakIdKeyDictionary()
# The cuts of a batch -> (their version, tables by the form of the mask), for forms that define the mask.
_TABLES: Any = WeakIdKeyDictionary()


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Compute output [T, H, E] and log-sum-exp [H, T] float32 ([H, 0] for "silu")."""
    q, k, v = _make_rows_contiguous(q, k, v)
    table, options = _get_table(call, len(q), len(k)), _make_options(call)
    config = kernels.infer_config(q, v, table, options)
    return kernels.forward(q, k, v, table, _get_plans(table, config), options, config)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> list[Tensor | None]:
    """Compute the gradients of q, k, v, sink, and the bias's position and time tables; None for inputs that do not exist."""
    q, k, v = _make_rows_contiguous(q, k, v)
    table, options = _get_table(call, len(q), len(k)), _make_options(call)
    config = kernels.infer_config(q, v, table, options)
    grads = kernels_backward.backward(
        grad, q, k, v, out, lse, table, _get_plans(table, config), options, config
    )
    bias = call.bias
    sink_and_tables = (
        call.sink,
        None if bias is None else bias.position,
        None if bias is None else bias.time,
    )
    sink_and_table_grads = (grads.sink, grads.position, grads.time)
    cast_grads = [
        None if x is None or g is None else g.to(x.dtype)
        for g, x in zip(sink_and_table_grads, sink_and_tables, strict=True)
    ]
    return [grads.q, grads.k, grads.v, *cast_grads]


def _make_options(call: AttentionCall) -> KernelOptions:
    """Return the options of the kernels for a call."""
    return KernelOptions(
        scale=call.scale,
        activation=call.activation,
        scaling_length=call.scaling_length,
        soft_cap=call.soft_cap,
        sink=call.sink,
        bias=call.bias,
    )


def _make_rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make the last dimension contiguous, as the kernels require."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _get_table(call: AttentionCall, tokens_q: int, tokens_k: int) -> IntervalTable:
    """Return the interval table of a call, which is built once per batch if only a form was given."""
    if call.table is not None:
        return call.table
    if call.cu_k is not call.cu_q:
        return call.build_table(tokens_q, tokens_k)
    return _get_cached(_TABLES, call.cu_q, (call.form,), lambda: call.build_table(tokens_q, tokens_k))


def _get_plans(table: IntervalTable, config: Any) -> Any:
    """Return the tile plans of a table, which are made once per configuration."""
    return _get_cached(_PLANS, table.start, config, lambda: make_plans(table, config))


def _get_cached(store: Any, anchor: Tensor, key: Any, make: Any) -> Any:
    """Return the result of `make` that is cached for a tensor and a key.

    It is made again if the tensor has changed, and the cache entry is dropped together with the tensor.
    """
    if anchor.is_inference():  # Inference tensors have no version counter that shows a change.
        return make()
    version, results = store.get(anchor, (None, {}))
    if version != anchor._version:
        results = {}
        store[anchor] = (anchor._version, results)
    if key not in results:
        results[key] = make()
    return results[key]

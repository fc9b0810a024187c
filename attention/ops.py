"""The torch operators nonet::attend and nonet::attend_backward, with fake, autograd and autocast kernels.

Masks and sequence lengths are tensor arguments, so torch.compile(fullgraph=True, dynamic=True) makes one graph for all lengths.
The argument `backend` selects the implementation: "sdpa", "npu" and "reference" use torch, "triton" uses nonet.attention.kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nonet.attention.calls import AttentionCall, RelativeBias
from nonet.attention.masks import IntervalTable
from nonet.attention.torch_backends import chunked as chunks
from nonet.attention.torch_backends import npu, sdpa
from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, H query heads, G key heads, D width, E value width, K slots.
# The arguments of both operators from q on, in the order of `_make_call`.
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, Tensor? start, Tensor? stop, SymInt max_q, SymInt max_k, "
    "Tensor? column_start, Tensor? column_stop, Tensor? sees, Tensor? word, Tensor? sink, Tensor? position, Tensor? time, "
    "Tensor? time_q, Tensor? time_k, float steps, float scale, float scaling_length, float? soft_cap, str activation, "
    "str form, str backend"
)
# The indices of the differentiable arguments: q, k, v, sink, position and time.
_DIFFERENTIABLE = (0, 1, 2, 13, 14, 15)

_library = torch.library.Library("nonet", "DEF")
_library.define(f"attend({_CALL}) -> (Tensor, Tensor)")
_library.define(f"attend_backward(Tensor grad, Tensor out, Tensor lse, {_CALL}) -> Tensor[]")


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, backend: str) -> tuple[Tensor, Tensor]:
    """Compute the output [T, H, E] in q's dtype and the log-sum-exp [H, T].

    The log-sum-exp is float32, or float64 if q is. For the activation "silu" it is empty, with shape [H, 0].
    """
    bias = call.bias or RelativeBias()
    if _can_run_eagerly(q, k, v):
        return _EagerAttention.apply(q, k, v, call.sink, bias.position, bias.time, call, backend)  # type: ignore[return-value]
    table = call.table
    rows = (None, None, 0, 0) if table is None else (table.start, table.stop, table.max_q, table.max_k)
    refined = (None,) * 4
    if table is not None:
        refined = (table.column_start, table.column_stop, table.sees, table.word)
    tables = (call.sink, bias.position, bias.time, bias.time_q, bias.time_k, bias.steps)
    score_options = (call.scale, call.scaling_length, call.soft_cap, call.activation, call.form)
    return torch.ops.nonet.attend(
        q, k, v, call.cu_q, call.cu_k, *rows, *refined, *tables, *score_options, backend
    )


def _can_run_eagerly(*tensors: Tensor) -> bool:
    """Return whether the operators can be bypassed because no compilation, autocast or tensor subclass is active.

    A plain autograd function then saves 0.3 ms per forward and backward.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    )


class _EagerAttention(torch.autograd.Function):
    """An autograd function that computes the same as the operators, but takes an `AttentionCall` instead of 25 arguments."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *tables, call, backend = rest
        out, lse = _compute(q, k, v, call, backend)
        # The tables are saved too, so that torch detects in-place changes.
        ctx.save_for_backward(q, k, v, out, lse, *tables)
        ctx.call, ctx.backend = call, backend
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 8  # One for each argument of forward.
        q, k, v, out, lse, *_ = ctx.saved_tensors
        gradients = _compute_gradients(grad, q, k, v, out, lse, ctx.call, ctx.backend)
        outputs = (x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False))
        return (*outputs, None, None)


def _make_call(cu_q: Tensor, cu_k: Tensor, *rest: Any) -> tuple[AttentionCall, str]:
    """Convert the operator's arguments after q, k and v to an `AttentionCall` and the name of the backend."""
    start, stop, max_q, max_k, column_start, column_stop, sees, word, sink, position, time, time_q, time_k = (
        rest[:13]
    )
    steps, scale, scaling_length, soft_cap, activation, form, backend = rest[13:]
    table = None
    if start is not None:
        table = IntervalTable(start, stop, cu_q, cu_k, max_q, max_k, column_start, column_stop, sees, word)
    bias = None
    if position is not None or time is not None:
        bias = RelativeBias(position, time, time_q, time_k, steps)
    call = AttentionCall(cu_q, cu_k, form, table, scale, activation, scaling_length, soft_cap, sink, bias)
    return call, backend


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Compute the output and the log-sum-exp: the implementation of nonet::attend."""
    return _compute(q, k, v, *_make_call(*rest))


def _backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> list[Tensor]:
    """Compute the gradients of q, k, v, sink, position and time: the implementation of nonet::attend_backward.

    Gradients have the dtypes of the inputs, on which compiled functions rely. The gradient of an absent input is an empty
    tensor, because an operator cannot return None.
    """
    gradients = _compute_gradients(grad, q, k, v, out, lse, *_make_call(*rest))
    inputs = [(q, k, v, *rest)[index] for index in _DIFFERENTIABLE]
    return [
        q.new_empty(0) if gradient is None else gradient.to(x.dtype)
        for gradient, x in zip(gradients, inputs, strict=True)
    ]


def _compute(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, backend: str) -> tuple[Tensor, Tensor]:
    """Compute the output [T, H, E] and the log-sum-exp ([H, T]; [H, 0] for SiLU) with a backend."""
    if backend == "triton":
        return _import_triton_backend().forward(q, k, v, call)
    out, lse = {"sdpa": sdpa, "npu": npu, "reference": chunks}[backend].forward(q, k, v, call)
    return out, lse.T.contiguous() if call.activation == "softmax" else lse.new_empty(q.shape[1], 0)


def _compute_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall, backend: str
) -> list[Tensor | None]:
    """Compute the gradients of all differentiable inputs with the backend of the forward pass."""
    if backend == "triton":
        return _import_triton_backend().backward(grad, q, k, v, out, lse, call)
    if backend == "sdpa":
        return [*sdpa.backward(grad, q, k, v, out, lse.T, call), None, None]
    if backend == "npu":
        return npu.backward(grad, q, k, v, call)
    return chunks.backward(grad, q, k, v, call)


def _import_triton_backend() -> Any:
    """Import the Triton backend, or raise ConfigError if Triton is missing."""
    try:
        from nonet.attention.kernels import backend as triton_backend
    except ImportError as error:
        raise ConfigError(
            f"backend 'triton' is not available ({error}); install triton, or use backend='sdpa' or 'reference'."
        ) from error
    return triton_backend


def _infer_output_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty tensors shaped like the output [T, H, E] and the log-sum-exp ([H, T]; [H, 0] for SiLU)."""
    activation = rest[-3]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_tokens = q.shape[0] if activation == "softmax" else 0
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(
        q.shape[1], lse_tokens, dtype=lse_dtype
    )


def _infer_gradient_shapes(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> list[Tensor]:
    """Return empty tensors shaped like the gradients of `_backward`."""
    inputs = [arguments[index] for index in _DIFFERENTIABLE]
    return [
        grad.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in inputs
    ]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the operator's inputs and outputs for `_differentiate`."""
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors, *output)
    # None marks a saved tensor; other values are in a tuple, so that an argument None differs from the mark.
    ctx.inputs_or_marks = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients in the order of the operator's inputs; None for inputs that need no gradient."""
    gradients_by_input: list[Tensor | None] = [None] * len(ctx.inputs_or_marks)
    if grad is None:
        return tuple(gradients_by_input)
    *tensors, out, lse = ctx.saved_tensors
    saved = iter(tensors)
    inputs = [next(saved) if x is None else x[0] for x in ctx.inputs_or_marks]
    gradients = torch.ops.nonet.attend_backward(grad, out, lse, *inputs)
    for index, gradient in zip(_DIFFERENTIABLE, gradients, strict=True):
        if ctx.needs_input_grad[index]:
            gradients_by_input[index] = gradient
    return tuple(gradients_by_input)


def _register_autocast(key: str, device: str) -> None:
    """Register the autocast kernel, which casts q, k and v; masks, sinks and bias tables keep their dtype."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def run_autocast(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            q, k, v = (x.to(dtype) if x.dtype != torch.float64 else x for x in (q, k, v))
            return torch.ops.nonet.attend(q, k, v, *rest)

    _library.impl("attend", run_autocast, key)


for _name, _kernel in (("attend", _forward), ("attend_backward", _backward)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("nonet::attend", _infer_output_shapes, lib=_library)
torch.library.register_fake("nonet::attend_backward", _infer_gradient_shapes, lib=_library)
torch.library.register_autograd(
    "nonet::attend", _differentiate, setup_context=_save_for_backward, lib=_library
)
_register_autocast("AutocastCPU", "cpu")
_register_autocast("AutocastCUDA", "cuda")

"""Checks on a GPU that must pass before times count: results close to float64, equal bits in every run, no recompilation.

Every mask is checked on small batches, forward and gradients, in float32 and bfloat16. Checks do not raise: they
report numbers beside their limits, so that a failing device still produces its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nonet.attention.kernels import AttentionGradients, KernelOptions, backward, forward, infer_config
from nonet.attention.masks import IntervalTable
from nonet.attention.plans import make_plan, make_plans
from nonet.bench.attention import masks
from nonet.bench.attention.dense_reference import attend_reference
from nonet.bench.attention.workloads import draw_lengths, to_device

_LENGTHS = [300, 1, 0, 64, 517]
_SHORT = [40, 1]  # for Triton's interpreter
_REPEATS, _BATCHES = 100, 100
_BLIND = 1e-30


def list_checks(device: str = "cuda") -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the checks by name: largest errors (bf16 relative to dense torch in bf16), equal bits, and compiled variants."""
    lengths = _LENGTHS if device == "cuda" else _SHORT
    for name, make in masks.CHECKED.items():
        yield name, lambda make=make: _check_mask(make(lengths), device)
    yield "gradients equal over runs", lambda: _is_repeatable(masks.build_causal(lengths), device)
    if device == "cuda":
        yield "variants compiled over batches", lambda: _count_variants(device)


def _check_mask(table: IntervalTable, device: str) -> dict[str, Any]:
    """Return the errors of one mask, and whether the plan equals the host's."""
    width = 64 if device == "cuda" else 16
    return {
        "fp32": _measure_errors(table, torch.float32, width, device),
        "bf16 over dense bf16": _compare_with_dense_bf16(table, width, device),
        "plan equals the host's": _has_same_plan(table, device),
    }


def run(
    table: IntervalTable,
    leaves: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    options: KernelOptions | None = None,
) -> tuple[Tensor, AttentionGradients]:
    """Return the outputs and gradients of the kernels with the device's shipped configuration.

    Args:
        table: The mask.
        leaves: q, k and v.
        grad: Gradient of the outputs.
        options: Options of the kernels.
    """
    q, k, v = leaves
    config = infer_config(q, v, table)
    made = make_plans(table, config)
    out, lse = forward(q, k, v, table, made, options, config)
    return out, backward(grad, q, k, v, out, lse, table, made, options, config)


def draw_inputs(
    table: IntervalTable, width: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Draw q, k, v and the gradient of the outputs, with two heads."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [int(table.cu_q[-1]), int(table.cu_k[-1]), int(table.cu_k[-1]), int(table.cu_q[-1])]
    q, k, v, grad = (torch.randn(n, 2, width, generator=generator).to(device, dtype) for n in sizes)
    return (q, k, v), grad


def _measure_errors(table: IntervalTable, dtype: torch.dtype, width: int, device: str) -> dict[str, float]:
    """Return the largest absolute errors of outputs and gradients against float64."""
    leaves, grad = draw_inputs(table, width, dtype, device)
    out, grads = run(to_device(table, device), leaves, grad)
    want = _run_dense(table, leaves, grad, torch.float64)
    return {
        name: float((x.double().cpu() - y).abs().max())
        for (name, x), y in zip(
            {"out": out, "q": grads.q, "k": grads.k, "v": grads.v}.items(), want, strict=True
        )
    }


def _compare_with_dense_bf16(table: IntervalTable, width: int, device: str) -> dict[str, float]:
    """Return the kernel's errors divided by those of the dense reference in bfloat16; the limit is 2."""
    ours = _measure_errors(table, torch.bfloat16, width, device)
    leaves, grad = draw_inputs(table, width, torch.bfloat16, device)
    want = _run_dense(table, leaves, grad, torch.float64)
    same = _run_dense(table, leaves, grad, torch.bfloat16)
    errors = [float((x.double() - y).abs().max()) for x, y in zip(same, want, strict=True)]
    return {name: ours[name] / max(error, _BLIND) for name, error in zip(ours, errors, strict=True)}


def _run_dense(
    table: IntervalTable, leaves: tuple[Tensor, Tensor, Tensor], grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return outputs and gradients of the dense reference in a dtype."""
    inner = [x.detach().cpu().to(dtype).requires_grad_() for x in leaves]
    out, _ = attend_reference(inner[0], inner[1], inner[2], table)
    return [out.detach(), *torch.autograd.grad((out * grad.cpu().to(dtype)).sum(), inner)]


def _has_same_plan(table: IntervalTable, device: str) -> bool:
    """Return whether a plan made on the device equals the one made on the host."""
    host, there = make_plan(table, 64, 64), make_plan(to_device(table, device), 64, 64)
    for side in ("query", "key"):
        expected, planned = getattr(host, side), getattr(there, side)
        keep = planned.place[:, 0] >= 0
        if not torch.equal(expected.place, planned.place[keep].cpu()):
            return False
        if not torch.equal(expected.spans, planned.spans[keep].cpu()):
            return False
    return True


def _is_repeatable(table: IntervalTable, device: str) -> bool:
    """Return whether gradients are equal bit for bit over many runs."""
    there = to_device(table, device)
    leaves, grad = draw_inputs(table, 64, torch.bfloat16, device)
    _, first = run(there, leaves, grad)
    for _ in range(_REPEATS if device == "cuda" else 1):
        _, again = run(there, leaves, grad)
        if not all(torch.equal(getattr(first, name), getattr(again, name)) for name in "qkv"):
            return False
    return True


def _count_variants(device: str) -> dict[str, int]:
    """Return the number of compiled variants of the forward kernel after the first and the last random batch.

    It must not grow.
    """
    from nonet.attention.kernels import forward_kernel

    counts = []
    for number in range(_BATCHES):
        table = masks.build_causal(draw_lengths(8, 200, 600, number))
        leaves, grad = draw_inputs(table, 64, torch.bfloat16, device, number)
        run(to_device(table, device), leaves, grad)
        counts.append(sum(len(cache[0]) for cache in forward_kernel.device_caches.values()))
    return {"first batch": counts[0], "last batch": counts[-1]}

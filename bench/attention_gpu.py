"""Attention on a GPU: the kernels against FlexAttention and torch's own, masks and shapes as recommenders have them.

`python -m nonet.bench.attention_gpu --json out.json` checks results first, then times each row: kernels alone as a CUDA
graph, and a whole step with the mask's plan made anew, as every new batch pays for. TFLOP/s count visible pairs;
their share is of a bf16 matrix product measured in the same run. Medians of 30; sides take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.attention.configs import Config
from nonet.attention.kernels import config_of, forward
from nonet.attention.kernels_backward import backward
from nonet.attention.plan import plans
from nonet.attention.table import IntervalTable
from nonet.bench.attention_checks import checks
from nonet.bench.attention_workloads import Workload, to_device, workloads

_ROUNDS = 30
_BACKWARD_FLOPS = 2.5  # of the forward's: five products where it has two
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--max-autotune", action="store_true", help="FlexAttention's compiled with max-autotune too"
    )
    parser.add_argument("--only", default="", help="rows whose name holds this")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("attention_gpu: there is no GPU here; nothing was measured.", file=sys.stderr)
        return 2
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matmul_tflops": matmul_tflops(),
        "checks": checks(),
        "rows": [],
    }
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}), flush=True)
    for width in chosen.widths:
        for work in workloads(width):
            if chosen.only in work.name:
                row = measure(work, found["matmul_tflops"], chosen.max_autotune)
                found["rows"].append(row)
                print(json.dumps(row), flush=True)
                if chosen.json:
                    chosen.json.write_text(json.dumps(found, indent=1))
    return 0


def measure(work: Workload, peak_tflops: float, autotune: bool) -> Row:
    """One row: milliseconds of each side, ratios to FlexAttention, TFLOP/s of visible work."""
    table = to_device(work.table, "cuda")
    q, k, v, grad = inputs(work)
    sides: dict[str, dict[str, Callable[[], Any]]] = {"ours": _ours(table, q, k, v, grad)}
    sides["flex"] = _flex(work, q, k, v, grad, None)
    if autotune:
        sides["flex max-autotune"] = _flex(work, q, k, v, grad, "max-autotune-no-cudagraphs")
    if work.window is not None:
        sides["varlen"] = _varlen(work, table, q, k, v, grad)
    phases = ("forward", "backward", "step") if work.backward else ("forward", "step")
    row: Row = {"name": work.name, "width": work.width, "tokens": q.shape[0]}
    for phase in phases:
        times = _interleaved(
            {name: made[phase] for name, made in sides.items() if phase in made}, phase == "step"
        )
        row |= {f"{name} {phase} ms": value for name, value in times.items()}
        if "flex" in times and "ours" in times:
            row[f"{phase} ratio"] = times["flex"] / times["ours"]
        if phase != "step" and "ours" in times:
            flops = work.flops() * (_BACKWARD_FLOPS if phase == "backward" else 1.0)
            row[f"{phase} TFLOP/s"] = flops / times["ours"] / 1e9
            row[f"{phase} share of matmul"] = row[f"{phase} TFLOP/s"] / peak_tflops
    return row


def inputs(work: Workload, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that take gradients, and the gradient of the outputs."""
    queries, keys = int(work.table.cu_q[-1]), int(work.table.cu_k[-1])
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    q = normal(queries, work.heads, work.width).requires_grad_()
    k = normal(keys, work.key_heads, work.width).requires_grad_()
    v = normal(keys, work.key_heads, work.width).requires_grad_()
    return q, k, v, normal(queries, work.heads, work.width)


def _ours(
    table: IntervalTable, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> dict[str, Callable[[], Any]]:
    q, k, v = q.detach(), k.detach(), v.detach()
    config: Config = config_of(q, v, table)
    made = plans(table, config)
    out, lse = forward(q, k, v, table, made, config=config)

    def step() -> Any:
        fresh = plans(table, config)
        out, lse = forward(q, k, v, table, fresh, config=config)
        return backward(grad, q, k, v, out, lse, table, fresh, config=config)

    return {
        "forward": lambda: forward(q, k, v, table, made, config=config),
        "backward": lambda: backward(grad, q, k, v, out, lse, table, made, config=config),
        "step": step,
    }


def _flex(
    work: Workload, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mode: str | None
) -> dict[str, Callable[[], Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    predicate = work.predicate("cuda")
    sizes = (1, None, q.shape[0], k.shape[0])
    build = torch.compile(create_block_mask, dynamic=False)
    heads = [x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    grad = grad.transpose(0, 1)[None]
    mask = build(predicate, *sizes, device="cuda")
    gqa = work.heads != work.key_heads
    out = compiled(*heads, block_mask=mask, enable_gqa=gqa)

    def step() -> Any:
        fresh = compiled(*heads, block_mask=build(predicate, *sizes, device="cuda"), enable_gqa=gqa)
        return torch.autograd.grad(fresh, heads, grad) if work.backward else fresh

    return {
        "forward": lambda: compiled(*heads, block_mask=mask, enable_gqa=gqa),
        "backward": lambda: torch.autograd.grad(out, heads, grad, retain_graph=True),
        "step": step,
    }


def _varlen(
    work: Workload, table: IntervalTable, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> dict[str, Callable[[], Any]]:
    """torch's flash attention over packed rows, the ceiling for masks that it can say; {} where torch lacks it."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        more: dict[str, Any] = {"window_size": work.window}

        def call() -> Tensor:
            made = varlen_attn(q, k, v, table.cu_q, table.cu_k, table.max_q, table.max_k, **more)
            assert isinstance(made, Tensor)
            return made

        out = call()
    except (ImportError, TypeError, RuntimeError) as error:
        print(f"varlen_attn: not measured, {error}", file=sys.stderr)
        return {}
    return {
        "forward": call,
        "backward": lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        "step": lambda: torch.autograd.grad(call(), (q, k, v), grad),
    }


def _interleaved(calls: dict[str, Callable[[], Any]], eager: bool) -> dict[str, float]:
    """Median milliseconds of each; kernels as CUDA graphs unless `eager`, the sides in turn."""
    runs = {name: call if eager else _graph(call) for name, call in calls.items()}
    for run in runs.values():
        for _ in range(3):
            run()
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            spent[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in spent.items()}


def _graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call's kernels as one graph; the call itself where it can't be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        print(f"not captured, timed with its launches: {error}", file=sys.stderr)
        return call
    return graph.replay


def matmul_tflops(size: int = 8192) -> float:
    """What this device does on a plain bf16 product of normal numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / _interleaved({"matmul": lambda: a @ b}, eager=True)["matmul"] / 1e9


if __name__ == "__main__":
    sys.exit(main())

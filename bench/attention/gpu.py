"""Attention on a GPU: the kernels against FlexAttention and torch's own, with masks and shapes of recommenders.

`nonet bench gpu --json out.json` checks results first, then times each row: kernels alone as a CUDA graph, and a
whole step including a new plan of the mask, as every new batch needs one. TFLOP/s count visible pairs; their share is
relative to a bf16 matrix product measured in the same run. Times are medians of 30, with the sides in turn. A failure
is recorded and the rest goes on. The JSON is written after every cell, and no cell begins after `budget_s` (a quarter
of it for the checks). `--set dry=true` runs as much as possible on a CPU, with small rows and Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.attention.kernels import backward, forward, infer_config
from nonet.attention.masks import IntervalTable
from nonet.attention.plans import TileConfig, make_plans
from nonet.bench.attention.checks import list_checks
from nonet.bench.attention.workloads import Workload, list_workloads, to_device
from nonet.bench.timing import summarise_ratios
from nonet.errors import ConfigError
from nonet.timing import LapTimer

_ROUNDS = 30
_BACKWARD_FLOPS = 2.5  # of the forward's: five products where it has two
_CHECKS = 0.25  # of the budget
_SHRINK = 64  # a dry run's rows are this many times shorter
Row = dict[str, Any]
Side = dict[str, Callable[[], Any]]


@dataclass(slots=True)
class GpuRun:
    """The results so far, saved after every cell.

    Attributes:
        path: File of the results, None for none.
        budget_s: Seconds after which no cell begins.
        began: Monotonic time of the start.
        found: The results.
    """

    path: Path | None
    budget_s: float
    began: float = field(default_factory=time.monotonic)
    found: Row = field(default_factory=dict)

    def run_cell(self, name: str, make: Callable[[], Any], share: float = 1.0) -> Any:
        """Return the result of make(), or its error; "not begun" once this share of the budget is used up."""
        began = time.monotonic()
        if began - self.began > share * self.budget_s:
            made: Any = {"not begun": f"the budget of {share * self.budget_s:.0f} s was spent"}
        else:
            try:
                made = make()
            except Exception as error:  # whatever a baseline or a compiler raises, the other cells count
                made = {"error": f"{type(error).__name__}: {error}"[:500]}
        spent = round(time.monotonic() - began, 1)
        print(json.dumps({name: made, "seconds": spent}), flush=True)
        return made

    def save(self) -> None:
        """Save the results."""
        if self.path:
            self.path.write_text(json.dumps(self.found, indent=1))


def bench_gpu(
    widths: Sequence[int] = (128, 64),
    only: str = "",
    with_checks: bool = True,
    max_autotune: bool = False,
    budget_s: float = 480.0,
    dry: bool = False,
    json_file: Path | None = None,
) -> Row:
    """Run the checks and measure the rows.

    Args:
        widths: Head widths.
        only: Only rows whose name contains this.
        with_checks: Whether results are checked first.
        max_autotune: Whether FlexAttention is also compiled with max-autotune.
        budget_s: Seconds after which no cell begins.
        dry: Whether to run on a CPU with small rows.
        json_file: File of the results, None for none.

    Raises:
        ConfigError: There is no GPU, and `dry` is off.
    """
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise ConfigError("there is no GPU here; nothing was measured. --set dry=true runs it small")
    device = "cpu" if dry else "cuda"
    run = GpuRun(json_file, budget_s)
    name = "dry run, no measurement" if dry else torch.cuda.get_device_name()
    run.found |= {"device": name, "torch": torch.__version__, "checks": {}, "rows": []}
    peak = run.run_cell("matmul_tflops", lambda: measure_matmul_tflops(64 if dry else 8192, device))
    run.found["matmul_tflops"] = peak
    for name, check in list_checks(device) if with_checks else []:
        run.found["checks"][name] = run.run_cell(name, check, _CHECKS)
        run.save()
    for width in widths:
        for work in list_workloads(width, shrink=_SHRINK if dry else 1):
            if only in work.name:
                title = f"{work.name}, width {width}"
                made = run.run_cell(title, lambda work=work: measure(work, peak, max_autotune, device))
                run.found["rows"].append({"name": work.name, "width": width} | made)
                run.save()
    return run.found | {"ratio": _summarise_ratios(run.found["rows"])}


def _summarise_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return FlexAttention's time divided by ours, by phase; "step" includes a new plan of the mask."""
    out = {}
    for phase in ("forward", "backward", "step"):
        ratios = [row[f"{phase} ratio"] for row in rows if f"{phase} ratio" in row]
        out |= summarise_ratios(f"{phase} flex/uni", ratios)
    return out


def measure(work: Workload, peak_tflops: Any, autotune: bool, device: str = "cuda") -> Row:
    """Measure one row: milliseconds of each side, ratios to FlexAttention, TFLOP/s of visible work; errors by side.

    Args:
        work: The mask and shapes.
        peak_tflops: TFLOP/s of a matrix product, or an error.
        autotune: Whether FlexAttention is also compiled with max-autotune.
        device: Device that the sides run on.
    """
    table = to_device(work.table, device)
    q, k, v, grad = make_inputs(work, device)
    makers: dict[str, Callable[[], Side]] = {
        "ours": lambda: _make_our_side(table, q, k, v, grad),
        "flex": lambda: _make_flex_side(work, q, k, v, grad, None),
    }
    if autotune:
        makers["flex max-autotune"] = lambda: _make_flex_side(
            work, q, k, v, grad, "max-autotune-no-cudagraphs"
        )
    if work.window is not None:
        makers["varlen"] = lambda: _make_varlen_side(work, table, q, k, v, grad)
    row: Row = {"name": work.name, "width": work.width, "tokens": q.shape[0]}
    sides: dict[str, Side] = {}
    for name, make in makers.items():
        made = _try_side(row, name, make)
        if made is not None:
            sides[name] = made
    for phase in ("forward", "backward", "step") if work.backward else ("forward", "step"):
        times = _time_interleaved(sides, phase, row, device)
        row |= {f"{name} {phase} ms": value for name, value in times.items()}
        if "flex" in times and "ours" in times:
            row[f"{phase} ratio"] = times["flex"] / times["ours"]
        if phase != "step" and "ours" in times:
            flops = work.count_flops() * (_BACKWARD_FLOPS if phase == "backward" else 1.0)
            row[f"{phase} TFLOP/s"] = flops / times["ours"] / 1e9
            if isinstance(peak_tflops, float):
                row[f"{phase} share of matmul"] = row[f"{phase} TFLOP/s"] / peak_tflops
    return row


def _try_side(row: Row, name: str, make: Callable[[], Any]) -> Any:
    """Return the result of make(); an error is recorded in the row, so that the other sides are still measured."""
    try:
        return make()
    except Exception as error:
        row[f"{name} error"] = f"{type(error).__name__}: {error}"[:500]
        return None


def make_inputs(work: Workload, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw q, k, v that take gradients, and the gradient of the outputs."""
    queries, keys = int(work.table.cu_q[-1]), int(work.table.cu_k[-1])
    generator = torch.Generator(device).manual_seed(0)

    def draw_normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

    q = draw_normal(queries, work.heads, work.width).requires_grad_()
    k = draw_normal(keys, work.key_heads, work.width).requires_grad_()
    v = draw_normal(keys, work.key_heads, work.width).requires_grad_()
    return q, k, v, draw_normal(queries, work.heads, work.width)


def _make_our_side(table: IntervalTable, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Side:
    """Prepare our kernels for one workload."""
    q, k, v = q.detach(), k.detach(), v.detach()
    config: TileConfig = infer_config(q, v, table)
    made = make_plans(table, config)
    out, lse = forward(q, k, v, table, made, config=config)

    def step() -> Any:
        fresh = make_plans(table, config)
        out, lse = forward(q, k, v, table, fresh, config=config)
        return backward(grad, q, k, v, out, lse, table, fresh, config=config)

    return {
        "forward": lambda: forward(q, k, v, table, made, config=config),
        "backward": lambda: backward(grad, q, k, v, out, lse, table, made, config=config),
        "step": step,
    }


def _make_flex_side(work: Workload, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mode: str | None) -> Side:
    """Prepare FlexAttention for one workload."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = flex_attention
    build: Any = create_block_mask
    if q.is_cuda:
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
        build = torch.compile(create_block_mask, dynamic=False)
    device = q.device.type
    predicate = work.predicate(device)
    sizes = (1, None, q.shape[0], k.shape[0])
    heads = [  # FlexAttention has no backward on a CPU
        x.detach().transpose(0, 1)[None].requires_grad_(q.is_cuda) for x in (q, k, v)
    ]
    grad = grad.transpose(0, 1)[None]
    mask = build(predicate, *sizes, device=device)
    gqa = work.heads != work.key_heads
    out = compiled(*heads, block_mask=mask, enable_gqa=gqa)

    def step() -> Any:
        fresh = compiled(*heads, block_mask=build(predicate, *sizes, device=device), enable_gqa=gqa)
        return torch.autograd.grad(fresh, heads, grad) if work.backward else fresh

    return {
        "forward": lambda: compiled(*heads, block_mask=mask, enable_gqa=gqa),
        "backward": lambda: torch.autograd.grad(out, heads, grad, retain_graph=True),
        "step": step,
    }


def _make_varlen_side(
    work: Workload, table: IntervalTable, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> Side:
    """Prepare torch's flash attention over packed rows, for masks that it supports."""
    from torch.nn.attention.varlen import varlen_attn

    more: dict[str, Any] = {"window_size": work.window}

    def call() -> Tensor:
        made = varlen_attn(q, k, v, table.cu_q, table.cu_k, table.max_q, table.max_k, **more)
        assert isinstance(made, Tensor)
        return made

    out = call()
    return {
        "forward": call,
        "backward": lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        "step": lambda: torch.autograd.grad(call(), (q, k, v), grad),
    }


def _time_interleaved(sides: dict[str, Side], phase: str, row: Row, device: str) -> dict[str, float]:
    """Return the median milliseconds of each side's phase, in turn; kernels run as CUDA graphs except in whole steps."""
    runs: Side = {}
    for name, side in sides.items():
        if phase in side:
            ready = _try_side(row, f"{name} {phase}", lambda call=side[phase]: _warm_up(call, phase, device))
            if ready is not None:
                runs[name] = ready
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS if device == "cuda" else 1):
        for name, run in runs.items():
            spent[name].append(_measure_milliseconds(run, device))
    return {name: statistics.median(times) for name, times in spent.items()}


def _warm_up(call: Callable[[], Any], phase: str, device: str) -> Callable[[], Any]:
    """Warm up a call, captured as a graph if it consists of kernels alone."""
    if device != "cuda":
        call()
        return call
    run = call if phase == "step" else _capture_graph(call)
    for _ in range(3):
        run()
    return run


def _measure_milliseconds(run: Callable[[], Any], device: str) -> float:
    """Time one run in milliseconds."""
    if device != "cuda":
        with LapTimer() as timer:
            run()
        return 1e3 * timer.last_s
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def _capture_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture the kernels of a call as a graph; returns the call itself if it cannot be captured."""
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


def measure_matmul_tflops(size: int = 8192, device: str = "cuda") -> float:
    """Measure the TFLOP/s of a bf16 matrix product of normal numbers on this device."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    row: Row = {}
    times = _time_interleaved({"matmul": {"step": lambda: a @ b}}, "step", row, device)
    return 2.0 * size**3 / times["matmul"] / 1e9

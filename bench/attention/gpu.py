"""Attention on a GPU: Nonet's kernels compared with FlexAttention and torch's own, with masks and shapes of recommenders.

`nonet bench gpu --json out.json` checks results first, then measures one row per workload. The contenders ("sides") are timed
in three phases: the kernels of the forward and of the backward pass alone, as CUDA graphs, and a whole step including a new
plan of the mask, since every new batch needs one. TFLOP/s count visible pairs; their share is relative to a bf16 matrix product
measured in the same run. Times are medians of 30 rounds, in which the sides take turns. A check or a row is a cell: an error is
recorded as its result, and the next cell is run. The JSON is written after every cell, and no cell begins after `budget_s` (no
check after a quarter of it). `--set dry=true` runs as much as possible on a CPU, with small rows and Triton's interpreter.
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
from nonet.bench.timing import LapTimer, summarise_ratios
from nonet.errors import ConfigError

_ROUNDS = 30
_BACKWARD_FACTOR = 2.5  # operations of the backward pass / forward pass: five matrix products instead of two
_CHECKS_SHARE = 0.25  # share of the budget after which no check begins
_DRY_SHRINK = 64  # the rows of a dry run are this many times shorter
Row = dict[str, Any]
Side = dict[str, Callable[[], Any]]  # the calls of a contender by phase: "forward", "backward" and "step"


@dataclass(slots=True)
class GpuRun:
    """The budget and the results of a bench.

    Attributes:
        path: File of the results; None if they are not saved.
        budget_s: Seconds after the start after which no cell begins.
        began: Monotonic time of the start, in seconds.
        results: The results so far.
    """

    path: Path | None
    budget_s: float
    began: float = field(default_factory=time.monotonic)
    results: Row = field(default_factory=dict)

    def run_cell(self, name: str, measure_cell: Callable[[], Any], share: float = 1.0) -> Any:
        """Return and print the result of `measure_cell()`.

        The result is {"error": ...} if it raises, and {"not begun": ...} if this share of the budget is used up.
        """
        began = time.monotonic()
        if began - self.began > share * self.budget_s:
            result: Any = {"not begun": f"the budget of {share * self.budget_s:.0f} s was spent"}
        else:
            try:
                result = measure_cell()
            except (
                Exception
            ) as error:  # baselines and compilers raise errors of any type; the other cells still run
                result = {"error": f"{type(error).__name__}: {error}"[:500]}
        duration_s = round(time.monotonic() - began, 1)
        print(json.dumps({name: result, "seconds": duration_s}), flush=True)
        return result

    def save(self) -> None:
        """Write the results to `path`, if there is one."""
        if self.path:
            self.path.write_text(json.dumps(self.results, indent=1))


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
        only: Text that the names of measured rows must contain.
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
    run.results |= {"device": name, "torch": torch.__version__, "checks": {}, "rows": []}
    peak = run.run_cell("matmul_tflops", lambda: measure_matmul_tflops(64 if dry else 8192, device))
    run.results["matmul_tflops"] = peak
    for name, check in list_checks(device) if with_checks else []:
        run.results["checks"][name] = run.run_cell(name, check, share=_CHECKS_SHARE)
        run.save()
    for width in widths:
        for work in list_workloads(width, shrink=_DRY_SHRINK if dry else 1):
            if only in work.name:
                title = f"{work.name}, width {width}"
                row = run.run_cell(title, lambda work=work: measure(work, peak, max_autotune, device))
                run.results["rows"].append({"name": work.name, "width": width} | row)
                run.save()
    return run.results | {"ratio": _summarise_ratios(run.results["rows"])}


def _summarise_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return FlexAttention's time divided by ours, by phase; "step" includes a new plan of the mask."""
    summary = {}
    for phase in ("forward", "backward", "step"):
        ratios = [row[f"{phase} ratio"] for row in rows if f"{phase} ratio" in row]
        summary |= summarise_ratios(f"{phase} flex/uni", ratios)
    return summary


def measure(work: Workload, peak_tflops: Any, autotune: bool, device: str = "cuda") -> Row:
    """Measure one workload, and return its row: milliseconds of each side, ratios to FlexAttention, TFLOP/s, errors by side.

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
        side = _try_side(row, name, make)
        if side is not None:
            sides[name] = side
    for phase in ("forward", "backward", "step") if work.backward else ("forward", "step"):
        times = _time_interleaved(sides, phase, row, device)
        row |= {f"{name} {phase} ms": value for name, value in times.items()}
        if "flex" in times and "ours" in times:
            row[f"{phase} ratio"] = times["flex"] / times["ours"]
        if phase != "step" and "ours" in times:
            flops = work.count_flops() * (_BACKWARD_FACTOR if phase == "backward" else 1.0)
            row[f"{phase} TFLOP/s"] = flops / times["ours"] / 1e9
            if isinstance(peak_tflops, float):
                row[f"{phase} share of matmul"] = row[f"{phase} TFLOP/s"] / peak_tflops
    return row


def _try_side(row: Row, name: str, make: Callable[[], Any]) -> Any:
    """Return the result of make(); if it raises, write the error to `row` and return None, so that other sides are measured."""
    try:
        return make()
    except Exception as error:
        row[f"{name} error"] = f"{type(error).__name__}: {error}"[:500]
        return None


def make_inputs(work: Workload, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw q, k and v that require gradients, and the gradient of the output; all normal, bf16."""
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
    plans = make_plans(table, config)
    out, lse = forward(q, k, v, table, plans, config=config)

    def step() -> Any:
        new_plans = make_plans(table, config)
        out, lse = forward(q, k, v, table, new_plans, config=config)
        return backward(grad, q, k, v, out, lse, table, new_plans, config=config)

    return {
        "forward": lambda: forward(q, k, v, table, plans, config=config),
        "backward": lambda: backward(grad, q, k, v, out, lse, table, plans, config=config),
        "step": step,
    }


def _make_flex_side(work: Workload, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mode: str | None) -> Side:
    """Prepare FlexAttention for one workload; `mode` is that of torch.compile."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend: Any = flex_attention
    make_mask: Any = create_block_mask
    if q.is_cuda:
        attend = torch.compile(flex_attention, dynamic=False, mode=mode)
        make_mask = torch.compile(create_block_mask, dynamic=False)
    device = q.device.type
    predicate = work.predicate(device)
    sizes = (1, None, q.shape[0], k.shape[0])  # batch, heads (the mask is that of all heads), queries, keys
    qkv = [  # FlexAttention has no backward on a CPU
        x.detach().transpose(0, 1)[None].requires_grad_(q.is_cuda) for x in (q, k, v)
    ]
    grad = grad.transpose(0, 1)[None]
    mask = make_mask(predicate, *sizes, device=device)
    is_grouped = work.heads != work.key_heads
    out = attend(*qkv, block_mask=mask, enable_gqa=is_grouped)

    def step() -> Any:
        new_mask = make_mask(predicate, *sizes, device=device)
        step_out = attend(*qkv, block_mask=new_mask, enable_gqa=is_grouped)
        return torch.autograd.grad(step_out, qkv, grad) if work.backward else step_out

    return {
        "forward": lambda: attend(*qkv, block_mask=mask, enable_gqa=is_grouped),
        "backward": lambda: torch.autograd.grad(out, qkv, grad, retain_graph=True),
        "step": step,
    }


def _make_varlen_side(
    work: Workload, table: IntervalTable, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> Side:
    """Prepare torch's flash attention over packed rows, for masks that it supports."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": work.window}

    def attend() -> Tensor:
        result = varlen_attn(q, k, v, table.cu_q, table.cu_k, table.max_q, table.max_k, **options)
        assert isinstance(result, Tensor)
        return result

    out = attend()
    return {
        "forward": attend,
        "backward": lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        "step": lambda: torch.autograd.grad(attend(), (q, k, v), grad),
    }


def _time_interleaved(sides: dict[str, Side], phase: str, row: Row, device: str) -> dict[str, float]:
    """Return the median milliseconds of a phase of each side; the sides take turns. Errors of a warm-up are written to `row`.

    The phases "forward" and "backward" run as CUDA graphs.
    """
    runs: dict[str, Callable[[], Any]] = {}
    for name, side in sides.items():
        if phase in side:
            run = _try_side(row, f"{name} {phase}", lambda call=side[phase]: _warm_up(call, phase, device))
            if run is not None:
                runs[name] = run
    times_ms: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS if device == "cuda" else 1):
        for name, run in runs.items():
            times_ms[name].append(_measure_milliseconds(run, device))
    return {name: statistics.median(times) for name, times in times_ms.items()}


def _warm_up(call: Callable[[], Any], phase: str, device: str) -> Callable[[], Any]:
    """Warm up a call and return it, captured as a CUDA graph on a GPU unless the phase is "step"."""
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
    """Return the replay of a CUDA graph of a call's kernels, or the call itself if it cannot be captured."""
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

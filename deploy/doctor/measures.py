"""Measures of a node for `nonet doctor --calibrate`: real model steps at a few sizes, a sparse table, all-to-all, a Ray call.

Compute is timed by the thread's own CPU clock on one torch thread, medians of several, so that a busy neighbour doesn't
enter; what crosses processes is timed by the wall. About 40 s in all, most of it the start of processes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from nonet.controller.predict import Calibration, LinearCost, StepCost, UnitCosts, fit
from nonet.deploy.doctor.contention import Points, measure_crowd
from nonet.deploy.doctor.reference_steps import decode_step, train_step, update_step
from nonet.deploy.doctor.transfer_costs import line, measure_calls, measure_exchange
from nonet.embedding.tables import TableSpec
from nonet.embedding.training import ShardedTables
from nonet.timing import median_s

_DIM, _SEED = 32, 7
_REPEATS = 5
_TABLE = {"item": TableSpec(dim=_DIM)}
# (width, layers, sequences, events a sequence, ahead): what differs is what the rates are told apart by
TRAINED = (
    (64, 3, 16, 50, 3),
    (64, 1, 16, 50, 3),
    (64, 3, 4, 50, 3),
    (128, 2, 8, 50, 3),
    (32, 3, 16, 50, 3),
    (64, 3, 16, 50, 1),
)
ROLLED = (
    (64, 3, 64, 16),
    (64, 3, 16, 16),
    (64, 1, 32, 16),
    (128, 2, 32, 16),
    (64, 3, 32, 4),
    (32, 3, 64, 16),
)


def calibrate(say: Callable[[str], None]) -> Calibration:
    """Measure everything; `say` hears a line a measure."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gflops = _matmul()
        say(f"matmul       {gflops:.3g} GFLOP/s a core")
        gbps = _copy()
        say(f"copy         {gbps:.3g} GB/s")
        train = fit([timed(train_step, probe) for probe in TRAINED])
        say(f"train step   {_told(train)}")
        decode = fit([timed(decode_step, probe) for probe in ROLLED])
        say(f"decode       {_told(decode)}")
        update = fit([timed(update_step, probe) for probe in ROLLED])
        say(f"rl update    {_told(update)}")
        pull, push = _lookup()
        say(
            f"lookup       {1e-6 / pull.unit_s:.3g} M rows/s pulled, {1e-6 / push.unit_s:.3g} M rows/s updated"
        )
        exchange, reduce = measure_exchange()
        say(
            f"all-to-all   {exchange.call_s * 1e3:.3g} ms + {exchange.unit_s * 1e6:.3g} us a key, two processes, both ways"
        )
        say(f"all-reduce   {reduce.call_s * 1e3:.3g} ms, {1e-9 / reduce.unit_s:.3g} GB/s")
        threads, crowded = measure_crowd()
        say(f"threads      {_factors(threads)}")
        say(f"processes    {_factors(crowded)} as long, each")
        lines, process_s = measure_calls()
        for name, unit in (("call", "byte"), ("hop", "byte"), ("weights", "byte"), ("publish", "row")):
            cost = lines[name]
            say(f"{name:<12} {cost.call_s * 1e3:.3g} ms + {cost.unit_s * 1e6:.2g} us a {unit}")
        say(f"worker       starts in {process_s:.3g} s")
    finally:
        torch.set_num_threads(before)
    costs: dict[str, Any] = {"train": train, "update": update, "decode": decode, "pull": pull, "push": push}
    return Calibration(
        f"measured {time.strftime('%Y-%m-%d %H:%M')}",
        **costs,
        exchange=exchange,
        reduce=reduce,
        call=lines["call"],
        hop=lines["hop"],
        weights=lines["weights"],
        publish=lines["publish"],
        crowded=crowded,
        process_s=process_s,
        threads=threads,
        matmul_gflops=gflops,
        copy_gbps=gbps,
    )


def _cpu_seconds(work: Callable[[], Any]) -> float:
    """Median CPU seconds of this thread; the first call warms up."""
    return median_s(work, _REPEATS, time.thread_time)


def _matmul() -> float:
    """GFLOP/s of [1000, 64] x [64, 256] on one thread."""
    a, b = torch.randn(1000, 64), torch.randn(64, 256)
    flops, times = 2 * 1000 * 64 * 256, 50

    def many() -> None:
        for _ in range(times):
            torch.matmul(a, b)

    return flops * times / _cpu_seconds(many) / 1e9


def _copy() -> float:
    source = torch.zeros(32 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * len(source) / _cpu_seconds(lambda: target.copy_(source)) / 1e9


def timed(
    make: Callable[..., tuple[StepCost, Callable[[], None]]], shape: tuple[int, ...]
) -> tuple[StepCost, float]:
    """A step's work, and its CPU seconds."""
    work, step = make(*shape)
    return work, _cpu_seconds(step)


def _lookup() -> tuple[LinearCost, LinearCost]:
    """A pull and a push of a table in this process, at two sizes."""
    world = ShardedTables(_TABLE, seed=_SEED)
    pulls, pushes = [], []
    steps = itertools.count(1)
    for keys in (200, 5000):
        ids, grads = torch.arange(keys), torch.ones(keys, _DIM)
        pulls.append((keys, _cpu_seconds(lambda w=ids: world.pull("item", w))))
        pushes.append((keys, _cpu_seconds(lambda w=ids, g=grads: world.push("item", w, g, next(steps)))))
    return line(pulls), line(pushes)


def _factors(points_of: Points) -> str:
    return "; ".join(
        f"{kind} {', '.join(f'{count:g}: {factor:.2f}x' for count, factor in points) or 'one core'}"
        for kind, points in points_of.items()
    )


def _told(rates: UnitCosts) -> str:
    flops = f"{1e-9 / rates.flop_s:.3g} GFLOP/s" if rates.flop_s else "flops free"
    traffic = f"{1e-9 / rates.byte_s:.3g} GB/s" if rates.byte_s else "bytes free"
    return f"{rates.step_s * 1e3:.3g} ms a step, {rates.launch_s * 1e6:.3g} us a launch, {flops}, {traffic}"

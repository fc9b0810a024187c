"""Group calls against the same calls written by hand in Ray, interleaved, with the same actor work on both sides.

The hand-written side is one plain actor for each rank and `ray.get` of one call each; for the sharded echo it slices,
sends and concatenates. A second hand-written group (A/A) shows the ratio that noise alone causes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.timing import LapTimer, measure_in_turns

_WORLD = 4
_ROUNDS, _CALLS = 40, 25
_BIG = 8 << 20


def bench_dispatch() -> dict[str, Any]:
    """Return ratios of medians over interleaved rounds, A/A noise, puts of a replicated argument, and controller memory."""
    import ray
    import torch

    from nonet.bench.cluster.dispatch_roles import Echo, measure_reference_growth, start_plain_actors
    from nonet.bench.cluster.startup_group import bench_startup_group
    from nonet.workers.runtime import Replicate, Shard, WorkerGroup, ensure_ray

    torch.set_num_threads(1)
    ensure_ray()
    ours = WorkerGroup(Echo, workers=_WORLD, cpus=0.1, threads=0)
    hand, again = start_plain_actors(_WORLD), start_plain_actors(_WORLD)
    ours.hosts.wait_until_ready()
    ray.get([actor.nop.remote() for actor in (*hand, *again)])

    def call_by_hand(actors: list[Any], payload: Any, join: Callable) -> Callable[[], Any]:
        size = len(payload) // _WORLD
        return lambda: join(
            ray.get([a.echo.remote(payload[i * size : (i + 1) * size]) for i, a in enumerate(actors)])
        )

    numbers = list(range(128))
    tensor = torch.arange(128)
    table = _make_table(128)
    cases: dict[str, tuple[Callable, Callable, Callable]] = {
        "bare call": (
            lambda: ours.nop().get(),
            lambda: ray.get([a.nop.remote() for a in hand]),
            lambda: ray.get([a.nop.remote() for a in again]),
        )
    }
    for name, payload, join in (
        ("1 KB list", numbers, lambda parts: [row for part in parts for row in part]),
        ("1 KB tensor", tensor, torch.cat),
        ("1 KB Arrow table", table, _concat),
    ):
        cases[f"sharded echo, {name}"] = (
            lambda payload=payload: ours.echo(Shard(payload)).get(),
            call_by_hand(hand, payload, join),
            call_by_hand(again, payload, join),
        )
    rows = [{"call": name, **_compare_sides(*sides)} for name, sides in cases.items()]
    puts = _count_puts(lambda: ours.size(Replicate(np.zeros(_BIG, np.uint8))).get())
    grown = measure_reference_growth(ours)
    ours.stop()
    for actor in (*hand, *again):
        ray.kill(actor)
    event = _measure_event_us()
    rows.append({"trace and metrics": "one event", "us": event})
    rows.append({"replicated 8 MiB to 4 workers": "puts", "count": puts})
    rows.append({"1 GiB by reference": "USS growth, MiB", "mib": grown / 2**20})
    started = bench_startup_group()
    rows += started["rows"]
    ratio = {row["call"]: row["ratio"] for row in rows if "ratio" in row} | started["ratio"]
    return {
        "rows": rows,
        "ratio": ratio
        | {"trace and metrics, us an event": event, "puts": puts, "USS growth, MiB": grown / 2**20},
    }


def _compare_sides(*sides: Callable[[], Any]) -> dict[str, float]:
    """Return the medians of `ours`, `hand` and `hand again` in microseconds for each call; the order rotates every round."""

    def block(side: Callable[[], Any]) -> Callable[[], None]:
        def run_calls() -> None:
            for _ in range(_CALLS):
                side()

        return run_calls

    blocks = {name: block(side) for name, side in zip(("ours", "hand", "again"), sides, strict=True)}
    times = measure_in_turns(blocks, _ROUNDS, warm=1, rotate=True)
    ours, hand, again = (timer.compute_median_us() / _CALLS for timer in times.values())
    return {"ours_us": ours, "hand_us": hand, "ratio": ours / hand, "A/A": again / hand}


def _measure_event_us() -> float:
    """Measure the microseconds of recording a call.

    A call has a span and Ray metrics in the worker, and a line of the trace in the controller.
    """
    from nonet.controller.record import ChromeTrace
    from nonet.workers.runtime import SpanRecorder

    spans, timer, result = SpanRecorder(), LapTimer(), np.zeros(8)
    with tempfile.TemporaryDirectory() as folder:
        trace = ChromeTrace(Path(folder) / "trace.json")
        for _ in range(200):
            with timer:
                for _ in range(50):
                    spans.add("bench.event", time.time(), time.time(), result)
                for name, start, end, size in spans.take():
                    trace.add("bench-0", name, start, end, bytes=size)
        trace.close()
    return timer.compute_median_us() / 50


def _count_puts(call: Callable[[], Any]) -> int:
    """Count the calls of `ray.put` during a call."""
    import ray

    puts, real = [], ray.put

    def put(*args: Any, **kwargs: Any) -> Any:
        puts.append(1)
        return real(*args, **kwargs)

    ray.put = put
    try:
        call()
    finally:
        ray.put = real
    return len(puts)


def _make_table(rows: int) -> Any:
    import pyarrow as pa

    return pa.table({"x": np.arange(rows)})


def _concat(parts: list[Any]) -> Any:
    import pyarrow as pa

    return pa.concat_tables(parts)

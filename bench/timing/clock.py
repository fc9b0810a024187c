"""Timing of calls in turn: two protocols, wall and thread CPU time, medians.

Ratios are of thread CPU time: everything here runs on one thread, and on a busy machine the wall clock includes other
processes (which favours the shorter call: a time slice is 3 ms). The cost of reading the clocks is subtracted.

*isolated*: each contender runs a block of batches twice, blocks in turn; the first pass loads its rows into the
cache, the second is timed. *interleaved*: single calls in turn, each on its own table, so that each call finds the
cache full of the others' rows. Both protocols give each contender its batches in the same order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nonet.timing import LapTimer, measure_in_turns

Call = Callable[[int], Any]  # batch number -> whatever

_BLOCK = 12


def time_isolated(calls: Mapping[str, Call], batches: int, rounds: int = 6) -> dict[str, LapTimer]:
    """Time blocks of calls in turn; each block runs once as a warm-up and once timed.

    Args:
        calls: Contenders by name; each takes a batch number.
        batches: Number of batches.
        rounds: Number of blocks of each contender.
    """
    times = {name: LapTimer() for name in calls}
    for turn in range(rounds):
        block = [(turn * _BLOCK + at) % batches for at in range(_BLOCK)]
        for name, call in calls.items():
            for batch in block:
                call(batch)
            for batch in block:
                times[name].measure(call, batch)
    return times


def time_interleaved(calls: Mapping[str, Call], batches: int, turns: int = 72) -> dict[str, LapTimer]:
    """Time single calls in turn; each contender gets the batches in an order shifted by its position.

    Args:
        calls: Contenders by name; each takes a batch number.
        batches: Number of batches.
        turns: Number of timed calls of each contender.
    """
    times = {name: LapTimer() for name in calls}
    for turn in range(turns + 3):
        for place, (name, call) in enumerate(calls.items()):
            batch = (turn + place * 7) % batches
            if turn < 3:
                call(batch)
            else:
                times[name].measure(call, batch)
    return times


def compute_ratios(times: Mapping[str, LapTimer], pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return the ratios of median CPU times, ours / theirs, for the pairs of which both sides ran."""
    return {
        f"{ours} / {theirs}": times[ours].compute_cpu_us() / times[theirs].compute_cpu_us()
        for ours, theirs in pairs
        if ours in times and theirs in times
    }


def summarise_ratios(label: str, ratios: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean and the minimum of ratios, {} for none."""
    if not ratios:
        return {}
    return {f"{label}, geometric mean": statistics.geometric_mean(ratios), f"{label}, least": min(ratios)}


def measure_milliseconds(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each step, timer in turn: wall time, and CPU time of this thread as name + " CPU"."""
    times = measure_in_turns(steps, rounds)
    wall = {name: 1e3 * timer.compute_median_s() for name, timer in times.items()}
    return wall | {f"{name} CPU": 1e3 * statistics.median(timer.cpu_s) for name, timer in times.items()}

"""Times the calls of several contenders in turn, by two protocols; wall and thread CPU time, medians.

Ratios are of thread CPU time: everything here runs on one thread, and on a busy machine the wall clock includes other
processes (which favours the shorter call: a time slice is 3 ms). The cost of reading the clocks is subtracted.

*isolated*: the contenders take turns with blocks of batches. Each runs a block twice: the first pass loads its rows into the
cache, the second is timed. *interleaved*: the contenders take turns with single calls, each on its own table, so that each call
finds the cache full of the others' rows. In both protocols, each contender gets its batches in the same order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nonet.bench.timing.laps import LapTimer, measure_in_turns

Call = Callable[[int], Any]  # takes a batch number

_BLOCK_BATCHES = 12  # number of batches of a block
_WARM_UP_TURNS, _SHIFT = (
    3,
    7,
)  # of the interleaved protocol: turns that are not timed, and batches between two contenders


def time_isolated(calls: Mapping[str, Call], batches: int, rounds: int = 6) -> dict[str, LapTimer]:
    """Time blocks of calls in turn; each block runs once as a warm-up and once timed.

    Args:
        calls: Contenders by name; each takes a batch number.
        batches: Number of batches.
        rounds: Number of blocks of each contender.
    """
    times = {name: LapTimer() for name in calls}
    for turn in range(rounds):
        block = [(turn * _BLOCK_BATCHES + i) % batches for i in range(_BLOCK_BATCHES)]
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
    for turn in range(turns + _WARM_UP_TURNS):
        for index, (name, call) in enumerate(calls.items()):
            batch = (turn + index * _SHIFT) % batches
            if turn < _WARM_UP_TURNS:
                call(batch)
            else:
                times[name].measure(call, batch)
    return times


def compute_ratios(times: Mapping[str, LapTimer], pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return the ratios of median CPU times, first / second, of those pairs of names for which both contenders ran."""
    return {
        f"{ours} / {theirs}": times[ours].compute_cpu_us() / times[theirs].compute_cpu_us()
        for ours, theirs in pairs
        if ours in times and theirs in times
    }


def summarise_ratios(label: str, ratios: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean and the minimum of ratios by name, which begins with the label; {} if there are no ratios."""
    if not ratios:
        return {}
    return {f"{label}, geometric mean": statistics.geometric_mean(ratios), f"{label}, least": min(ratios)}


def measure_milliseconds(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of steps timed in turn: wall time by name, and CPU time of this thread by name + " CPU"."""
    times = measure_in_turns(steps, rounds)
    wall = {name: 1e3 * timer.compute_median_s() for name, timer in times.items()}
    return wall | {f"{name} CPU": 1e3 * statistics.median(timer.cpu_s) for name, timer in times.items()}

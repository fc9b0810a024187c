"""Timing calls that take turns: two protocols, wall and thread CPU time, medians.

Ratios are of thread CPU time: everything here runs on one thread, and on a busy machine the wall measures who else wanted
the core (it flatters the shorter call: a time slice is 3 ms). What reading the clocks costs is taken off.

*isolated*: each contender runs a block of batches twice on its own, blocks in turn; the first pass brings its rows into
the cache, the second is timed. *interleaved*: call by call in turn, each on its own table, so that each finds the cache
full of the others' rows. Both take each contender's batches in the same order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nonet.timing import LapTimer, measure_in_turns

Call = Callable[[int], Any]  # batch number -> whatever

_BLOCK = 12


def time_isolated(calls: Mapping[str, Call], batches: int, rounds: int = 6) -> dict[str, LapTimer]:
    """Blocks of calls in turn; each block runs once to warm up, which does not count, and once more."""
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
    """Call by call in turn; every contender sees the batches in an order shifted by its place."""
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
    """ours / theirs, medians of CPU time, for the pairs whose both sides ran."""
    return {
        f"{ours} / {theirs}": times[ours].compute_cpu_us() / times[theirs].compute_cpu_us()
        for ours, theirs in pairs
        if ours in times and theirs in times
    }


def summarise_ratios(label: str, ratios: Sequence[float]) -> dict[str, float]:
    """The ratios' geometric mean and the least; nothing of none."""
    if not ratios:
        return {}
    return {f"{label}, geometric mean": statistics.geometric_mean(ratios), f"{label}, least": min(ratios)}


def measure_milliseconds(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turn, by the wall and (name + " CPU") of this thread, which does all the work."""
    times = measure_in_turns(steps, rounds)
    wall = {name: 1e3 * taken.compute_median_s() for name, taken in times.items()}
    return wall | {f"{name} CPU": 1e3 * statistics.median(taken.cpu_s) for name, taken in times.items()}

"""Timing calls that take turns: two protocols, wall and thread CPU time, medians.

Ratios are of thread CPU time: everything here runs on one thread, and on a busy machine the wall measures who else wanted
the core (it flatters the shorter call: a time slice is 3 ms). What reading the clocks costs, half a microsecond, is taken off.

*isolated*: each contender runs a block of batches twice on its own, blocks in turn; the first pass brings its rows into
the cache, the second is timed. *interleaved*: call by call in turn, each on its own table, so that each finds the cache
full of the others' rows. Both take each contender's batches in the same order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Call = Callable[[int], Any]  # batch number -> whatever

_BLOCK = 12


@dataclass
class Times:
    """Seconds of each call, by the wall and by this thread's CPU."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def measure(self, call: Call, batch: int) -> None:
        """One call."""
        cpu, wall = time.thread_time(), time.perf_counter()
        call(batch)
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.thread_time() - cpu)

    def median_us(self) -> float:
        """Median microseconds by the wall."""
        return 1e6 * statistics.median(self.wall_s)

    def cpu_us(self) -> float:
        """Median microseconds of this thread's CPU time, less those of a call that does nothing."""
        return 1e6 * (statistics.median(self.cpu_s) - _nothing_s())

    def row(self) -> dict[str, float]:
        """Median and p10 by the wall, median by CPU, in microseconds."""
        ordered = sorted(self.wall_s)
        return {
            "median_us": self.median_us(),
            "p10_us": 1e6 * ordered[len(ordered) // 10],
            "cpu_us": self.cpu_us(),
        }


@cache
def _nothing_s() -> float:
    """CPU seconds that `measure` finds for a call that does nothing."""
    nothing = Times()
    for batch in range(2000):
        nothing.measure(lambda batch: None, batch)
    return statistics.median(nothing.cpu_s)


def isolated(calls: Mapping[str, Call], batches: int, rounds: int = 6) -> dict[str, Times]:
    """Blocks of calls in turn; each block runs once to warm up, which does not count, and once more."""
    times = {name: Times() for name in calls}
    for turn in range(rounds):
        block = [(turn * _BLOCK + at) % batches for at in range(_BLOCK)]
        for name, call in calls.items():
            for batch in block:
                call(batch)
            for batch in block:
                times[name].measure(call, batch)
    return times


def interleaved(calls: Mapping[str, Call], batches: int, turns: int = 72) -> dict[str, Times]:
    """Call by call in turn; every contender sees the batches in an order shifted by its place."""
    times = {name: Times() for name in calls}
    for turn in range(turns + 3):
        for place, (name, call) in enumerate(calls.items()):
            batch = (turn + place * 7) % batches
            if turn < 3:
                call(batch)
            else:
                times[name].measure(call, batch)
    return times


def ratios(times: Mapping[str, Times], pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """ours / theirs, medians of CPU time, for the pairs whose both sides ran."""
    return {
        f"{ours} / {theirs}": times[ours].cpu_us() / times[theirs].cpu_us()
        for ours, theirs in pairs
        if ours in times and theirs in times
    }

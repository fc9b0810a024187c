"""Timing calls that take turns: two protocols, wall and thread CPU time, medians.

*isolated*: each contender runs a block of calls on its own, its rows warm in the cache, blocks in turn. *interleaved*:
call by call in turn, each on its own table, so that each finds the cache full of the others' rows. Both take each
contender's batches in the same order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

    def row(self) -> dict[str, float]:
        """Median and p10 by the wall, median by CPU, in microseconds."""
        ordered = sorted(self.wall_s)
        return {
            "median_us": self.median_us(),
            "p10_us": 1e6 * ordered[len(ordered) // 10],
            "cpu_us": 1e6 * statistics.median(self.cpu_s),
        }


def isolated(calls: Mapping[str, Call], batches: int, rounds: int = 6) -> dict[str, Times]:
    """Blocks of calls in turn; the first three of a block warm up and do not count."""
    times = {name: Times() for name in calls}
    for turn in range(rounds):
        for name, call in calls.items():
            for at in range(_BLOCK + 3):
                batch = (turn * _BLOCK + at) % batches
                if at < 3:
                    call(batch)
                else:
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
    """ours / theirs, medians, for the pairs whose both sides ran."""
    return {
        f"{ours} / {theirs}": times[ours].median_us() / times[theirs].median_us()
        for ours, theirs in pairs
        if ours in times and theirs in times
    }

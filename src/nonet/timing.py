"""Timing by the wall and by CPU time: laps, medians, and calls that take turns.

What reading the clocks costs, half a microsecond, is in every lap; `Times.cpu_us` takes it off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Clock = Callable[[], float]


@dataclass
class Times:
    """Seconds of each lap, by the wall and by `cpu`, a clock of this thread or process: `with times: work()` is a lap."""

    cpu: Clock = time.thread_time
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def __enter__(self) -> Times:
        self._began = self.cpu(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = time.perf_counter(), self.cpu()
        self.cpu_s.append(cpu - self._began[0])
        self.wall_s.append(wall - self._began[1])

    def measure(self, call: Callable[[int], Any], batch: int) -> None:
        """One call."""
        cpu, wall = self.cpu(), time.perf_counter()
        call(batch)
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(self.cpu() - cpu)

    def from_lap(self, first: int) -> Times:
        """These without the laps before `first`, which warmed up."""
        return Times(self.cpu, self.wall_s[first:], self.cpu_s[first:])

    @property
    def last_s(self) -> float:
        """Wall seconds of the last lap."""
        return self.wall_s[-1]

    def median_s(self) -> float:
        """Median seconds by the wall."""
        return statistics.median(self.wall_s)

    def median_us(self) -> float:
        """Median microseconds by the wall."""
        return 1e6 * self.median_s()

    def cpu_us(self) -> float:
        """Median microseconds of CPU time, less those of a call that does nothing."""
        return 1e6 * (statistics.median(self.cpu_s) - _nothing_s())

    def row(self) -> dict[str, float]:
        """Median and p10 by the wall, median by CPU, in microseconds."""
        ordered = sorted(self.wall_s)
        return {
            "median_us": self.median_us(),
            "p10_us": 1e6 * ordered[len(ordered) // 10],
            "cpu_us": self.cpu_us(),
        }


def median_s(work: Callable[[], Any], laps: int, clock: Clock = time.perf_counter) -> float:
    """Median seconds of a call by a clock; the first call warms up."""
    work()
    seconds = []
    for _ in range(laps):
        began = clock()
        work()
        seconds.append(clock() - began)
    return statistics.median(seconds)


def in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, *, warm: int = 0, rotate: bool = False
) -> dict[str, Times]:
    """Each call once a round, so that all meet the same noise; `rotate`: another one begins every round.

    The first `warm` rounds don't count.
    """
    times, names = {name: Times() for name in calls}, list(calls)
    for turn in range(-warm, rounds):
        first = turn % len(names) if rotate else 0
        for name in names[first:] + names[:first]:
            with times[name]:
                calls[name]()
    return {name: taken.from_lap(warm) for name, taken in times.items()}


@cache
def _nothing_s() -> float:
    """CPU seconds that `measure` finds for a call that does nothing."""
    nothing = Times()
    for batch in range(2000):
        nothing.measure(lambda batch: None, batch)
    return statistics.median(nothing.cpu_s)

"""Measurement of wall and CPU time: laps, medians and interleaved measurements.

Each lap includes the cost of reading the clocks, about half a microsecond; `LapTimer.compute_cpu_us` subtracts it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Clock = Callable[[], float]  # returns seconds


@dataclass
class LapTimer:
    """A timer that records the wall and CPU seconds of each lap; `with timer: work()` measures one lap.

    Attributes:
        cpu: The CPU clock, of this thread or process.
        wall_s: Wall seconds of each lap.
        cpu_s: CPU seconds of each lap.
    """

    cpu: Clock = time.thread_time
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def __enter__(self) -> LapTimer:
        self._began = self.cpu(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = time.perf_counter(), self.cpu()
        self.cpu_s.append(cpu - self._began[0])
        self.wall_s.append(wall - self._began[1])

    def measure(self, call: Callable[[int], Any], batch: int) -> None:
        """Call `call(batch)` and record the call as a lap."""
        cpu, wall = self.cpu(), time.perf_counter()
        call(batch)
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(self.cpu() - cpu)

    def drop_laps_before(self, first: int) -> LapTimer:
        """Return a timer with the laps from index `first` on, without the warm-up laps before it."""
        return LapTimer(self.cpu, self.wall_s[first:], self.cpu_s[first:])

    @property
    def last_s(self) -> float:
        """Wall seconds of the last lap."""
        return self.wall_s[-1]

    def compute_median_s(self) -> float:
        """Return the median wall time in seconds."""
        return statistics.median(self.wall_s)

    def compute_median_us(self) -> float:
        """Return the median wall time in microseconds."""
        return 1e6 * self.compute_median_s()

    def compute_cpu_us(self) -> float:
        """Return the median CPU time in microseconds, minus the median of laps of a call that does nothing."""
        return 1e6 * (statistics.median(self.cpu_s) - _measure_overhead_s())

    def to_row(self) -> dict[str, float]:
        """Return the median and 10th percentile of wall time and the median CPU time, as `median_us`, `p10_us` and `cpu_us`."""
        ordered = sorted(self.wall_s)
        return {
            "median_us": self.compute_median_us(),
            "p10_us": 1e6 * ordered[len(ordered) // 10],
            "cpu_us": self.compute_cpu_us(),
        }


def measure_in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, *, warm: int = 0, rotate: bool = False
) -> dict[str, LapTimer]:
    """Measure several calls alternately, so that all are exposed to the same noise.

    Args:
        calls: The calls by name.
        rounds: The number of measured rounds; each round runs every call once.
        warm: The number of warm-up rounds before the measured ones.
        rotate: Whether a different call is the first in each round.

    Returns:
        The timer of each call by name, with `rounds` laps.
    """
    timers, names = {name: LapTimer() for name in calls}, list(calls)
    for round_number in range(-warm, rounds):
        first = round_number % len(names) if rotate else 0
        for name in names[first:] + names[:first]:
            with timers[name]:
                calls[name]()
    return {name: timer.drop_laps_before(warm) for name, timer in timers.items()}


@cache
def _measure_overhead_s() -> float:
    """Return the median CPU seconds that `LapTimer.measure` records for a call that does nothing."""
    timer = LapTimer()
    for batch in range(2000):  # enough for a stable median, in about a millisecond
        timer.measure(lambda batch: None, batch)
    return statistics.median(timer.cpu_s)

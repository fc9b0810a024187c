"""Progress: how far a preparation is, told at most once a second: rows a second and what is left by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

Tell = Callable[["Report"], None]


@dataclass(frozen=True, slots=True)
class Report:
    """phase; rows done of all it goes over, rows a second, and seconds that are left by that."""

    phase: str
    rows: int
    of: int
    rows_s: float
    left_s: float

    def text(self) -> str:
        """For people. A phase that goes over its rows several times says how often it has."""
        if self.rows > self.of > 0:
            return f"{self.phase}: pass {-(-self.rows // self.of)} of all {self.of:,} rows, {self.rows_s:,.0f} rows/s"
        share = self.rows / max(1, self.of)
        done = f"{self.phase}: {self.rows:,} of {self.of:,} rows ({share:.0%})"
        return f"{done}, {self.rows_s:,.0f} rows/s, {self.left_s:.0f} s left"


class Progress:
    """Adds up rows from several threads. seconds: of each phase that has ended; cpu_s: of cores in each."""

    def __init__(self, tell: Tell | None = None, every_s: float = 1.0):
        self._tell, self._every_s = tell, every_s
        self._lock = threading.Lock()
        self._phase, self._of, self._rows = "", 0, 0
        self._began = self._told = time.monotonic()
        self._thread_s = time.thread_time()
        self.seconds: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}

    def phase(self, name: str, rows: int) -> None:
        """The next phase goes over so many rows."""
        self.end()
        self._phase, self._of, self._rows = name, rows, 0
        self._began = self._told = time.monotonic()
        self._thread_s = time.thread_time()

    def add(self, rows: int, cpu_s: float | None = None) -> None:
        """So many more are done, in so many seconds of a core; by default those of this thread since the phase began."""
        with self._lock:
            self._rows += rows
            if cpu_s is None:
                cpu_s = time.thread_time() - self._thread_s
                self._thread_s += cpu_s
            self.cpu_s[self._phase] = self.cpu_s.get(self._phase, 0.0) + cpu_s
            now = time.monotonic()
            if self._tell is None or now - self._told < self._every_s:
                return
            self._told = now
            rate = self._rows / max(1e-9, now - self._began)
            report = Report(self._phase, self._rows, self._of, rate, max(0, self._of - self._rows) / rate)
        self._tell(report)

    def end(self) -> None:
        """The phase is over."""
        if self._phase:
            self.seconds[self._phase] = round(time.monotonic() - self._began, 3)
        self._phase = ""

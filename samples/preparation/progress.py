"""Counts the rows that a preparation has processed and reports rows per second and the estimated time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

ReportProgress = Callable[["PreparationReport"], None]


@dataclass(frozen=True, slots=True)
class PreparationReport:
    """The progress of one phase.

    Attributes:
        phase: Name of the phase.
        rows: Number of rows processed. A phase with several passes counts a row once per pass.
        of: Number of rows of one pass of the phase.
        rows_s: Processed rows per second.
        left_s: Estimated number of seconds until the phase ends.
    """

    phase: str
    rows: int
    of: int
    rows_s: float
    left_s: float

    def format_line(self) -> str:
        """Format the report as one line. From the second pass over the rows on, the line has the number of the pass."""
        if self.rows > self.of > 0:
            return f"{self.phase}: pass {-(-self.rows // self.of)} of all {self.of:,} rows, {self.rows_s:,.0f} rows/s"
        share = self.rows / max(1, self.of)
        done = f"{self.phase}: {self.rows:,} of {self.of:,} rows ({share:.0%})"
        return f"{done}, {self.rows_s:,.0f} rows/s, {self.left_s:.0f} s left"


class PreparationProgress:
    """Counts the processed rows of all threads and reports them at regular intervals.

    Args:
        report_progress: Called with each report; None for no reports.
        every_s: Minimum number of seconds between two reports.

    Attributes:
        seconds: Elapsed seconds of each phase that has ended.
        cpu_s: CPU seconds of each phase.
    """

    def __init__(self, report_progress: ReportProgress | None = None, every_s: float = 1.0):
        self._report, self._every_s = report_progress, every_s
        self._lock = threading.Lock()
        self._phase, self._pass_rows, self._rows = "", 0, 0
        self._began = self._last_report = time.monotonic()
        self._counted_thread_s = (
            time.thread_time()
        )  # CPU time of the calling thread up to the last `add_rows`
        self.seconds: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}

    def start_phase(self, name: str, rows: int) -> None:
        """End the current phase and start the next one.

        Args:
            name: Name of the phase.
            rows: Number of rows that one pass of the phase processes.
        """
        self.end_phase()
        self._phase, self._pass_rows, self._rows = name, rows, 0
        self._began = self._last_report = time.monotonic()
        self._counted_thread_s = time.thread_time()

    def add_rows(self, rows: int, cpu_s: float | None = None) -> None:
        """Add processed rows and the CPU time that they took.

        Args:
            rows: Number of rows.
            cpu_s: CPU seconds; None for the calling thread's CPU time since the last such call or the start of the phase.
        """
        with self._lock:
            self._rows += rows
            if cpu_s is None:
                cpu_s = time.thread_time() - self._counted_thread_s
                self._counted_thread_s += cpu_s
            self.cpu_s[self._phase] = self.cpu_s.get(self._phase, 0.0) + cpu_s
            now = time.monotonic()
            if self._report is None or now - self._last_report < self._every_s:
                return
            self._last_report = now
            rows_s = self._rows / max(1e-9, now - self._began)
            left_s = max(0, self._pass_rows - self._rows) / rows_s
            report = PreparationReport(self._phase, self._rows, self._pass_rows, rows_s, left_s)
        self._report(report)

    def end_phase(self) -> None:
        """End the current phase and record its duration."""
        if self._phase:
            self.seconds[self._phase] = round(time.monotonic() - self._began, 3)
        self._phase = ""

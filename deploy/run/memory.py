"""The memory that a run uses: the proportional set size (PSS) of this process and all its descendants.

PSS divides shared pages among the processes that share them, so its sum over processes is the memory that
they use together. A sum of resident set sizes would count Ray's shared pages once per process.
"""

from __future__ import annotations

import os
import threading

import psutil


class PeakMemory:
    """Samples the PSS of the process tree in a thread while the context is open; `peak_bytes` is the largest so far."""

    def __init__(self, interval_s: float = 1.0):
        self.peak_bytes = 0
        self._interval_s, self._stopped = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)

    def _sample(self) -> None:
        """Update `peak_bytes` every `interval_s` seconds until the context is left."""
        while not self._stopped.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, sum_pss_bytes(os.getpid()))


def sum_pss_bytes(root_pid: int) -> int:
    """Return the sum of PSS in bytes over a process and its descendants; 0 if the system does not report it."""
    process = psutil.Process(root_pid)
    return sum(map(_read_pss_bytes, [process, *process.children(recursive=True)]))


def _read_pss_bytes(process: psutil.Process) -> int:
    """Return the PSS of one process in bytes; 0 if it cannot be read."""
    try:
        return getattr(process.memory_full_info(), "pss", 0)
    except psutil.Error:  # the process has ended or may not be read
        return 0

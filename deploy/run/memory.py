"""Memory of a run: the proportional set size (PSS) of this process and all its descendants, sampled.

PSS divides shared pages among those who share them, so its sum over processes is what they occupy together; the sum of
resident sizes would count Ray's shared pages once a process.
"""

from __future__ import annotations

import os
import threading

import psutil


class PeakMemory:
    """Samples in a thread between `with` and its end; `peak_bytes` is the highest sum seen."""

    def __init__(self, interval_s: float = 1.0):
        self.peak_bytes = 0
        self._interval_s, self._over = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)

    def _sample(self) -> None:
        while not self._over.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, tree_pss_bytes(os.getpid()))


def tree_pss_bytes(root: int) -> int:
    """Sum of PSS over a process and its descendants, bytes; 0 where the system does not tell it."""
    process = psutil.Process(root)
    return sum(map(_pss_bytes, [process, *process.children(recursive=True)]))


def _pss_bytes(process: psutil.Process) -> int:
    try:
        return getattr(process.memory_full_info(), "pss", 0)
    except psutil.Error:  # gone, or not ours to read
        return 0

"""The memory that a run uses: the proportional set size (PSS) of this process and all its descendants.

PSS divides shared pages among the processes that share them, so its sum over processes is the memory that
they use together. A sum of resident set sizes would count Ray's shared pages once per process.
"""

from __future__ import annotations

import threading

import psutil

_GROWTH = (
    1.01  # of the sum of resident set sizes since the last reading of PSS, from which on it is read again
)
_END_PATIENCE_S = 5.0  # for the last reading


class PeakMemory:
    """Samples the PSS of the process tree in a thread while the context is open; `peak_bytes` is the largest so far.

    To read PSS, the kernel walks all page tables (0.15 s for a small run). It is therefore read only when the sum of
    resident set sizes, which costs little, is 1 % above that of the last reading.
    """

    def __init__(self, interval_s: float = 1.0):
        self.peak_bytes = 0
        self._interval_s, self._stopped = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(_END_PATIENCE_S)

    def _sample(self) -> None:
        """Update `peak_bytes` every `interval_s` seconds until the context is left."""
        largest_resident_bytes = 0.0
        while not self._stopped.wait(self._interval_s):
            processes = _list_processes()
            resident_bytes = sum(map(_read_resident_bytes, processes))
            if resident_bytes > largest_resident_bytes * _GROWTH:
                largest_resident_bytes = resident_bytes
                self.peak_bytes = max(self.peak_bytes, sum(map(_read_pss_bytes, processes)))


def _list_processes() -> list[psutil.Process]:
    """Return this process and all its descendants."""
    process = psutil.Process()
    return [process, *process.children(recursive=True)]


def _read_resident_bytes(process: psutil.Process) -> int:
    """Return the resident set size of one process in bytes; 0 if it cannot be read."""
    try:
        return process.memory_info().rss
    except psutil.Error:  # the process has ended or may not be read
        return 0


def _read_pss_bytes(process: psutil.Process) -> int:
    """Return the PSS of one process in bytes; 0 if it cannot be read."""
    try:
        return getattr(process.memory_full_info(), "pss", 0)
    except psutil.Error:  # the process has ended or may not be read
        return 0

"""Memory of a run: the proportional set size (PSS) of this process and all its descendants, sampled from /proc.

PSS divides shared pages among those who share them, so its sum over processes is what they occupy together; the sum of
resident sizes would count Ray's shared pages once a process.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


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
    """Sum of PSS over a process and its descendants, bytes; 0 where /proc is not to be had."""
    return sum(map(_pss_bytes, [root, *_descendants(root)]))


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # gone, or not ours to read
        pass
    return 0

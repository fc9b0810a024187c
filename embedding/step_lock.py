"""The lock between training steps and whoever reads rows in the background: a step waits for one holder, never for a queue.

A thread that lets a lock go and takes it again at once usually gets it before one that sleeps on it wakes up, so a writer
of many short pieces could keep a step waiting for all of them. Here the background asks `patient`ly: not while a step waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOK_S = 1e-4  # a waiting step takes the lock within tens of microseconds of its release


class StepLock:
    """Re-entrant; `with lock:` is a step's way in, `with lock.patient():` that of the background."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting, self._count = 0, threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wait()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Hold it when no step waits for it."""
        while True:
            while self._waiting:
                time.sleep(_LOOK_S)
            self._lock.acquire()
            if not self._waiting:
                break
            self._lock.release()
        try:
            yield
        finally:
            self._lock.release()

    def _wait(self) -> None:
        with self._count:
            self._waiting += 1
        try:
            self._lock.acquire()
        finally:
            with self._count:
                self._waiting -= 1

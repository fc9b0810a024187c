"""Breaker: a service that fails again and again is left alone for a while, then tried by one request.

closed -> (failures in a row) -> open -> (pause) -> half open -> one request: closed again, or open again
"""

from __future__ import annotations

import threading
import time

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half open"


class Breaker:
    """failures: in a row, until it opens; pause_s: how long it stays open."""

    def __init__(self, failures: int = 5, pause_s: float = 2.0):
        self._most, self._pause_s = failures, pause_s
        self._failed, self._opened, self._trying = 0, 0.0, False
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """closed, open or half open."""
        if self._failed < self._most:
            return CLOSED
        return HALF_OPEN if self._trying else OPEN

    def allows(self, now: float | None = None) -> bool:
        """Whether a request may be made; after the pause one may, until it is known how it went."""
        now = time.monotonic() if now is None else now
        with self._lock:
            if self._failed < self._most:
                return True
            if now - self._opened < self._pause_s:
                return False
            self._opened, self._trying = (
                now,
                True,
            )  # one that never says how it went is tried again after another pause
            return True

    def went(self, well: bool, now: float | None = None) -> None:
        """How a request that was allowed went."""
        now = time.monotonic() if now is None else now
        with self._lock:
            self._trying = False
            if well:
                self._failed = 0
                return
            self._failed += 1
            if self._failed >= self._most:
                self._opened = now

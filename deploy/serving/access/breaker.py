"""The circuit breaker: after repeated failures a service gets no requests for a while, then one as a test.

closed -> (failures in a row) -> open -> (pause) -> half open -> one request: closed again, or open again
"""

from __future__ import annotations

import threading
import time

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half open"


class CircuitBreaker:
    """A circuit breaker.

    Args:
        failures: Failures in a row after which it opens.
        pause_s: Seconds for which it stays open.
    """

    def __init__(self, failures: int = 5, pause_s: float = 2.0):
        self._most, self._pause_s = failures, pause_s
        self._failed, self._opened, self._trying = 0, 0.0, False
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """The state: "closed", "open" or "half open"."""
        if self._failed < self._most:
            return CLOSED
        return HALF_OPEN if self._trying else OPEN

    def allow_request(self, now: float | None = None) -> bool:
        """Return whether a request may be made.

        After the pause one request is allowed until its outcome is known.

        Args:
            now: The time in monotonic seconds, by default the current one.
        """
        now = time.monotonic() if now is None else now
        with self._lock:
            if self._failed < self._most:
                return True
            if now - self._opened < self._pause_s:
                return False
            self._opened, self._trying = (
                now,
                True,
            )  # if the outcome is never recorded, another request is allowed after another pause
            return True

    def record_outcome(self, succeeded: bool, now: float | None = None) -> None:
        """Record the outcome of a request that was allowed.

        Args:
            succeeded: Whether it succeeded.
            now: The time in monotonic seconds, by default the current one.
        """
        now = time.monotonic() if now is None else now
        with self._lock:
            self._trying = False
            if succeeded:
                self._failed = 0
                return
            self._failed += 1
            if self._failed >= self._most:
                self._opened = now

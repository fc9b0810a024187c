"""The circuit breaker: after repeated failures a service gets no requests for a while, then one as a test.

The states: closed (requests are made), open after several failures in a row (none are made), and half open after a
pause (one request is made: if it succeeds, the breaker is closed again, else open).
"""

from __future__ import annotations

import threading
import time

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half open"


class CircuitBreaker:
    """Decides whether requests to a service are made, from the outcomes of earlier requests.

    Args:
        failures: Number of successive failures after which the breaker opens.
        pause_s: Seconds for which the breaker stays open.
    """

    def __init__(self, failures: int = 5, pause_s: float = 2.0):
        self._max_failures, self._pause_s = failures, pause_s
        self._failures, self._is_testing = 0, False
        self._pause_start_s = 0.0  # in monotonic seconds
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """The state: "closed", "open" or "half open"."""
        if self._failures < self._max_failures:
            return CLOSED
        return HALF_OPEN if self._is_testing else OPEN

    def allow_request(self, now: float | None = None) -> bool:
        """Return whether a request may be made.

        After the pause one request is allowed until its outcome is known.

        Args:
            now: The time in monotonic seconds, by default the current one.
        """
        now = time.monotonic() if now is None else now
        with self._lock:
            if self._failures < self._max_failures:
                return True
            if now - self._pause_start_s < self._pause_s:
                return False
            # The pause begins again: if the outcome is never recorded, another request is allowed after it.
            self._pause_start_s, self._is_testing = now, True
            return True

    def record_outcome(self, succeeded: bool, now: float | None = None) -> None:
        """Record the outcome of a request that was allowed.

        Args:
            succeeded: Whether it succeeded.
            now: The time in monotonic seconds, by default the current one.
        """
        now = time.monotonic() if now is None else now
        with self._lock:
            self._is_testing = False
            if succeeded:
                self._failures = 0
                return
            self._failures += 1
            if self._failures >= self._max_failures:
                self._pause_start_s = now

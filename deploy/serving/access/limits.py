"""Rate limits: requests per second of each caller, counted by a token bucket.

A bucket has `burst` tokens and is refilled at `rate`; a request takes one token. Only the most recent
callers have a bucket, so memory is bounded. A caller whose bucket was dropped starts with a full one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

_MAX_CALLERS = 10_000


class RateLimiter:
    """Token buckets by caller.

    Args:
        rate: Requests per second of a caller; None for no limit.
        burst: The largest number of requests at once, by default that of one second; at least 1.
    """

    def __init__(self, rate: float | None = None, burst: float | None = None):
        self._rate = rate
        self._burst = max(1.0, burst if burst is not None else rate or 1.0)
        # By caller, the most recent last: the number of tokens, and the time at which that was computed.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take_token(self, caller: str, now: float | None = None) -> float:
        """Take a token from the bucket of a caller.

        Args:
            caller: The caller's key.
            now: The time in monotonic seconds, by default the current one.

        Returns:
            0 if the request is allowed, else the seconds to wait.
        """
        if self._rate is None:
            return 0.0
        now = time.monotonic() if now is None else now
        with self._lock:
            tokens, computed_at = self._buckets.pop(caller, (self._burst, now))
            tokens = min(self._burst, tokens + (now - computed_at) * self._rate)
            allowed = tokens >= 1
            self._buckets[caller] = (tokens - 1 if allowed else tokens, now)
            while len(self._buckets) > _MAX_CALLERS:
                self._buckets.popitem(last=False)
            return 0.0 if allowed else (1 - tokens) / self._rate

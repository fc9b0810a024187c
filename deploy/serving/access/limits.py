"""Limits: how many requests a second a caller may make, by a bucket of tokens each.

A bucket holds `burst` tokens and fills at `rate`; a request takes one. Callers that have not asked for a while are forgotten,
for their bucket is full again: memory is bounded by who asks now.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

_MOST_CALLERS = 10_000


class Limits:
    """rate: requests a second and caller, None for no limit; burst: how many at once."""

    def __init__(self, rate: float | None = None, burst: float | None = None):
        self._rate = rate
        self._burst = max(1.0, burst if burst is not None else rate or 1.0)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when they were counted
        self._lock = threading.Lock()

    def take(self, caller: str, now: float | None = None) -> float:
        """0 where the caller may go on, else the seconds until it may."""
        if self._rate is None:
            return 0.0
        now = time.monotonic() if now is None else now
        with self._lock:
            tokens, then = self._buckets.pop(caller, (self._burst, now))
            tokens = min(self._burst, tokens + (now - then) * self._rate)
            allowed = tokens >= 1
            self._buckets[caller] = (tokens - 1 if allowed else tokens, now)
            while len(self._buckets) > _MOST_CALLERS:
                self._buckets.popitem(last=False)
            return 0.0 if allowed else (1 - tokens) / self._rate

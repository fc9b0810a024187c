"""Feed: the newest events of a run, for a driver that polls. Bounded: of a long run the oldest steps are let go first.

metrics.jsonl has every step; the feed is what a panel shows. Every event has a number of its own, so a driver that asks
late sees which are missing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

MOST_EVENTS = 1000


class Feed:
    """Events in their order, each a dict with "kind" and "number"."""

    def __init__(self, most: int = MOST_EVENTS):
        self._most, self._count = most, 0
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, kind: str, **body: Any) -> None:
        """The next event."""
        with self._lock:
            self._events.append({"kind": kind, "number": self._count, **body})
            self._count += 1
            if len(self._events) > self._most:
                steps = (i for i, event in enumerate(self._events) if event["kind"] == "step")
                del self._events[next(steps, 0)]

    def since(self, number: int) -> list[dict[str, Any]]:
        """Events from a number on, as far as they are kept."""
        with self._lock:
            return [event for event in self._events if event["number"] >= number]


def missing(events: Sequence[dict[str, Any]], number: int) -> int:
    """How many events from a number on are not among these."""
    return events[-1]["number"] + 1 - number - len(events) if events else 0

"""A bounded buffer of the newest events of a run, for a driver that polls.

The file metrics.jsonl has every step; the feed holds the recent events that a live display needs. When it is full, the
oldest steps are dropped first. Every event has a sequence number, so that a driver that polls late can tell how many it has
missed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

MOST_EVENTS = 1000


class EventFeed:
    """Events in order, each a dict with "kind" and "number"."""

    def __init__(self, max_events: int = MOST_EVENTS):
        self._most, self._count = max_events, 0
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        with self._lock:
            self._events.append({"kind": kind, "number": self._count, **fields})
            self._count += 1
            if len(self._events) > self._most:
                steps = (i for i, event in enumerate(self._events) if event["kind"] == "step")
                del self._events[next(steps, 0)]

    def list_since(self, number: int) -> list[dict[str, Any]]:
        """Return the retained events whose number is at least `number`."""
        with self._lock:
            return [event for event in self._events if event["number"] >= number]


def count_missing(events: Sequence[dict[str, Any]], number: int) -> int:
    """Count the events that were dropped before they were read: those from a number on that are not in `events`.

    Args:
        events: The received events, in order.
        number: The number of the first expected event.
    """
    return events[-1]["number"] + 1 - number - len(events) if events else 0

"""A bounded buffer of the newest events of a run, for a driver that polls it.

The file metrics.jsonl has every step, and the feed the recent events that a live display needs. When the feed is full, the
oldest event of kind "step" is dropped, or the oldest event if there is no step. Every event has a sequence number, so that
a driver that polls late can tell how many events it has missed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

MAX_EVENTS = 1000  # bounds the memory of a long run


class EventFeed:
    """Events in the order of their numbers, each a dict with "kind", "number" and its own fields; safe for several threads."""

    def __init__(self, max_events: int = MAX_EVENTS):
        self._max_events, self._next_number = max_events, 0
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, kind: str, **fields: Any) -> None:
        """Append an event, and drop an old one if the feed is full."""
        with self._lock:
            self._events.append({"kind": kind, "number": self._next_number, **fields})
            self._next_number += 1
            if len(self._events) > self._max_events:
                step_indices = (i for i, event in enumerate(self._events) if event["kind"] == "step")
                del self._events[next(step_indices, 0)]  # the first step, or the first event without one

    def list_since(self, number: int) -> list[dict[str, Any]]:
        """Return the retained events whose number is at least `number`."""
        with self._lock:
            return [event for event in self._events if event["number"] >= number]


def count_missing(events: Sequence[dict[str, Any]], number: int) -> int:
    """Return how many events were dropped from the feed before they were read.

    Args:
        events: The events that `EventFeed.list_since(number)` returned.
        number: The number of the first expected event.
    """
    expected = events[-1]["number"] + 1 - number if events else 0
    return expected - len(events)

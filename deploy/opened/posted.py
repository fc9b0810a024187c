"""Posted events: their checks, and the events of each user that memory keeps.

The same checks are made when an event is posted and when the journal is read again, so events in memory
always fit the types that models and stores read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nonet.deploy.opened.items import Refused
from nonet.models.inference import EventHistory

_MAX_TIME = 1 << 40  # unix seconds; times in milliseconds or smaller units exceed it


def check_event(event: Mapping[str, Any], defaults: Mapping[str, Any], kinds: Mapping[str, int]) -> None:
    """Check the time, kind and values of an event against the columns of the run's events.

    Args:
        event: {"time": unix seconds, "event": kind or None, "values": values by column}.
        defaults: The default of each column, in the column's type.
        kinds: The index of each kind of event by name.

    Raises:
        Refused: The time, the kind or a value does not fit.
    """
    kind = event.get("event")
    if kind is not None and (not isinstance(kind, str) or kind not in kinds):
        raise Refused("bad_event", f"there is no kind of event {kind!r}; kinds: {', '.join(kinds) or 'none'}")
    for name, value in (event.get("values") or {}).items():
        if name not in defaults:
            raise Refused(
                "bad_column", f"events have no column {name!r}; columns: {', '.join(defaults) or 'none'}"
            )
        _check_value(name, value, defaults[name].dtype)
    event_time = event["time"]
    is_integer = isinstance(event_time, int) and not isinstance(event_time, bool)
    if not is_integer or not 0 <= event_time < _MAX_TIME:
        raise Refused("bad_time", f"time {str(event_time)[:40]} is not a time in unix seconds")


def _check_value(name: str, value: Any, dtype: np.dtype[Any]) -> None:
    """Raise Refused unless a value fits the type of its column."""
    is_integer = dtype.kind != "f"
    shown = repr(value)[:40]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused("bad_value", f"{name}: {shown} is not {'a whole number' if is_integer else 'a number'}")
    if isinstance(value, float) and not np.isfinite(value):
        raise Refused("bad_value", f"{name}: {shown} is not a finite number")
    limits = np.iinfo(dtype) if is_integer else np.finfo(dtype)
    # Python integers compare exactly with numbers of any size.
    least, largest = int(limits.min), int(limits.max)
    if not least <= value <= largest:
        bits = 8 * dtype.itemsize
        raise Refused(
            "bad_value",
            f"{name}: {shown} does not fit in {bits} bits; it must be {least:g} to {largest:g}",
        )
    if is_integer and value != int(value):
        raise Refused("bad_value", f"{name}: {shown} is not a whole number")


class PostedEvents:
    """The posted events of one user.

    Attributes:
        events: The newest events; `extend` sorts them by time when it moves older ones.
        older: Older events, which only questions about the past read.
    """

    __slots__ = ("events", "older")

    def __init__(self, events: list[dict[str, Any]], older: EventHistory | None = None):
        self.events, self.older = events, older

    def extend(
        self,
        events: list[dict[str, Any]],
        max_events: int | None,
        make_events: Callable[[list[dict[str, Any]]], EventHistory],
    ) -> PostedEvents:
        """Return a copy with more events; concurrent readers keep the old object.

        Args:
            events: The further events.
            max_events: The largest number of newest events, above which the oldest move to `older`; None for no limit.
            make_events: Converts events to arrays.
        """
        together = [*self.events, *events]
        if max_events is None or len(together) <= max_events:
            return PostedEvents(together, self.older)
        together.sort(key=lambda event: event["time"])  # events of equal time stay in the order of arrival
        moved = make_events(together[: len(together) - max_events])
        older = moved if self.older is None else concatenate_events(self.older, moved)
        return PostedEvents(together[len(together) - max_events :], older)


def concatenate_events(events: EventHistory, later: EventHistory) -> EventHistory:
    """Concatenate two sequences of events, without `start`; the columns are those of the first one."""
    return EventHistory(
        np.concatenate([events.item, later.item]),
        np.concatenate([events.time, later.time]),
        np.concatenate([events.event, later.event]),
        {name: np.concatenate([values, later.columns[name]]) for name, values in events.columns.items()},
    )

"""Cache of the prefixes that a version of a model computed for users, in host memory of limited size.

A prefix is valid while the user's window starts at the same event and begins with the events that the prefix was computed from;
then only later events are computed. Each engine has its own states, so they are dropped with the version.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from nonet.models.inference.question import EventHistory, Question


@dataclass(frozen=True, slots=True)
class _StoredPrefix:
    """A prefix, and the events and the user's sparse key from which it was computed."""

    events: EventHistory
    user_key: int
    prefix: Any


class PrefixStates:
    """LRU cache of prefixes by user id, limited to `most_bytes`.

    Attributes:
        nbytes: Size of the stored prefixes in bytes.
        hits: Number of look-ups that found a prefix.
        misses: Number of those that did not.
    """

    def __init__(self, most_bytes: int = 256 << 20):
        self._most_bytes, self.nbytes = most_bytes, 0
        self._kept: OrderedDict[str, _StoredPrefix] = OrderedDict()
        self.hits, self.misses = 0, 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, question: Question) -> tuple[Any, int]:
        """Return a stored prefix of the question's events, and the number of its events; None and 0 if there is none."""
        hit = self._kept.get(question.user) if question.user else None
        if hit is None or hit.user_key != question.user_key or not _is_prefix(question.events, hit.events):
            self.misses += 1
            return None, 0
        self._kept.move_to_end(question.user)
        self.hits += 1
        return hit.prefix, len(hit.events)

    def keep(self, question: Question, prefix: Any) -> None:
        """Store the prefix computed from all of a question's events, unless the question has no user."""
        if not question.user:
            return
        old = self._kept.pop(question.user, None)
        self.nbytes += prefix.nbytes - (old.prefix.nbytes if old else 0)
        self._kept[question.user] = _StoredPrefix(question.events, question.user_key, prefix)
        while self.nbytes > self._most_bytes and self._kept:
            self.nbytes -= self._kept.popitem(last=False)[1].prefix.nbytes


def _is_prefix(events: EventHistory, prefix: EventHistory) -> bool:
    """Return whether `prefix` is a prefix of `events`, value by value."""
    n = len(prefix)
    if events.start != prefix.start or n > len(events):
        return False
    arrays = [(events.item, prefix.item), (events.time, prefix.time), (events.event, prefix.event)]
    arrays += [(events.columns[name], values) for name, values in prefix.columns.items()]
    return all(array[:n].tobytes() == prefix_array.tobytes() for array, prefix_array in arrays)

"""Cache of the prefixes that a version's model computed for users, in host memory of bounded size.

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
    events: EventHistory
    user_key: int
    prefix: Any


class PrefixStates:
    """LRU cache of prefixes by user, limited to `most_bytes`; `hits` and `misses` count look-ups."""

    def __init__(self, most_bytes: int = 256 << 20):
        self._most_bytes, self.nbytes = most_bytes, 0
        self._kept: OrderedDict[str, _StoredPrefix] = OrderedDict()
        self.hits, self.misses = 0, 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, question: Question) -> tuple[Any, int]:
        """Return the prefix of a question's user and the number of its events; None and 0 if there is none."""
        kept = self._kept.get(question.user) if question.user else None
        if kept is None or kept.user_key != question.user_key or not _is_prefix(question.events, kept.events):
            self.misses += 1
            return None, 0
        self._kept.move_to_end(question.user)
        self.hits += 1
        return kept.prefix, len(kept.events)

    def keep(self, question: Question, prefix: Any) -> None:
        """Store a prefix of all of a question's events; questions without a user are not stored."""
        if not question.user:
            return
        old = self._kept.pop(question.user, None)
        self.nbytes += prefix.nbytes - (old.prefix.nbytes if old else 0)
        self._kept[question.user] = _StoredPrefix(question.events, question.user_key, prefix)
        while self.nbytes > self._most_bytes and self._kept:
            self.nbytes -= self._kept.popitem(last=False)[1].prefix.nbytes


def _is_prefix(events: EventHistory, first: EventHistory) -> bool:
    """Return whether `first` is a prefix of `events`, value by value."""
    n = len(first)
    if events.start != first.start or n > len(events):
        return False
    pairs = [(events.item, first.item), (events.time, first.time), (events.event, first.event)]
    pairs += [(events.columns[name], values) for name, values in first.columns.items()]
    return all(a[:n].tobytes() == b.tobytes() for a, b in pairs)

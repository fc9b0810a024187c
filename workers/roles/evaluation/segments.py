"""Segments: groups held-out events by the length of the user's history and the popularity of the item.

Users are split at the median number of training events, and items into three groups with a third of the training events each. A
mean over all events hides that a recommender may serve only one kind of user, or only popular items (Abdollahpouri et al. 2019).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nonet.samples.sequences import Sequences

# Shapes: P held-out events, I items.

_USERS = ("short histories", "long histories")
_ITEMS = ("head items", "middle items", "tail items")


class EventSegments:
    """Groups held-out events by user and by item.

    Args:
        occurs_I: Number of training events of each item.
        order_I: Rank of each item by frequency, 0 for the most frequent.
    """

    def __init__(self, occurs_I: np.ndarray, order_I: np.ndarray):
        items_by_rank = np.argsort(order_I)
        events_before = np.cumsum(occurs_I[items_by_rank]) - occurs_I[items_by_rank]
        self._third_I = np.empty(len(items_by_rank), np.int64)
        self._third_I[items_by_rank] = np.minimum(events_before * len(_ITEMS) // max(1, occurs_I.sum()), 2)

    def group_events(self, seq: Sequences, users: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
        """Return a mask [P] of the events for each segment.

        Args:
            seq: The sequences.
            users: User rows [P] of the events.
            target: Items [P] of the events.
        """
        long = seq.train_lengths[users] > self._compute_median(seq, users)
        by_user = {name: long == bool(index) for index, name in enumerate(_USERS)}
        return by_user | {name: self._third_I[target] == third for third, name in enumerate(_ITEMS)}

    def describe(self, seq: Sequences, users: np.ndarray, target: np.ndarray) -> dict[str, dict[str, Any]]:
        """Describe each segment.

        Args:
            seq: The sequences.
            users: User rows [P] of the events.
            target: Items [P] of the events.

        Returns:
            By segment: {"events", "items"} for segments of items, {"events", "users", bound} for segments of users. The bound is
            the median number of training events per user, as "most" for short histories and "above" for long ones.
        """
        median = self._compute_median(seq, users)
        facts: dict[str, dict[str, Any]] = {}
        for name, member in self.group_events(seq, users, target).items():
            facts[name] = {"events": int(member.sum())}
            if name in _USERS:
                bound = "most" if name == _USERS[0] else "above"
                facts[name] |= {"users": len(np.unique(users[member])), bound: median}
            else:
                facts[name]["items"] = int((self._third_I == _ITEMS.index(name)).sum())
        return facts

    def _compute_median(self, seq: Sequences, users: np.ndarray) -> float:
        """Return the median number of training events of these users."""
        if not len(users):
            return 0.0
        return float(np.median(seq.train_lengths[np.unique(users)]))

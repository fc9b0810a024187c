"""EventSegments: groups held-out events by the length of the user's history and the popularity of the item.

Users are split at the median number of training events, and items into three groups with a third of the training events each. A
mean over all events hides that a recommender may serve only one kind of user, or only popular items (Abdollahpouri et al. 2019).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nonet.samples.sequences import Sequences

# Shapes: P held-out events, I items.

_USER_SEGMENTS = ("short histories", "long histories")
_ITEM_SEGMENTS = ("head items", "middle items", "tail items")


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
        third = events_before * len(_ITEM_SEGMENTS) // max(1, occurs_I.sum())
        self._third_I[items_by_rank] = np.minimum(third, len(_ITEM_SEGMENTS) - 1)

    def group_events(self, seq: Sequences, users: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
        """Return a mask [P] of the events for each segment.

        Args:
            seq: The sequences.
            users: User rows [P] of the events.
            target: Items [P] of the events.
        """
        is_long_P = seq.train_lengths[users] > self._compute_median(seq, users)
        masks = {name: is_long_P == bool(index) for index, name in enumerate(_USER_SEGMENTS)}
        return masks | {name: self._third_I[target] == third for third, name in enumerate(_ITEM_SEGMENTS)}

    def describe(self, seq: Sequences, users: np.ndarray, target: np.ndarray) -> dict[str, dict[str, Any]]:
        """Count the events, and the users or items, of each segment.

        Args:
            seq: The sequences.
            users: User rows [P] of the events.
            target: Items [P] of the events.

        Returns:
            By segment: {"events", "items"} for segments of items; {"events", "users", "most" or "above"} for segments of users,
            where "most" (of short histories) and "above" (of long ones) are the median number of training events per user.
        """
        median = self._compute_median(seq, users)
        facts: dict[str, dict[str, Any]] = {}
        for name, mask_P in self.group_events(seq, users, target).items():
            facts[name] = {"events": int(mask_P.sum())}
            if name in _USER_SEGMENTS:
                bound_key = "most" if name == _USER_SEGMENTS[0] else "above"
                facts[name] |= {"users": len(np.unique(users[mask_P])), bound_key: median}
            else:
                facts[name]["items"] = int((self._third_I == _ITEM_SEGMENTS.index(name)).sum())
        return facts

    def _compute_median(self, seq: Sequences, users: np.ndarray) -> float:
        """Return the median number of training events of these users, each counted once; 0 without users."""
        if not len(users):
            return 0.0
        return float(np.median(seq.train_lengths[np.unique(users)]))

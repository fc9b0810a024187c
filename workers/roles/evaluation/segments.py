"""EventSegments: groups held-out events by the length of the user's history and the popularity of the item.

Users are split at the median number of training events, and items into three groups with a third of the training events each.
Both are also split by fixed numbers of training events, which show how cold items and users fare. A mean over all events hides
that a recommender may serve only one kind of user, or only popular items (Abdollahpouri et al. 2019). The pair of an event's item
and the newest item before it tells where a result comes from: counts know it, know a path of two steps, or know neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nonet.ranges import expand_ranges
from nonet.samples.batches import count_visible_events, split_by_size
from nonet.samples.sequences import Sequences, Transitions

# Shapes: P held-out events, I items.

_USER_SEGMENTS = ("short histories", "long histories")
_ITEM_SEGMENTS = ("head items", "middle items", "tail items")
_COUNT_SEGMENTS = {
    "0 events": 0,
    "1 to 4 events": 1,
    "5 to 19 events": 5,
    "20 or more events": 20,
}  # least number
_LEAST = np.array(list(_COUNT_SEGMENTS.values()))
_PAIR_SEGMENTS = ("pairs of training", "pairs two steps apart", "new pairs")
_CHUNK_EVENTS = 64


class EventSegments:
    """Groups held-out events by user and by item.

    Args:
        occurs_I: Number of training events of each item.
        order_I: Rank of each item by frequency, 0 for the most frequent.
        transitions: Counts of pairs of items in training; None if there are none, and no segments of pairs.
    """

    def __init__(self, occurs_I: np.ndarray, order_I: np.ndarray, transitions: Transitions | None = None):
        self._occurs_I, self._transitions = occurs_I, transitions
        items_by_rank = np.argsort(order_I)
        events_before = np.cumsum(occurs_I[items_by_rank]) - occurs_I[items_by_rank]
        self._third_I = np.empty(len(items_by_rank), np.int64)
        third = events_before * len(_ITEM_SEGMENTS) // max(1, occurs_I.sum())
        self._third_I[items_by_rank] = np.minimum(third, len(_ITEM_SEGMENTS) - 1)

    def group_events(
        self, seq: Sequences, users: np.ndarray, positions: np.ndarray, target: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return a mask [P] of the events for each segment.

        Args:
            seq: The sequences.
            users: User rows [P] of the events.
            positions: Number of events before each event [P].
            target: Items [P] of the events.
        """
        is_long_P = seq.train_lengths[users] > self._compute_median(seq, users)
        masks = {name: is_long_P == bool(index) for index, name in enumerate(_USER_SEGMENTS)}
        masks |= {name: self._third_I[target] == third for third, name in enumerate(_ITEM_SEGMENTS)}
        for noun, count_P in (("users", seq.train_lengths[users]), ("items", self._occurs_I[target])):
            segment_P = _find_count_segment(count_P)
            masks |= {f"{noun} of {name}": segment_P == index for index, name in enumerate(_COUNT_SEGMENTS)}
        if self._transitions is not None:
            segment_P = _find_pair_segment(self._transitions, seq, users, positions, target)
            masks |= {name: segment_P == index for index, name in enumerate(_PAIR_SEGMENTS)}
        return masks

    def describe(
        self, seq: Sequences, users: np.ndarray, masks: Mapping[str, np.ndarray]
    ) -> dict[str, dict[str, Any]]:
        """Count the events, and the users or items, of each segment.

        Args:
            seq: The sequences.
            users: User rows [P] of the events.
            masks: The result of `group_events`.

        Returns:
            By segment: {"events", "items"} for segments of items; {"events", "users"} for segments of users, and "most" (of short
            histories) or "above" (of long ones), the median number of training events per user; {"events", "steps"} for segments
            of pairs, where "steps" is 0 for new pairs.
        """
        median = self._compute_median(seq, users)
        facts: dict[str, dict[str, Any]] = {}
        for name, mask_P in masks.items():
            facts[name] = {"events": int(mask_P.sum())}
            if name in _USER_SEGMENTS:
                bound_key = "most" if name == _USER_SEGMENTS[0] else "above"
                facts[name] |= {"users": len(np.unique(users[mask_P])), bound_key: median}
            elif name in _PAIR_SEGMENTS:
                facts[name]["steps"] = (1, 2, 0)[_PAIR_SEGMENTS.index(name)]
            elif name in _ITEM_SEGMENTS:
                facts[name]["items"] = int((self._third_I == _ITEM_SEGMENTS.index(name)).sum())
            elif name.startswith("users"):
                facts[name]["users"] = len(np.unique(users[mask_P]))
            else:
                index = list(_COUNT_SEGMENTS).index(name.removeprefix("items of "))
                facts[name]["items"] = int((_find_count_segment(self._occurs_I) == index).sum())
        return facts

    def _compute_median(self, seq: Sequences, users: np.ndarray) -> float:
        """Return the median number of training events of these users, each counted once; 0 without users."""
        if not len(users):
            return 0.0
        return float(np.median(seq.train_lengths[np.unique(users)]))


def _find_count_segment(count: np.ndarray) -> np.ndarray:
    """Return the index in `_COUNT_SEGMENTS` of each number of events."""
    return np.searchsorted(_LEAST, count, "right") - 1


def _find_pair_segment(
    transitions: Transitions, seq: Sequences, users: np.ndarray, positions: np.ndarray, target: np.ndarray
) -> np.ndarray:
    """Return the index in `_PAIR_SEGMENTS` of each event [P]; an event without one before it is a new pair."""
    segment_P = np.full(len(users), _PAIR_SEGMENTS.index("new pairs"))
    visible_P = count_visible_events(seq, users, positions)
    has_newest = np.flatnonzero(visible_P > 0)
    newest = seq.item[seq.offsets[users[has_newest]] + visible_P[has_newest] - 1]
    for part in split_by_size(np.ones(len(has_newest), np.int64), _CHUNK_EVENTS):
        event, item = has_newest[part], newest[part]
        for steps in range(2):  # From the items that are reached so far, go one step further.
            neighbour, offsets = expand_ranges(transitions.row[item], transitions.row[item + 1])
            event, item = np.repeat(event, np.diff(offsets)), transitions.item[neighbour]
            found = event[item == target[event]]
            segment_P[found] = np.minimum(segment_P[found], steps)
    return segment_P

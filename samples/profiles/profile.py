"""Statistics of a data set (users, items, events, times and repeats), from which default settings and warnings are derived.

All computations are columnar NumPy operations: 1 M events take about a second. The effect of a train/test split is computed from
a histogram of the numbers of events per user, so the split itself does not have to be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from nonet.samples.sequences import count_duplicates, find_repeats
from nonet.samples.tables import find_implausible

# Shapes: U users, I items of the catalogue, N events.

# The largest numbers of test events and of held-out events per user for which ties are counted.
MAX_TEST_EVENTS, MAX_HELD_OUT = 10, 32
_DAY_S = 86_400
_NEWEST_SHARE = 0.1  # share of the events, the newest ones, in which new items are counted for `drift`


@dataclass(frozen=True, slots=True)
class ItemColumn:
    """A column of the items.

    Attributes:
        name: Name of the column.
        kind: "text", "list" (also if it is written as text), "number" or "other".
        filled: Share of rows with a value.
        distinct: Number of distinct values divided by the number of rows.
        delimiter: A delimiter that most words of a list column contain, which suggests that they are lists that were not
            split; None otherwise.
    """

    name: str
    kind: str
    filled: float = 1.0
    distinct: float = 1.0
    delimiter: str | None = None


@dataclass(frozen=True, eq=False)
class DataProfile:
    """Statistics of a data set.

    Attributes:
        users: Number of users with at least one event.
        items: Number of items in the catalogue, including those without events.
        events: Number of events.
        users_of: Histogram: users_of[n] is the number of users that have n events.
        items_of: Histogram: items_of[n] is the number of items that have n events.
        first: Unix seconds of the oldest event.
        last: Unix seconds of the newest event.
        resolution_s: Greatest common divisor of the differences of times; 0 if all times are equal.
        counted: Whether each event's time is only its position in its user's history: 0, 1, 2, ...
        ties: Share of pairs of consecutive events of a user that have the same time.
        tied_ends: Counts [MAX_TEST_EVENTS, MAX_HELD_OUT + 1]: tied_ends[k - 1, n] is the number of users with more than n events
            whose k-th last event has the same time as the event before it.
        duplicates: Number of events with the same user, item and second as an earlier one.
        repeats: Share of events whose item the user has interacted with before.
        immediate: Share of events whose item is that of the user's event right before, on the same day of UTC; 0 if `counted`.
        drift: Share of the newest tenth of events whose item does not occur in the older events; None if times are not
            informative.
        implausible: Number of events before 1990 or after the end of next year; 0 if `counted`.
        kinds: Number of events by event kind.
        ratings: Number of events by rating.
        columns: Columns of the items table.
        zero_padded: An example id by "user" or "item", if ids are digits with leading zeros and are kept as text.
        time_unit: Unit of the numbers in the column of times: "s", "ms", "us" or "ns". All statistics are of whole seconds.
    """

    users: int
    items: int
    events: int
    users_of: np.ndarray
    items_of: np.ndarray
    first: int
    last: int
    resolution_s: int
    counted: bool
    ties: float
    tied_ends: np.ndarray
    duplicates: int
    repeats: float
    drift: float | None
    implausible: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    ratings: Mapping[float, int] = field(default_factory=dict)
    columns: tuple[ItemColumn, ...] = ()
    zero_padded: Mapping[str, str] = field(default_factory=dict)
    time_unit: str = "s"
    immediate: float = 0.0

    def get_length_quantile(self, share: float) -> int:
        """Return the number of events per user that a `share` of the users does not exceed; 0.5 gives the median."""
        return _find_quantile(self.users_of, share)

    def count_users_above(self, events: int) -> int:
        """Count the users with more than `events` events."""
        return int(self.users_of[events + 1 :].sum())

    def count_train_events(self, held_out: int) -> int:
        """Count the training events of a split that holds out `held_out` events of each user who has more than that."""
        return self.events - held_out * self.count_users_above(held_out)

    def get_median_train_length(self, held_out: int) -> int:
        """Return the median number of training events per user of a split that holds out `held_out` events.

        Nothing is held out of users with at most `held_out` events.
        """
        lengths = np.arange(len(self.users_of))
        lengths = np.where(lengths > held_out, lengths - held_out, lengths)
        return _find_quantile(np.bincount(lengths, weights=self.users_of), 0.5)

    def count_tied_tests(self, test: int, held_out: int) -> tuple[int, int]:
        """Count the users whose first test event has the same time as the event before it, and all users with test events.

        Args:
            test: Number of test events per user.
            held_out: Number of held-out events per user, including the test events.
        """
        tied = self.tied_ends[min(test, MAX_TEST_EVENTS) - 1, min(held_out, MAX_HELD_OUT)]
        return int(tied), self.count_users_above(held_out)

    def compute_kept_share(self, item_events: int) -> float:
        """Return the share of events whose item has at least `item_events` events."""
        events_by_length = np.arange(len(self.items_of)) * self.items_of
        return float(events_by_length[item_events:].sum() / max(1, self.events))


def measure_profile(
    offsets: np.ndarray,
    item: np.ndarray,
    time: np.ndarray,
    items: int,
    *,
    kinds: Mapping[str, int] | None = None,
    ratings: Mapping[float, int] | None = None,
    columns: tuple[ItemColumn, ...] = (),
    zero_padded: Mapping[str, str] | None = None,
    time_unit: str = "s",
) -> DataProfile:
    """Compute the profile of events that are sorted by user and then by time.

    Args:
        offsets: Index of each user's first event [U + 1]; the last value is N.
        item: Dense index of each event's item [N], in [0, items).
        time: Unix seconds of each event [N].
        items: Number of items in the catalogue.
        kinds: Number of events by event kind.
        ratings: Number of events by rating.
        columns: Columns of the items table.
        zero_padded: An example of an id with leading zeros by "user" or "item".
        time_unit: Unit of the numbers in the column of times.
    """
    lengths = np.diff(offsets)
    user = np.repeat(np.arange(len(lengths)), lengths)
    same_user = user[1:] == user[:-1]
    tied = same_user & (time[1:] == time[:-1])
    positions = np.arange(len(time)) - np.repeat(offsets[:-1], lengths)
    counted = bool(len(time) and lengths.max() > 1 and (time == positions).all())
    time_steps = np.diff(np.unique(time))
    is_immediate = same_user & (item[1:] == item[:-1]) & (time[1:] // _DAY_S == time[:-1] // _DAY_S)
    return DataProfile(
        users=int((lengths > 0).sum()),
        items=items,
        events=len(item),
        users_of=np.bincount(lengths[lengths > 0]),
        items_of=np.bincount(np.bincount(item, minlength=items)),
        first=int(time.min(initial=np.iinfo(np.int64).max)),
        last=int(time.max(initial=np.iinfo(np.int64).min)),
        resolution_s=int(np.gcd.reduce(time_steps)) if len(time_steps) else 0,
        counted=counted,
        ties=float(tied.sum() / max(1, same_user.sum())),
        tied_ends=_count_tied_ends(offsets, time),
        duplicates=count_duplicates(user, item, time),
        repeats=float(find_repeats(user, item).mean()) if len(item) else 0.0,
        immediate=0.0 if counted else float(is_immediate.sum() / max(1, len(item))),
        implausible=0 if counted else int(find_implausible(time).sum()),
        drift=None if counted or not len(time_steps) else _compute_drift(item, time),
        kinds=dict(kinds or {}),
        ratings=dict(ratings or {}),
        columns=columns,
        zero_padded=dict(zero_padded or {}),
        time_unit=time_unit,
    )


def scale_profile(profile: DataProfile, factor: int, item_events: np.ndarray) -> DataProfile:
    """Scale the profile of a sample of the users to all users.

    Args:
        profile: Profile of one out of `factor` users.
        factor: Number of users for each sampled user.
        item_events: Number of events of each item over all users [I].
    """
    return replace(
        profile,
        users=profile.users * factor,
        events=int(item_events.sum()),
        users_of=profile.users_of * factor,
        items_of=np.bincount(item_events),
        tied_ends=profile.tied_ends * factor,
        duplicates=profile.duplicates * factor,
        implausible=profile.implausible * factor,
        kinds={name: count * factor for name, count in profile.kinds.items()},
        ratings={value: count * factor for value, count in profile.ratings.items()},
    )


def _count_tied_ends(offsets: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Compute `tied_ends` of `DataProfile`."""
    counts = np.zeros((MAX_TEST_EVENTS, MAX_HELD_OUT + 1), np.int64)
    for k in range(1, MAX_TEST_EVENTS + 1):
        lengths = np.diff(offsets)
        ends, lengths = offsets[1:][lengths > k], lengths[lengths > k]
        tied_lengths = lengths[time[ends - k] == time[ends - k - 1]]
        users_by_length = np.bincount(np.minimum(tied_lengths, MAX_HELD_OUT + 1), minlength=MAX_HELD_OUT + 2)
        counts[k - 1] = users_by_length[::-1].cumsum()[::-1][
            1:
        ]  # users with more than n events, for n from 0
    return counts


def _compute_drift(item: np.ndarray, time: np.ndarray) -> float:
    """Return the share of the newest tenth of events whose item does not occur in the older events."""
    ordered = item[np.argsort(time, kind="stable")]
    old_count = len(ordered) - max(1, int(_NEWEST_SHARE * len(ordered)))
    is_old_item = np.zeros(int(item.max(initial=0)) + 1, bool)
    is_old_item[ordered[:old_count]] = True
    return float((~is_old_item[ordered[old_count:]]).mean())


def _find_quantile(histogram: np.ndarray, share: float) -> int:
    """Return the quantile of a histogram over the numbers 0, 1, 2, ...; 0 if the histogram is empty."""
    total = histogram.sum()
    return int(np.searchsorted(np.cumsum(histogram), share * total)) if total else 0

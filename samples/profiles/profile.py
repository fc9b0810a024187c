"""A profile of a data set: users, items, events, times, repeats, in numbers that settings and warnings follow from.

Columnar, without torch and without a loop over users: 1 M events take about a second. What a split would do is answered from
a histogram of the users' lengths, so no split has to be made to ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from nonet.samples.sequences import count_duplicates, repeated
from nonet.samples.tables import implausible

# Shapes: U users, I items of the catalogue, N events.
ENDS, LONGEST = 10, 32  # tests of a user, and events held out of one, up to which ties at the end are counted
_DRIFT = 0.1  # the newest share of events that is looked at for new items


@dataclass(frozen=True, slots=True)
class ItemColumn:
    """A column of the items.

    Attributes:
        kind: text, list, number or other.
        filled: share of rows with a value.
        distinct: distinct values per row.
        delimiter: what most words of a list have in them, where they may be lists that were not cut; None elsewhere.
    """

    name: str
    kind: str
    filled: float = 1.0
    distinct: float = 1.0
    delimiter: str | None = None


@dataclass(frozen=True, eq=False)
class Profile:
    """What a data set is like.

    users, items, events   of those that are kept; items: of the catalogue, also those without an event
    users_of      users_of[n]: users that have n events
    items_of      items_of[n]: items that have n events
    first, last   unix seconds; resolution_s: what all differences of times are a multiple of, 0 where all are equal
    counted       whether times are no times but the events' places in their user's history
    ties          share of neighbouring events of a user that share a timestamp
    tied_ends     tied_ends[k - 1, n]: users with more than n events whose event k from the end shares the time of the one before
    duplicates    events that are there again: same user, item and second
    repeats       share of events that return to an item of their user
    implausible   events before 1990 or after the end of next year; 0 where times are counted
    drift         share of the newest tenth of the events whose item was not seen before it; None where times say nothing
    kinds, ratings   value -> events; columns: of the items
    zero_padded   "user" or "item" -> one of its ids, where they are numbers with zeros in front, which are kept as text
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

    def length(self, share: float) -> int:
        """The length of the user that this share of users is at most as long as: 0.5 for the median."""
        return _quantile(self.users_of, share)

    def users_above(self, events: int) -> int:
        """Users with more events than this."""
        return int(self.users_of[events + 1 :].sum())

    def trained(self, held_out: int) -> int:
        """Events left to train on where each user that is longer than that gives up so many."""
        return self.events - held_out * self.users_above(held_out)

    def trained_length(self, held_out: int) -> int:
        """Training events of the median user of such a split; short users train on all they have."""
        lengths = np.arange(len(self.users_of))
        lengths = np.where(lengths > held_out, lengths - held_out, lengths)
        return _quantile(np.bincount(lengths, weights=self.users_of), 0.5)

    def tied_tests(self, test: int, held_out: int) -> tuple[int, int]:
        """Users whose first test event shares the time of the event before it, and all users that are tested."""
        return int(self.tied_ends[min(test, ENDS) - 1, min(held_out, LONGEST)]), self.users_above(held_out)

    def kept_by(self, item_events: int) -> float:
        """Share of the events that are of items with at least so many."""
        counts = np.arange(len(self.items_of)) * self.items_of
        return float(counts[item_events:].sum() / max(1, self.events))


def measure(
    offsets: np.ndarray,
    item: np.ndarray,
    time: np.ndarray,
    items: int,
    *,
    kinds: Mapping[str, int] | None = None,
    ratings: Mapping[float, int] | None = None,
    columns: tuple[ItemColumn, ...] = (),
    zero_padded: Mapping[str, str] | None = None,
) -> Profile:
    """Profile of events in the order of users and time: offsets [U + 1], item [N] in [0, items), time [N] unix seconds."""
    lengths = np.diff(offsets)
    user = np.repeat(np.arange(len(lengths)), lengths)
    same_user = user[1:] == user[:-1]
    tied = same_user & (time[1:] == time[:-1])
    places = np.arange(len(time)) - np.repeat(offsets[:-1], lengths)
    counted = bool(len(time) and lengths.max() > 1 and (time == places).all())
    steps = np.diff(np.unique(time))
    return Profile(
        users=int((lengths > 0).sum()),
        items=items,
        events=len(item),
        users_of=np.bincount(lengths[lengths > 0]),
        items_of=np.bincount(np.bincount(item, minlength=items)),
        first=int(time.min(initial=np.iinfo(np.int64).max)),
        last=int(time.max(initial=np.iinfo(np.int64).min)),
        resolution_s=int(np.gcd.reduce(steps)) if len(steps) else 0,
        counted=counted,
        ties=float(tied.sum() / max(1, same_user.sum())),
        tied_ends=_tied_ends(offsets, time),
        duplicates=count_duplicates(user, item, time),
        repeats=float(repeated(user, item).mean()) if len(item) else 0.0,
        implausible=0 if counted else int(implausible(time).sum()),
        drift=None if counted or not len(steps) else _drift(item, time),
        kinds=dict(kinds or {}),
        ratings=dict(ratings or {}),
        columns=columns,
        zero_padded=dict(zero_padded or {}),
    )


def scaled(profile: Profile, every: int, occurs: np.ndarray) -> Profile:
    """The profile of one user in `every` as that of all; occurs [I]: events of each item among all users'."""
    return replace(
        profile,
        users=profile.users * every,
        events=profile.events * every,
        users_of=profile.users_of * every,
        items_of=np.bincount(occurs),
        tied_ends=profile.tied_ends * every,
        duplicates=profile.duplicates * every,
        implausible=profile.implausible * every,
        kinds={name: n * every for name, n in profile.kinds.items()},
        ratings={value: n * every for value, n in profile.ratings.items()},
    )


def _tied_ends(offsets: np.ndarray, time: np.ndarray) -> np.ndarray:
    counts = np.zeros((ENDS, LONGEST + 1), np.int64)
    for k in range(1, ENDS + 1):
        lengths = np.diff(offsets)
        ends, lengths = offsets[1:][lengths > k], lengths[lengths > k]
        tied = lengths[time[ends - k] == time[ends - k - 1]]
        of_length = np.bincount(np.minimum(tied, LONGEST + 1), minlength=LONGEST + 2)
        counts[k - 1] = of_length[::-1].cumsum()[::-1][1:]
    return counts


def _drift(item: np.ndarray, time: np.ndarray) -> float:
    ordered = item[np.argsort(time, kind="stable")]
    cut = len(ordered) - max(1, int(_DRIFT * len(ordered)))
    known = np.zeros(int(item.max(initial=0)) + 1, bool)
    known[ordered[:cut]] = True
    return float((~known[ordered[cut:]]).mean())


def _quantile(counts: np.ndarray, share: float) -> int:
    """The value that this share of a histogram is at most; 0 of an empty one."""
    total = counts.sum()
    return int(np.searchsorted(np.cumsum(counts), share * total)) if total else 0

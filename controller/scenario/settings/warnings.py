"""Warnings about a data set, as sentences that plans, runs and `nonet new` print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from nonet.controller.scenario.settings.rule import USER_ROW_EVENTS, count_held_out
from nonet.samples.profiles import DataProfile
from nonet.samples.tables import UNIT_NAMES

TIED_SHARE = (
    0.05  # share of neighbouring events, or of tested users, above which equal timestamps are reported
)
UNTESTED_SHARE = 0.5  # share of users without test events above which a warning is given
FEW_TESTED = 200  # with fewer tested users, a recall of 0.1 is uncertain by more than 0.02
MANY_IMMEDIATE = 0.1  # share of events of the item of the event right before from which it is said
MANY_DUPLICATES = 0.01  # share of events that are duplicates above which they are reported
NEW_SHARE = 0.3  # share of the newest events that are of new items above which a warning is given
_MAX_RELATIVE_S = (
    10 * 365 * 86_400
)  # times from 0 to this many seconds count from some event and are not unix times
# A user with more than this share of all events, and more than this many times the median number of events, is reported
# if there are at least so many users.
_ONE_USER_SHARE, _ONE_USER_RATIO, _MANY_USERS = 0.1, 20, 20


def list_data_warnings(
    profile: DataProfile, split: Mapping[str, Any], features: Mapping[str, Any], *, makes_lists: bool = True
) -> Iterator[str]:
    """Yield warnings about a data set.

    Args:
        profile: The profile of the kept events.
        split: The keys of `data.split`.
        features: The sparse features that have a table, by name; the values are not read.
        makes_lists: Whether the model recommends lists, and is not a click model.
    """
    p, held_out = profile, count_held_out(split)
    is_leave_last_out = split.get("use", "leave_last_out") == "leave_last_out"
    if p.ties > TIED_SHARE and not p.counted:
        is_finer = p.time_unit != "s"
        yield (
            f"{p.ties:.0%} of neighbouring events of a user share a {'second' if is_finer else 'timestamp'}: their order is that "
            + (f"of their {UNIT_NAMES[p.time_unit]}, or else " if is_finer else "")
            + "of the rows in the file"
        )
    if is_leave_last_out and held_out:
        yield from _list_test_warnings(p, int(split.get("test", 1)), held_out)
    median = p.get_median_train_length(held_out)
    if "user" in features and median < USER_ROW_EVENTS:
        yield (
            f"sparse.tables has a row per user, and the median user has {median} training events: under "
            f"{USER_ROW_EVENTS}, such rows memorise users; leave `user` out"
        )
    is_relative = p.implausible == p.events and p.first >= 0 and p.last < _MAX_RELATIVE_S
    if p.implausible and not is_relative:
        yield (
            f"{p.implausible:,} of {p.events:,} times are before 1990 or after next year, the first of all "
            f"{_format_day(p.first)}, the last "
            f"{_format_day(p.last)}: unless they count from a start of their own, name another column (columns: {{time: NAME}})"
        )
    most_events, median_events = p.get_length_quantile(1.0), p.get_length_quantile(0.5)
    if (
        p.users >= _MANY_USERS
        and most_events > _ONE_USER_SHARE * p.events
        and most_events > _ONE_USER_RATIO * max(1, median_events)
    ):
        yield (
            f"one user has {most_events:,} of {p.events:,} events, and the median user {median_events:,}: such a "
            "user is often the id of all users without one; leave it out with data.where"
        )
    for column in p.columns:
        if column.delimiter is not None:
            yield (
                f"{column.name}: each text is treated as one word, although most contain {column.delimiter!r}: if they "
                "are lists, write them as lists or separate them by |"
            )
    if p.duplicates > MANY_DUPLICATES * p.events:
        yield (
            f"{p.duplicates:,} of {p.events:,} events are duplicates (same user, item and second); drop them, or keep "
            "them if they are events of their own"
        )
    if makes_lists and p.immediate >= MANY_IMMEDIATE:
        yield (
            f"{p.immediate:.0%} of the events are of the item of the user's event right before, which any list that begins with "
            "the newest item finds; `data.events: {compress: 1d}` makes one event of them"
        )
    if p.drift is not None and p.drift > NEW_SHARE:
        yield f"{p.drift:.0%} of the newest tenth of the events are of items not seen before: no model knows those"


def _list_test_warnings(p: DataProfile, test: int, held_out: int) -> Iterator[str]:
    """Yield warnings about the test events at the end of users' histories.

    Args:
        p: The profile of the kept events.
        test: The number of test events per user.
        held_out: The number of held-out events per user, the test events among them.
    """
    tied_users, tested_users = p.count_tied_tests(test, held_out)
    if not p.counted and tested_users and tied_users > TIED_SHARE * tested_users:
        yield (
            f"{tied_users / tested_users:.0%} of the tested users ({tied_users:,} of {tested_users:,}) have a test event at the "
            "second of the event before it, so what is tested may be known from what is trained: `use: time` cuts between seconds"
        )
    if tested_users < (1 - UNTESTED_SHARE) * p.users:
        yield (
            f"{p.users - tested_users:,} of {p.users:,} users have under {held_out + 1} events: they are trained on and not "
            "tested"
        )
    if tested_users < FEW_TESTED:
        yield f"{tested_users:,} users are tested: differences of a few hundredths are noise"


def _format_day(unix_s: int) -> str:
    """Format a time as an ISO date in UTC, or as seconds if it is out of the range of dates."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).date().isoformat()
    except (OverflowError, ValueError, OSError):
        return f"{unix_s} s"

"""Warnings about a data set, as sentences, which plans, runs and `nonet new` print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from nonet.controller.scenario.settings.rule import USER_ROW_EVENTS, count_held_out
from nonet.samples.profiles import DataProfile

TIED = 0.05  # share of neighbouring events, or of tested users, above which equal timestamps are reported
UNTESTED = 0.5  # share of users without test events above which a warning is given
FEW_TESTED = 200  # with fewer tested users, a recall of 0.1 is uncertain by more than 0.02
MANY_DUPLICATES, NEW = 0.01, 0.3
# Seconds. If all times of a log are between 0 and this, they are relative to some event rather than unix times.
_RELATIVE = 10 * 365 * 86_400
# In a log of at least `_MANY_USERS` users, a user with more than this share of all events and more than this many times the
# median number is reported.
_ONE_USER, _LONGER, _MANY_USERS = 0.1, 20, 20


def list_data_warnings(
    profile: DataProfile, split: Mapping[str, Any], features: Mapping[str, Any]
) -> Iterator[str]:
    """Yield warnings about a data set.

    Args:
        profile: The profile of the kept events.
        split: The keys of `data.split`.
        features: The sparse features that have a table, by name.
    """
    p, held_out = profile, count_held_out(split)
    last_out = split.get("use", "leave_last_out") == "leave_last_out"
    if p.ties > TIED and not p.counted:
        yield (
            f"{p.ties:.0%} of neighbouring events of a user share a timestamp: their order is that of the rows in the file"
        )
    if last_out and held_out:
        yield from _list_test_warnings(p, int(split.get("test", 1)), held_out)
    median = p.get_median_train_length(held_out)
    if "user" in features and median < USER_ROW_EVENTS:
        yield (
            f"sparse.tables has a row per user, and the median user has {median} training events: under "
            f"{USER_ROW_EVENTS}, such rows memorise users; leave `user` out"
        )
    relative = p.implausible == p.events and p.first >= 0 and p.last < _RELATIVE
    if p.implausible and not relative:
        yield (
            f"{p.implausible:,} of {p.events:,} times are before 1990 or after next year, the first of all "
            f"{_format_day(p.first)}, the last "
            f"{_format_day(p.last)}: unless they count from a start of their own, name another column (columns: {{time: NAME}})"
        )
    longest = p.get_length_quantile(1.0)
    if (
        p.users >= _MANY_USERS
        and longest > _ONE_USER * p.events
        and longest > _LONGER * max(1, p.get_length_quantile(0.5))
    ):
        yield (
            f"one user has {longest:,} of {p.events:,} events, and the median user {p.get_length_quantile(0.5):,}: such a "
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
    if p.drift is not None and p.drift > NEW:
        yield f"{p.drift:.0%} of the newest tenth of the events are of items not seen before: no model knows those"


def _list_test_warnings(p: DataProfile, test: int, held_out: int) -> Iterator[str]:
    """Yield warnings about the test events at the end of users' histories."""
    tied, users = p.count_tied_tests(test, held_out)
    if not p.counted and users and tied > TIED * users:
        yield (
            f"{tied / users:.0%} of the tested users ({tied:,} of {users:,}) have a test event at the second of the event before "
            "it, so what is tested may be known from what is trained: `use: time` cuts between seconds"
        )
    tested = p.count_users_above(held_out)
    if tested < (1 - UNTESTED) * p.users:
        yield (
            f"{p.users - tested:,} of {p.users:,} users have under {held_out + 1} events: they are trained on and not tested"
        )
    if tested < FEW_TESTED:
        yield f"{tested:,} users are tested: differences of a few hundredths are noise"


def _format_day(unix_s: int) -> str:
    """Format a time as a date, or as seconds if it is out of the range of dates."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).date().isoformat()
    except (OverflowError, ValueError, OSError):
        return f"{unix_s} s"

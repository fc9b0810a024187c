"""Assigns events of a user to training, RL, validation and test.

Invariant: the codes of a user's events, in time order, never decrease: TRAIN, then RL, then VALID, then TEST. So the history of
a held-out event never contains an event of a later split, and the TRAIN events are a prefix of each user's events.

`leave_last_out` takes a user's newest `test` events, the `valid` events before them and the `rl` events before those; all events
of a user with too few of them are TRAIN. With `cold_items`, a share of the items is held out whole: their other events are left
out, so that none of them is in training. `time` cuts all users at the same times: test from the timestamp `test` on, validation
during the time span `valid` before it, RL during the time span `rl` before that. `leave_last_out` gives every user with enough
events a test; `time` matches production.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from nonet.errors import ConfigError, DataError
from nonet.options import Count, Positive, Share, StrictModel
from nonet.replaceable import Replaceable
from nonet.samples.tables import as_numbers, compute_keys
from nonet.suggest import join_names, suggest_sentence
from nonet.units import Seconds

TRAIN, RL, VALID, TEST = 0, 1, 2, 3
NAMES = ("train", "rl", "valid", "test")

_SECONDS_BY_UNIT = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def split_events(offsets: np.ndarray, time: np.ndarray, split: Mapping[str, Any]) -> np.ndarray:
    """Assign a split code [N] int8 to events that are sorted by time within each user.

    Args:
        offsets: First event of each user [U + 1].
        time: Unix seconds of each event [N].
        split: Options of the split.

    Raises:
        DataError: If no event is left to train on, or no user to test.
    """
    codes = compute_split_codes(offsets, time, split)
    check_split(split, SplitFacts.from_events(offsets, time, codes))
    return codes


def compute_split_codes(offsets: np.ndarray, time: np.ndarray, split: Mapping[str, Any]) -> np.ndarray:
    """Assign split codes to events of a part of the users, as `split_events` does, without its checks.

    `check_split` does these checks for all users together.

    Raises:
        ConfigError: An option of the split is unknown or invalid.
    """
    use = split.get("use", "leave_last_out")
    if use not in _SPLITS:
        raise ConfigError(
            f"split: use: {use!r} is not a split; there are {join_names(_SPLITS)}.{suggest_sentence(str(use), _SPLITS)}"
        )
    for name in split:
        known = ("test", "valid", "rl", *(("cold_items",) if use == "leave_last_out" else ()))
        if name not in ("use", *known):
            raise ConfigError(
                f"split: unknown key {name!r}; {use} takes {join_names(known)}.{suggest_sentence(name, known)}"
            )
    return _SPLITS[use](offsets, time, split)


class LeaveLastOut(StrictModel):
    """Numbers of the last events of each user that are held out, and the share of items that are held out whole."""

    test: Positive = 1
    valid: Count = 1
    rl: Count = 0
    cold_items: Annotated[
        Share | None,
        Field(
            description="share of the items, drawn by their ids, of which only validation and test have events: what a "
            "recommender does with new items"
        ),
    ] = None


class TimeSplit(StrictModel):
    """The time from which events are test events, and the time spans before it for validation and RL."""

    test: str
    valid: Seconds | None = None
    rl: Seconds | None = None


class Split(Replaceable):
    """The split of events into training, validation, test and RL events."""

    default: ClassVar[str] = "leave_last_out"
    shipped: ClassVar[dict[str, type[StrictModel]]] = {"leave_last_out": LeaveLastOut, "time": TimeSplit}


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """Counts and times of a split's events; those of parts of the users can be added with `+`.

    Attributes:
        users: Number of users.
        longest: Number of events of the user with the most events.
        first: Unix seconds of the oldest event.
        last: Unix seconds of the newest event.
        events: Number of events of each split, in the order of `NAMES`.
    """

    users: int = 0
    longest: int = 0
    first: int = np.iinfo(np.int64).max
    last: int = np.iinfo(np.int64).min
    events: tuple[int, ...] = (0,) * len(NAMES)

    @classmethod
    def from_events(cls, offsets: np.ndarray, time: np.ndarray, codes: np.ndarray) -> SplitFacts:
        """Compute the facts of events; `offsets` and `time` as in `split_events`, `codes` as it returns them."""
        limits = np.iinfo(np.int64)
        return cls(
            users=len(offsets) - 1,
            longest=int(np.diff(offsets).max(initial=0)),
            first=int(time.min(initial=limits.max)),
            last=int(time.max(initial=limits.min)),
            events=tuple(np.bincount(codes, minlength=len(NAMES)).tolist()),
        )

    def __add__(self, other: SplitFacts) -> SplitFacts:
        events = tuple(a + b for a, b in zip(self.events, other.events, strict=True))
        return SplitFacts(
            users=self.users + other.users,
            longest=max(self.longest, other.longest),
            first=min(self.first, other.first),
            last=max(self.last, other.last),
            events=events,
        )


def check_split(split: Mapping[str, Any], facts: SplitFacts) -> None:
    """Raise DataError if a split leaves no event to train on or no user to test."""
    if split.get("use", "leave_last_out") == "leave_last_out":
        test, valid, rl = (_parse_count(split, name) for name in ("test", "valid", "rl"))
        if 0 < facts.longest <= test + valid + rl:
            raise DataError(
                f"split test: {test}, valid: {valid}, rl: {rl} needs users with at least {test + valid + rl + 1} events; "
                f"the longest of {facts.users} users has {facts.longest}. Hold out fewer events, or keep more of the data."
            )
    elif sum(facts.events) and not facts.events[TEST]:
        raise DataError(
            f"split: test: {split['test']} leaves no user to evaluate: the events run from "
            f"{_format_iso(facts.first)} to {_format_iso(facts.last)}. Choose an earlier moment."
        )
    if not facts.events[TRAIN]:
        raise DataError(
            f"split {dict(split)} leaves no event to train on, of {sum(facts.events)}. Hold out less, or a "
            "shorter time."
        )


def draw_cold_items(split: Mapping[str, Any], item_id: Any) -> np.ndarray | None:
    """Return which items [I] bool are held out whole, drawn by the hash of their ids [I]; None if the split holds out none."""
    if not (share := split.get("cold_items")):
        return None
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ConfigError(f"split: cold_items: {share!r} is not a share of the items, from 0 to below 1.")
    key = compute_keys("cold items", as_numbers(item_id))
    return (key.view(np.uint64) >> np.uint64(11)) * 2.0**-53 < share


def mask_cold_events(
    offsets: np.ndarray, time: np.ndarray, is_cold: np.ndarray, split: Mapping[str, Any]
) -> np.ndarray:
    """Return which events [N] bool are kept, if the events of items that are held out whole must be validation or test events.

    Args:
        offsets: First event of each user [U + 1].
        time: Unix seconds of each event [N].
        is_cold: Whether each event is one of such an item [N].
        split: Options of the split.
    """
    user = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    kept = np.ones(len(user), bool)
    # A user who has lost events may have too few left to hold out any: then all are training events.
    while True:
        lengths = np.bincount(user[kept], minlength=len(offsets) - 1)
        codes = compute_split_codes(np.concatenate([[0], np.cumsum(lengths)]), time[kept], split)
        dropped = np.flatnonzero(kept)[is_cold[kept] & (codes < VALID)]
        if not len(dropped):
            return kept
        kept[dropped] = False


def parse_duration(duration: str | int | float, name: str = "duration") -> int:
    """Convert `1d`, `12h`, `30min`, `90s`, `2w` or a number of seconds to whole seconds; `name` is that of the option."""
    if isinstance(duration, int | float) and not isinstance(duration, bool) and duration >= 0:
        return int(duration)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", str(duration))
    if not match or match[2] not in _SECONDS_BY_UNIT:
        raise ConfigError(
            f"split: {name}: {duration!r} is not a duration. Write a number and a unit of {join_names(_SECONDS_BY_UNIT)}, "
            "such as 1d."
        )
    return int(float(match[1]) * _SECONDS_BY_UNIT[match[2]])


def parse_timestamp(value: object, name: str = "test") -> int:
    """Convert an ISO 8601 timestamp, or the value that YAML made of it, to unix seconds; without a zone it is UTC."""
    moment: datetime
    if isinstance(value, datetime):
        moment = value
    elif isinstance(value, date):
        moment = datetime(value.year, value.month, value.day)
    else:
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            raise ConfigError(
                f"split: {name}: {value!r} is not an ISO timestamp, such as 2026-11-19T00:00:00Z, which `use: "
                "time` wants."
            ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def get_part_starts(split: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the unix times from which on events are RL, VALID and TEST events; none if the split is not by time."""
    return _compute_starts(split) if split.get("use", "leave_last_out") == "time" else ()


def get_training_end(split: Mapping[str, Any]) -> int | None:
    """Return the unix time from which on no event is a TRAIN event; None if the split is not by time."""
    return next(iter(get_part_starts(split)), None)


def _split_leave_last_out(offsets: np.ndarray, time: np.ndarray, split: Mapping[str, Any]) -> np.ndarray:
    """Hold out the newest events of each user that has more events than are held out."""
    test, valid, rl = (_parse_count(split, name) for name in ("test", "valid", "rl"))
    lengths = np.diff(offsets)
    held_out = test + valid + rl
    from_end = np.repeat(offsets[1:], lengths) - 1 - np.arange(len(time))  # 0 for a user's newest event
    codes = np.full(len(time), TRAIN, np.int8)
    codes[from_end < held_out] = RL
    codes[from_end < test + valid] = VALID
    codes[from_end < test] = TEST
    codes[np.repeat(lengths <= held_out, lengths)] = TRAIN
    return codes


def _split_by_time(offsets: np.ndarray, time: np.ndarray, split: Mapping[str, Any]) -> np.ndarray:
    """Hold out the events of all users from the same times on; `offsets` is not used."""
    codes = np.full(len(time), TRAIN, np.int8)
    for start, code in zip(_compute_starts(split), (RL, VALID, TEST), strict=True):
        codes[time >= start] = code
    return codes


def _compute_starts(split: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the unix times from which on events are RL, VALID and TEST events."""
    if "test" not in split:
        raise ConfigError("split: use: time wants test: a timestamp from which on events are test events.")
    test_from = parse_timestamp(split["test"])
    # A part without a time span holds out nothing.
    valid_s, rl_s = (
        parse_duration(0 if (span := split.get(name)) is None else span, name) for name in ("valid", "rl")
    )
    return test_from - valid_s - rl_s, test_from - valid_s, test_from


def _parse_count(split: Mapping[str, Any], name: str) -> int:
    """Read a number of held-out events from the options. Raises ConfigError if it is not a count."""
    value = split.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"split: {name}: {value!r} is not a count of events; leave_last_out wants a whole number, 0 or more."
        )
    return value


def _format_iso(unix_s: int) -> str:
    """Return an ISO 8601 timestamp, or the number itself if it is outside the range of datetime."""
    try:
        return datetime.fromtimestamp(int(unix_s), UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return f"{unix_s} unix seconds"


_SPLITS = {"leave_last_out": _split_leave_last_out, "time": _split_by_time}

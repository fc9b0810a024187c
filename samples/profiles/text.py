"""Formats the profile of a data set as a table of text, one line per statistic."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from nonet.samples.profiles.profile import DataProfile
from nonet.samples.tables import UNIT_NAMES
from nonet.suggest import join_names

# Units of time: seconds and name.
_UNITS = ((604800, "week"), (86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def format_profile(profile: DataProfile) -> str:
    """Format a profile as indented lines, each with a name and a text."""
    rows = list(_iterate_rows(profile))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name.ljust(width)}  {text}" for name, text in rows)


def _iterate_rows(p: DataProfile) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line."""
    low, median, high, longest = (p.get_length_quantile(share) for share in (0.1, 0.5, 0.9, 1.0))
    yield "users", f"{p.users:,}; events each: {low} to {high}, median {median}, most {longest}"
    rare_items = int(p.items_of[:5].sum())
    yield (
        "items",
        f"{p.items:,}; {p.events / max(1, p.items):.1f} events each on average, {rare_items:,} have under 5",
    )
    yield "events", f"{p.events:,}, {p.events / max(1, p.users * p.items):.2%} of all pairs"
    yield "times", _format_times(p)
    duplicates = f", {p.duplicates:,} events are there twice" if p.duplicates else ""
    immediate = f", {p.immediate:.1%} to that of the event right before" if p.immediate else ""
    yield "repeats", f"{p.repeats:.1%} of events return to an item of their user{immediate}{duplicates}"
    if p.drift is not None:
        yield "drift", f"{p.drift:.1%} of the newest tenth of the events are of items not seen before it"
    if p.kinds:
        yield "kinds", join_names((f"{name} {count / p.events:.1%}" for name, count in p.kinds.items()), 6)
    if p.ratings:
        values = sorted(p.ratings)
        yield "ratings", f"{values[0]:g} to {values[-1]:g}, {len(values)} values"
    for name, example in p.zero_padded.items():
        yield (
            f"{name} ids",
            f"numbers with zeros in front, such as {example}: they are kept as text; write them alike in every table",
        )
    if p.columns:
        yield "item columns", join_names((f"{column.name} ({column.kind})" for column in p.columns), 8)


def _format_times(p: DataProfile) -> str:
    """Describe the range, the resolution and the ties of the times."""
    if p.counted:
        return "none: the place in the user's history stands for it"
    span = f"{_format_day(p.first)} to {_format_day(p.last)}"
    unit = next(
        ((size, name) for size, name in _UNITS if p.resolution_s and p.resolution_s % size == 0), None
    )
    implausible = f"; {p.implausible:,} are before 1990 or after next year" if p.implausible else ""
    if p.time_unit == "s":
        resolution, shared = f", to the {unit[1]}" if unit else "", "share one"
    else:
        resolution, shared = f", in {UNIT_NAMES[p.time_unit]}", "share a second"
    return f"{span}{resolution}; {p.ties:.1%} of neighbouring events of a user {shared}{implausible}"


def _format_day(unix_s: int) -> str:
    """Return the UTC date of a time, or the number of seconds if datetime cannot represent it."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).date().isoformat()
    except (OverflowError, ValueError, OSError):
        return f"{unix_s} s"

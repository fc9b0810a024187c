"""Times of any usual form as unix seconds.

The rule, first match wins: an Arrow timestamp or date has its own unit (without a zone it is UTC); text is ISO 8601 or YYYYMMDD;
a column whose name ends in _s, _ms, _us or _ns is in that unit; whole numbers that are all dates as YYYYMMDD are dates; else the
largest absolute value decides: below 1e11 seconds (the year 5138), below 1e14 milliseconds, below 1e17 microseconds, else
nanoseconds. Values of a coarser unit among them are an error, not the year 1970, and so is a name whose unit cannot be right.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_LARGEST = (("s", 1e11), ("ms", 1e14), ("us", 1e17))
_EARLIEST = 631_152_000  # 1990
_DATES = (19000101, 21001231)


def convert_to_seconds(
    column: pa.ChunkedArray, name: str, unit: str | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Convert a column of times without nulls to unix seconds.

    Args:
        column: Times [N].
        name: Name of the column, which may end in a unit.
        unit: Unit of numeric times if it is known from more values; None to determine it.

    Returns:
        Seconds [N] int64, and the raw values [N] if they are finer than seconds (None otherwise).

    Raises:
        TypeError: If the type cannot hold times.
        ValueError: If units are mixed, or the type is too coarse.
    """
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = _parse_text(column)
        kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("s")), pa.timestamp("s")
    if pa.types.is_timestamp(kind):
        raw, found = column.cast(pa.int64()).to_numpy(), str(kind.unit)
    elif is_plain(kind):
        raw = column.cast(pa.float64()).to_numpy() if not pa.types.is_integer(kind) else column.to_numpy()
        _check_precision(raw, kind)
        if (
            get_unit_by_name(name) is None
            and unit in (None, "s")
            and (dates := _parse_calendar_dates(raw)) is not None
        ):
            return dates, None
        found = _choose_unit(raw, name, unit)
    else:
        raise TypeError(str(kind))
    if found == "s" and np.issubdtype(raw.dtype, np.integer):
        return raw.astype(np.int64), None
    return np.floor_divide(raw, _PER_SECOND[found]).astype(np.int64), raw


def find_implausible(seconds: np.ndarray) -> np.ndarray:
    """Return which unix seconds [N] are before 1990 or after the end of next year, as no log of users is."""
    return (seconds < _EARLIEST) | (seconds >= _get_end_of_next_year())


def _get_end_of_next_year() -> int:
    year = time.gmtime().tm_year + 2
    return int(np.datetime64(f"{year}-01-01", "s").astype(np.int64))


def _parse_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Parse texts as timestamps in UTC: ISO 8601 with or without a zone, or digits. Raises TypeError for other text."""
    trimmed = pc.utf8_trim_whitespace(column)
    if pc.all(pc.match_substring_regex(trimmed, r"^-?\d+$")).as_py():
        return trimmed.cast(pa.int64())
    zoned = pc.match_substring_regex(trimmed, r"(Z|[+-]\d{2}:?\d{2})$")
    some, every = pc.any(zoned).as_py(), pc.all(zoned).as_py()
    dates = pc.all(pc.match_substring_regex(trimmed, r"^\d{4}-\d{2}-\d{2}$")).as_py()
    if some and not every and not dates:
        raise TypeError("text, of which some has a time zone and some has none")
    for unit in ("us", "ns"):
        try:
            zone = "UTC" if every and not dates else None
            return trimmed.cast(pa.timestamp(unit, zone))
        except pa.ArrowException:
            continue
    raise TypeError(str(column.type))


def _check_precision(raw: np.ndarray, kind: pa.DataType) -> None:
    """Raise ValueError for floats that are too coarse for the times they hold."""
    exact = {pa.float32(): 2.0**24, pa.float16(): 2.0**11}.get(kind)
    largest = float(np.abs(raw).max(initial=0.0)) if exact is not None else 0.0
    if exact is not None and largest > exact:
        step = int(2 ** (np.floor(np.log2(largest)) - np.log2(exact) + 1))
        raise ValueError(
            f"{kind} cannot hold such times, since its values are {step} apart there, so the order of events is "
            f"lost; write int64 or "
            "double from the source"
        )


def _parse_calendar_dates(raw: np.ndarray) -> np.ndarray | None:
    """Convert whole numbers that are all dates as YYYYMMDD to unix seconds [N]; None if one of them is not."""
    if not len(raw) or not ((raw >= _DATES[0]) & (raw <= _DATES[1])).all() or (raw != np.floor(raw)).any():
        return None
    distinct, place = np.unique(raw.astype(np.int64), return_inverse=True)
    year, month, day = distinct // 10000, distinct // 100 % 100, distinct % 100
    if not ((month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)).all():
        return None
    first = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1)
    when = first.astype("datetime64[D]") + (day - 1)
    if (when.astype("datetime64[M]") != first).any():
        return None
    return when.astype("datetime64[s]").astype(np.int64)[place]


def is_plain(kind: pa.DataType) -> bool:
    """Return whether times of this type are numbers, whose unit follows from the name or the size."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def get_unit_by_name(name: str) -> str | None:
    """Return the unit that a column's name ends in, or None."""
    ending = name.lower().rsplit("_", 1)[-1]
    return ending if "_" in name and ending in _PER_SECOND else None


def get_unit_by_size(largest: float) -> str:
    """Return the unit of numbers with this largest absolute value."""
    return next((unit for unit, limit in _LARGEST if largest < limit), "ns")


def _choose_unit(raw: np.ndarray, name: str, unit: str | None) -> str:
    """Determine the unit of numeric times. Raises ValueError if the values have different units."""
    size = np.abs(raw.astype(np.float64))
    by_size = get_unit_by_size(float(size.max(initial=0)))
    named = get_unit_by_name(name)
    if named:
        _check_named(raw, name, named, by_size)
        return named
    unit = unit or by_size
    finer = list(_PER_SECOND).index(unit)
    if finer:
        other = _LARGEST[finer - 1][0]
        coarse = (size > 0) & (size < _LARGEST[finer - 1][1])
        coarse &= ~find_implausible(
            np.floor_divide(raw, _PER_SECOND[other])
        )  # a small number may be a time near 1970
        if coarse.any():
            rest = raw[~coarse & (size > 0)]
            shown = f"{raw[coarse][0]:.15g}" + (f", {rest[0]:.15g}" if len(rest) else "")
            raise ValueError(
                f"{int(coarse.sum())} of {len(size)} values look like {other} and the others like {unit} "
                f"(the first: {shown})"
            )
    return unit


def _check_named(raw: np.ndarray, name: str, named: str, by_size: str) -> None:
    """Raise ValueError where no value is a plausible time in the unit of the name, and all are in another one."""
    if named == by_size or not len(raw):
        return
    as_named, as_sized = (np.floor_divide(raw, _PER_SECOND[unit]) for unit in (named, by_size))
    if find_implausible(as_named).all() and not find_implausible(as_sized).any():
        raise ValueError(
            f"the name {name!r} says {named}, in which no value is between 1990 and next year; in {by_size} all "
            f"are, so the name or the "
            "values are wrong"
        )

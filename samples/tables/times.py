"""Converts times of any usual form to unix seconds.

The first rule that applies determines the unit:

1. An Arrow timestamp or date has its own unit; without a time zone it is UTC.
2. Text is ISO 8601 or digits; digits are converted to numbers.
3. Numbers in a column whose name ends in _s, _ms, _us or _ns are in that unit.
4. Whole numbers that are all dates as YYYYMMDD are dates.
5. Other numbers have the unit that fits the largest absolute value: below 1e11 seconds (the year 5138), below 1e14 milliseconds,
   below 1e17 microseconds, else nanoseconds.

`convert_times` converts times that a user gives to a finished run: the unit of their numbers is that of the run's log.

Numbers of which some look like a coarser unit than the others are an error, and so is a name whose unit cannot be right.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import ConfigError, DataError

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
"""The names of the units of times."""
_SIZE_LIMITS = (("s", 1e11), ("ms", 1e14), ("us", 1e17))  # The largest absolute value of each unit; rule 5.
_EARLIEST_PLAUSIBLE_S = 631_152_000  # Unix seconds of 1990-01-01.
_CALENDAR_RANGE = (19000101, 21001231)  # The first and the last date of rule 4.


def convert_to_seconds(
    column: pa.ChunkedArray, name: str, unit: str | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Convert a column of times without nulls to unix seconds.

    Args:
        column: Times [N].
        name: Name of the column, which may end in a unit.
        unit: Unit of numeric times if it is known from more values than these; None to determine it.

    Returns:
        Seconds [N] int64, rounded down (floats to microseconds first), and the raw values [N] if they are finer than seconds
        (None otherwise).

    Raises:
        TypeError: If the type cannot hold times.
        ValueError: If units are mixed, or the type is too coarse.
    """
    raw, raw_unit = _read_numbers(column, name, unit)
    if raw_unit == "s" and np.issubdtype(raw.dtype, np.integer):
        return raw.astype(np.int64), None
    return _split_seconds(raw, raw_unit)[0], raw


def compute_fractions(column: pa.ChunkedArray, name: str, unit: str | None = None) -> np.ndarray | None:
    """Return the nanoseconds [N] int64 by which times are later than the seconds of `convert_to_seconds`.

    None stands for times that are whole seconds by their type. Arguments and errors are those of `convert_to_seconds`.
    """
    raw, raw_unit = _read_numbers(column, name, unit)
    if raw_unit == "s" and np.issubdtype(raw.dtype, np.integer):
        return None
    return _split_seconds(raw, raw_unit)[1]


def _split_seconds(raw: np.ndarray, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the unix seconds [N] int64 of numbers [N] of a unit, rounded down, and the nanoseconds [N] int64 that are left.

    Floats are rounded to microseconds first, about as fine as a float64 of today's unix seconds is, so that they are the same
    moment as a whole number of milliseconds or microseconds.
    """
    per_second = _PER_SECOND[unit]
    seconds, rest = np.divmod(raw, per_second)
    if np.issubdtype(raw.dtype, np.integer):
        return seconds.astype(np.int64), (rest * (1_000_000_000 // per_second)).astype(np.int64)
    microseconds = np.rint(rest * (1e6 / per_second)).astype(np.int64)
    return seconds.astype(np.int64) + microseconds // 1_000_000, microseconds % 1_000_000 * 1_000


def _read_numbers(column: pa.ChunkedArray, name: str, unit: str | None) -> tuple[np.ndarray, str]:
    """Return times as numbers [N], and their unit; arguments and errors are those of `convert_to_seconds`."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = _parse_text(column)
        kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("s")), pa.timestamp("s")
    if pa.types.is_timestamp(kind):
        return column.cast(pa.int64()).to_numpy(), str(kind.unit)  # Rules 1 and 2.
    if not is_plain(kind):
        raise TypeError(str(kind))
    raw = column.cast(pa.float64()).to_numpy() if not pa.types.is_integer(kind) else column.to_numpy()
    _check_precision(raw, kind)
    may_be_dates = get_unit_by_name(name) is None and unit in (None, "s")
    if may_be_dates and (date_seconds := _parse_calendar_dates(raw)) is not None:
        return date_seconds, "s"
    return raw, _choose_unit(raw, name, unit)


def convert_times(
    values: Sequence[Any] | np.ndarray | pa.Array | pa.ChunkedArray, unit: str, label: str = "time"
) -> np.ndarray:
    """Convert times that a user gives to a run to unix seconds.

    Args:
        values: Times [N]: numbers in `unit`, ISO 8601 texts, dates and timestamps, also mixed. Without a time zone they are UTC.
        unit: Unit of the numbers in the log of the run: "s", "ms", "us" or "ns".
        label: Prefix of error messages.

    Returns:
        Seconds [N] int64, rounded down.

    Raises:
        ConfigError: The unit is unknown.
        DataError: A value is no moment of this unit. A number is none if it is so large that it has a finer unit, or if it is
            between 1990 and the end of next year only in another unit.
    """
    if unit not in _PER_SECOND:
        raise ConfigError(f"time unit {unit!r}: there are {', '.join(_PER_SECOND)}.")
    given: Any = values
    if isinstance(given, pa.Array | pa.ChunkedArray):
        given = _parse_column(given)
        if (pa.types.is_timestamp(given.type) or pa.types.is_date(given.type)) and not given.null_count:
            return convert_to_seconds(given, label)[0]
        given = given.cast(pa.float64()) if pa.types.is_decimal(given.type) else given
        given = given.to_pylist() if given.null_count or not is_plain(given.type) else given.to_numpy()
    if isinstance(given, np.ndarray) and given.dtype.kind in "iuf":
        return _convert_numbers(given, unit, label)
    seconds = np.empty(len(given), np.int64)
    numbers = [i for i, value in enumerate(given) if _is_number(value)]
    seconds[numbers] = _convert_numbers(np.array([given[i] for i in numbers]), unit, label)
    for i in sorted(set(range(len(given))).difference(numbers)):
        seconds[i] = _convert_moment(given[i], unit, label)
    return seconds


def _parse_column(column: Any) -> pa.ChunkedArray:
    """Parse a column of texts that are all digits or all ISO 8601; return other columns unchanged."""
    column = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    if (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)) and not column.null_count:
        with suppress(TypeError):  # Mixed or wrong texts are parsed one by one.
            return _parse_text(column)
    return column


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, and not a boolean."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _convert_numbers(raw: np.ndarray, unit: str, label: str) -> np.ndarray:
    """Convert numbers [N] of a unit to unix seconds [N] int64. Raises DataError if one of them is no moment of this unit."""
    if raw.dtype == object or raw.dtype.kind == "u":  # Python integers of more than 63 bits are objects.
        raw = np.array([float(value) if abs(value) >= 2**63 else int(value) for value in raw.tolist()])
    sizes = np.abs(raw.astype(np.float64))
    limit = dict(_SIZE_LIMITS).get(unit, 2.0**63)
    with np.errstate(invalid="ignore"):
        is_wrong = ~(sizes < limit)
        seconds = _split_seconds(raw, unit)[0]
        is_doubtful = ~is_wrong & find_implausible(seconds)
        for other, per_second in _PER_SECOND.items():
            if other != unit and is_doubtful.any():
                is_wrong |= is_doubtful & ~find_implausible(np.floor_divide(raw, per_second))
    if is_wrong.any():
        raise _make_moment_error(raw[is_wrong][0].item(), unit, label)
    return seconds


def _convert_moment(value: Any, unit: str, label: str) -> int:
    """Convert a text, a date or a datetime to unix seconds. Raises DataError for other values."""
    try:
        if isinstance(value, str):
            column = _parse_text(pa.chunked_array([[value]]))
            if pa.types.is_integer(column.type):
                return int(_convert_numbers(column.to_numpy(), unit, label)[0])
            return int(convert_to_seconds(column, label)[0][0])
        if isinstance(value, date | datetime | np.datetime64):
            return int(convert_to_seconds(pa.chunked_array([[value]]), label)[0][0])
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        if isinstance(error, DataError):
            raise
    raise _make_moment_error(value, unit, label)


def _make_moment_error(value: Any, unit: str, label: str) -> DataError:
    """Build the error for a value that is no moment of a unit."""
    return DataError(
        f"{label}: {value!r} is no moment in {UNIT_NAMES[unit]}; the log of the run counts {UNIT_NAMES[unit]} since 1970. "
        "Convert it, or write ISO text such as 2026-11-26T12:00:00Z"
    )


def find_implausible(seconds: np.ndarray) -> np.ndarray:
    """Return which unix seconds [N] are before 1990 or after the end of next year, and so are no times of user events."""
    return (seconds < _EARLIEST_PLAUSIBLE_S) | (seconds >= _get_end_of_next_year())


def _get_end_of_next_year() -> int:
    """Return the unix seconds at which the year after the next one begins."""
    year = time.gmtime().tm_year + 2
    return int(np.datetime64(f"{year}-01-01", "s").astype(np.int64))


def _parse_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Parse texts: ISO 8601, with or without a time zone, to timestamps in UTC, and digits to int64.

    Raises:
        TypeError: If a text is neither, or some texts have a time zone and others have none.
    """
    trimmed = pc.utf8_trim_whitespace(column)
    if pc.all(pc.match_substring_regex(trimmed, r"^-?\d+$")).as_py():
        try:
            return trimmed.cast(pa.int64())
        except pa.ArrowException:
            raise TypeError("text with more digits than a time has") from None
    has_zone = pc.match_substring_regex(trimmed, r"(Z|[+-]\d{2}:?\d{2})$")
    some_have_zone, all_have_zone = pc.any(has_zone).as_py(), pc.all(has_zone).as_py()
    all_are_dates = pc.all(pc.match_substring_regex(trimmed, r"^\d{4}-\d{2}-\d{2}$")).as_py()
    if some_have_zone and not all_have_zone and not all_are_dates:
        raise TypeError("text, of which some has a time zone and some has none")
    for unit in ("us", "ns"):  # Nanoseconds only if a text has more than six decimals.
        try:
            zone = "UTC" if all_have_zone and not all_are_dates else None
            return trimmed.cast(pa.timestamp(unit, zone))
        except pa.ArrowException:
            continue
    raise TypeError(str(column.type))


def _check_precision(raw: np.ndarray, kind: pa.DataType) -> None:
    """Raise ValueError for float32 and float16 values that are too large to be exact integers."""
    max_exact = {pa.float32(): 2.0**24, pa.float16(): 2.0**11}.get(kind)
    largest = float(np.abs(raw).max(initial=0.0)) if max_exact is not None else 0.0
    if max_exact is not None and largest > max_exact:
        # The distance between neighbouring values of the type at the largest value.
        step = int(2 ** (np.floor(np.log2(largest)) - np.log2(max_exact) + 1))
        raise ValueError(
            f"{kind} cannot hold such times, since its values are {step} apart there, so the order of events is "
            "lost; write int64 or double from the source"
        )


def _parse_calendar_dates(raw: np.ndarray) -> np.ndarray | None:
    """Convert whole numbers that are all dates as YYYYMMDD to unix seconds [N]; None if one of them is not."""
    if (
        not len(raw)
        or not ((raw >= _CALENDAR_RANGE[0]) & (raw <= _CALENDAR_RANGE[1])).all()
        or (raw != np.floor(raw)).any()
    ):
        return None
    distinct_dates, date_index = np.unique(raw.astype(np.int64), return_inverse=True)
    year, month, day = distinct_dates // 10000, distinct_dates // 100 % 100, distinct_dates % 100
    if not ((month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)).all():
        return None
    months = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1)
    days = months.astype("datetime64[D]") + (day - 1)
    # A day such as the 31st of April is in the next month.
    if (days.astype("datetime64[M]") != months).any():
        return None
    return days.astype("datetime64[s]").astype(np.int64)[date_index]


def is_plain(kind: pa.DataType) -> bool:
    """Return whether times of this type are numbers, whose unit is determined by the column's name or their size."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def find_unit(column: pa.ChunkedArray, name: str) -> str:
    """Return the unit ("s", "ms", "us" or "ns") of the numbers in a column of times; "s" for timestamps, dates and ISO text.

    Raises:
        TypeError: If texts are no times.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = _parse_text(column)
    if not is_plain(column.type):
        return "s"
    return get_unit_by_name(name) or get_unit_by_size(
        float(pc.max(pc.abs(column.cast(pa.float64(), safe=False))).as_py() or 0)
    )


def get_unit_by_name(name: str) -> str | None:
    """Return the unit ("s", "ms", "us" or "ns") that a column's name ends in, or None."""
    ending = name.lower().rsplit("_", 1)[-1]
    return ending if "_" in name and ending in _PER_SECOND else None


def get_unit_by_size(largest: float) -> str:
    """Return the unit ("s", "ms", "us" or "ns") of times whose largest absolute value is `largest`."""
    return next((unit for unit, limit in _SIZE_LIMITS if largest < limit), "ns")


def _choose_unit(raw: np.ndarray, name: str, unit: str | None) -> str:
    """Determine the unit of numeric times.

    Args:
        raw: The values [N].
        name: Name of the column.
        unit: The unit if it is known from more values and the name has none; None to determine it.

    Raises:
        ValueError: If the values have different units, or the unit of the name cannot be right.
    """
    sizes = np.abs(raw.astype(np.float64))
    unit_of_size = get_unit_by_size(float(sizes.max(initial=0)))
    unit_of_name = get_unit_by_name(name)
    if unit_of_name:
        _check_unit_of_name(raw, name, unit_of_name, unit_of_size)
        return unit_of_name
    unit = unit or unit_of_size
    unit_index = list(_PER_SECOND).index(unit)
    if unit_index:
        coarser_unit = _SIZE_LIMITS[unit_index - 1][0]
        looks_coarser = (sizes > 0) & (sizes < _SIZE_LIMITS[unit_index - 1][1])
        # A small number that is no plausible time in the coarser unit may be a time near 1970 in this unit.
        looks_coarser &= ~find_implausible(np.floor_divide(raw, _PER_SECOND[coarser_unit]))
        if looks_coarser.any():
            others = raw[~looks_coarser & (sizes > 0)]
            examples = f"{raw[looks_coarser][0]:.15g}" + (f", {others[0]:.15g}" if len(others) else "")
            raise ValueError(
                f"{int(looks_coarser.sum())} of {len(sizes)} values look like {coarser_unit} and the others like {unit} "
                f"(the first: {examples})"
            )
    return unit


def _check_unit_of_name(raw: np.ndarray, name: str, unit_of_name: str, unit_of_size: str) -> None:
    """Raise ValueError if no value is a plausible time in the unit of the name, but all are in the unit of their size."""
    if unit_of_name == unit_of_size or not len(raw):
        return
    seconds_by_name, seconds_by_size = (
        np.floor_divide(raw, _PER_SECOND[unit]) for unit in (unit_of_name, unit_of_size)
    )
    if find_implausible(seconds_by_name).all() and not find_implausible(seconds_by_size).any():
        raise ValueError(
            f"the name {name!r} says {unit_of_name}, in which no value is between 1990 and next year; in {unit_of_size} all "
            "are, so the name or the values are wrong"
        )

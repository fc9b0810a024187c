"""Times of any usual form as unix seconds.

The rule, first match wins: an Arrow timestamp or date has its own unit (without a zone it is UTC); a column
whose name ends in _s, _ms, _us or _ns is in that unit; else the largest absolute value decides: below 1e11
seconds (the year 5138), below 1e14 milliseconds, below 1e17 microseconds, else nanoseconds.
Values of a coarser unit among them are an error, not the year 1970.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_LARGEST = (("s", 1e11), ("ms", 1e14), ("us", 1e17))


def unix_seconds(
    column: pa.ChunkedArray, name: str, unit: str | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Seconds [N] int64, and the raw values [N] when they are finer than that, to order events in a second.

    The column has no nulls. `unit` of plain numbers, where it is known from more values than these. A type that is no time
    raises TypeError; one that mixes units ValueError.
    """
    kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("s")), pa.timestamp("s")
    if pa.types.is_timestamp(kind):
        raw, found = column.cast(pa.int64()).to_numpy(), str(kind.unit)
    elif is_plain(kind):
        raw = column.cast(pa.float64()).to_numpy() if not pa.types.is_integer(kind) else column.to_numpy()
        found = _unit(raw, name, unit)
    else:
        raise TypeError(str(kind))
    if found == "s" and np.issubdtype(raw.dtype, np.integer):
        return raw.astype(np.int64), None
    return np.floor_divide(raw, _PER_SECOND[found]).astype(np.int64), raw


def is_plain(kind: pa.DataType) -> bool:
    """Whether times are numbers, whose unit only their name or their size tells."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def unit_by_name(name: str) -> str | None:
    """The unit that a column's name ends in."""
    ending = name.lower().rsplit("_", 1)[-1]
    return ending if "_" in name and ending in _PER_SECOND else None


def unit_by_size(largest: float) -> str:
    """The unit of numbers whose largest absolute value this is."""
    return next((unit for unit, limit in _LARGEST if largest < limit), "ns")


def _unit(raw: np.ndarray, name: str, unit: str | None) -> str:
    named = unit_by_name(name)
    if named:
        return named
    size = np.abs(raw.astype(np.float64))
    unit = unit or unit_by_size(float(size.max(initial=0)))
    finer = list(_PER_SECOND).index(unit)
    if finer:
        coarse = (size > 0) & (size < _LARGEST[finer - 1][1])
        if coarse.any():
            other = raw[~coarse & (size > 0)]
            shown = f"{raw[coarse][0]:.15g}" + (f", {other[0]:.15g}" if len(other) else "")
            raise ValueError(
                f"{int(coarse.sum())} of {len(size)} values look like {_LARGEST[finer - 1][0]} and the others like {unit} "
                f"(the first: {shown})"
            )
    return unit

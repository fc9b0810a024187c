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


def unix_seconds(column: pa.ChunkedArray, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Seconds [N] int64, and the raw values [N] when they are finer than that, to order events in a second.

    The column has no nulls. A type that is no time raises TypeError; one that mixes units ValueError.
    """
    kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("s")), pa.timestamp("s")
    if pa.types.is_timestamp(kind):
        raw, unit = column.cast(pa.int64()).to_numpy(), kind.unit
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        raw = column.cast(pa.float64()).to_numpy() if not pa.types.is_integer(kind) else column.to_numpy()
        unit = _unit(raw, name)
    else:
        raise TypeError(str(kind))
    if unit == "s" and np.issubdtype(raw.dtype, np.integer):
        return raw.astype(np.int64), None
    return np.floor_divide(raw, _PER_SECOND[unit]).astype(np.int64), raw


def _unit(raw: np.ndarray, name: str) -> str:
    ending = name.lower().rsplit("_", 1)[-1]
    if "_" in name and ending in _PER_SECOND:
        return ending
    size = np.abs(raw.astype(np.float64))
    largest = float(size.max(initial=0))
    unit = next((unit for unit, limit in _LARGEST if largest < limit), "ns")
    finer = list(_PER_SECOND).index(unit)
    if finer:
        coarse = (size > 0) & (size < _LARGEST[finer - 1][1])
        if coarse.any():
            raise ValueError(
                f"{int(coarse.sum())} of {len(size)} values look like {_LARGEST[finer - 1][0]} and the others like {unit} "
                f"(the first: {raw[coarse][0]:.15g}, {raw[~coarse & (size > 0)][0]:.15g})"
            )
    return unit

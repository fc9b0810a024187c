"""Statistics of files from one pass: rows, row groups, bad rows, and the contents of each column."""

# Shapes: B rows, N values of a list column.

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.samples.ledger import OrderSlice
from nonet.samples.streams.feed import RawSlice, StreamFeed
from nonet.samples.streams.local_engine import read_locally
from nonet.samples.streams.stream import Paths, read

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

_MAX_LENGTH = 1 << 16  # Longer lists are counted as having this length.


def measure_files(paths: Paths, *, format: str | None = None, where: str | None = None) -> dict[str, Any]:
    """Measure the files of a stream in one pass; memory does not grow with the files.

    Args:
        paths: Paths of the files.
        format: Format of the files; None to detect it.
        where: Condition on the rows.

    Returns:
        {"files", "bytes", "groups", "rows", "bad_rows", "filtered_rows", "seconds", "rows_per_s", "columns": {name: facts}}.
        The facts of a column are its type, number of missing values, least and largest number, and for lists the number of
        values and quantiles of the lengths.

    Raises:
        DataError: If files cannot be read.
    """
    # Larger slices than those of training, because a slice has a fixed cost.
    feed: StreamFeed = read(paths, format=format, where=where, on_bad_rows="skip").open(rows=1 << 14)
    (leaf,) = feed.leaves
    columns = {field.name: _ColumnStats(field.type) for field in leaf.schema}
    started_s, kept_count, bad_count = time.perf_counter(), 0, 0
    for raw in _read_slices(feed):
        kept_count, bad_count = kept_count + len(raw.rows), bad_count + len(raw.skipped)
        for name, column in columns.items():
            column.add(raw.rows.column(name))
    seconds = time.perf_counter() - started_s
    return {
        "files": len(leaf.manifest.files),
        "bytes": leaf.bytes,
        "groups": len(leaf.manifest.group_rows),
        "rows": leaf.manifest.rows,
        "bad_rows": bad_count,
        "filtered_rows": leaf.manifest.rows - kept_count - bad_count,
        "seconds": round(seconds, 3),
        "rows_per_s": round(feed.rows / max(1e-9, seconds)),
        "columns": {name: column.get_facts() for name, column in columns.items()},
    }


def _read_slices(feed: StreamFeed) -> Iterator[RawSlice]:
    """Read all slices of one epoch."""
    slices: Iterator[OrderSlice] = (
        order_slice for step in range(feed.steps.steps_per_epoch) for order_slice in feed.get_slices(step)
    )
    return read_locally(feed, slices)


class _ColumnStats:
    """Accumulates the statistics of one column."""

    def __init__(self, kind: pa.DataType):
        self._kind, self._missing_count, self._value_count = kind, 0, 0
        self._min: Any = None
        self._max: Any = None
        self._is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        # The number of lists of each length.
        self._length_counts = np.zeros(_MAX_LENGTH + 1 if self._is_list else 0, np.int64)

    def add(self, array: pa.Array) -> None:
        """Add the values of the column in one slice."""
        self._missing_count += array.null_count
        if self._is_list:
            lengths = np.minimum(np.diff(array.offsets.to_numpy()), _MAX_LENGTH)
            self._length_counts += np.bincount(lengths, minlength=_MAX_LENGTH + 1)
            array = array.flatten()
        self._value_count += len(array)
        if pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
            min_and_max = pc.min_max(array).as_py()
            if min_and_max["min"] is not None:
                self._min = min_and_max["min"] if self._min is None else min(self._min, min_and_max["min"])
                self._max = min_and_max["max"] if self._max is None else max(self._max, min_and_max["max"])

    def get_facts(self) -> dict[str, Any]:
        """Return the statistics of the column by name; see `measure_files`."""
        facts: dict[str, Any] = {"type": str(self._kind), "missing": self._missing_count}
        if self._min is not None:
            facts |= {"least": self._min, "largest": self._max}
        if self._is_list:
            cumulative_counts = np.cumsum(self._length_counts)
            quantiles = {
                f"p{percent}": int(np.searchsorted(cumulative_counts, percent / 100 * cumulative_counts[-1]))
                for percent in (50, 90, 99)
            }
            facts |= {
                "values": self._value_count,
                "lengths": {**quantiles, "most": int(np.flatnonzero(self._length_counts).max(initial=0))},
            }
        return facts

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

_MOST = 1 << 16  # longer lists are counted with this length


def measure_files(paths: Paths, *, format: str | None = None, where: str | None = None) -> dict[str, Any]:
    """Measure the files of a stream in one pass; memory does not grow with the files.

    Args:
        paths: Paths of the files.
        format: Format of the files; None to detect it.
        where: Condition on the rows.

    Returns:
        {"files", "bytes", "groups", "rows", "bad_rows", "filtered_rows", "seconds", "rows_per_s", "columns": {name:
        facts}}. The
        facts of a column are its type, missing values, least and largest number; for lists also values and quantiles of
        lengths.

    Raises:
        DataError: If files cannot be read.
    """
    feed: StreamFeed = read(paths, format=format, where=where, on_bad_rows="skip").open(rows=1 << 14)
    (leaf,) = feed.leaves
    columns = {field.name: _ColumnStats(field.type) for field in leaf.schema}
    began, kept, bad = time.perf_counter(), 0, 0
    for raw in _read_slices(feed):
        kept, bad = kept + len(raw.rows), bad + len(raw.skipped)
        for name, column in columns.items():
            column.add(raw.rows.column(name))
    seconds = time.perf_counter() - began
    return {
        "files": len(leaf.manifest.files),
        "bytes": leaf.bytes,
        "groups": len(leaf.manifest.group_rows),
        "rows": leaf.manifest.rows,
        "bad_rows": bad,
        "filtered_rows": leaf.manifest.rows - kept - bad,
        "seconds": round(seconds, 3),
        "rows_per_s": round(feed.rows / max(1e-9, seconds)),
        "columns": {name: column.get_facts() for name, column in columns.items()},
    }


def _read_slices(feed: StreamFeed) -> Iterator[RawSlice]:
    slices: Iterator[OrderSlice] = (
        part for step in range(feed.steps.an_epoch) for part in feed.get_slices(step)
    )
    return read_locally(feed, slices)


class _ColumnStats:
    """Accumulates the statistics of one column."""

    def __init__(self, kind: pa.DataType):
        self._kind, self._missing, self._values = kind, 0, 0
        self._least: Any = None
        self._largest: Any = None
        self._lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        self._lengths = np.zeros(_MOST + 1, np.int64) if self._lists else np.zeros(0, np.int64)

    def add(self, array: pa.Array) -> None:
        self._missing += array.null_count
        if self._lists:
            lengths = np.minimum(np.diff(array.offsets.to_numpy()), _MOST)
            self._lengths += np.bincount(lengths, minlength=_MOST + 1)
            array = array.flatten()
        self._values += len(array)
        if pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
            ends = pc.min_max(array).as_py()
            if ends["min"] is not None:
                self._least = ends["min"] if self._least is None else min(self._least, ends["min"])
                self._largest = ends["max"] if self._largest is None else max(self._largest, ends["max"])

    def get_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"type": str(self._kind), "missing": self._missing}
        if self._least is not None:
            facts |= {"least": self._least, "largest": self._largest}
        if self._lists:
            ends = np.cumsum(self._lengths)
            at = {f"p{q}": int(np.searchsorted(ends, q / 100 * ends[-1])) for q in (50, 90, 99)}
            facts |= {
                "values": self._values,
                "lengths": {**at, "most": int(np.flatnonzero(self._lengths).max(initial=0))},
            }
        return facts

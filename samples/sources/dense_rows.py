"""Converts rows of files to the run's own ids and checks every list against the items."""

# Shapes: B rows, N events.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import DataError
from nonet.samples.preparation import ItemIndex
from nonet.samples.tables import as_numbers, compute_keys, convert_to_seconds

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them


@dataclass(frozen=True)
class DenseRowConverter:
    """Converts rows to the run's own numbers: user_key [B] int64, item [N] int32 dense, time [N] int64.

    Attributes:
        user, items, time: columns of the rows.
        index: the run's catalogue.
        unit: the unit of times that are plain numbers; None to decide by their name or size.
        until: unix seconds from which on `data.split` holds events out; None where it does not say.
    """

    user: str
    items: str
    time: str | None
    index: ItemIndex
    unit: str | None = None
    until: int | None = None
    keeps_rows: ClassVar[bool] = True
    """Every row stays a row, so the order of rows does not depend on this class."""

    def __call__(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        """Convert a batch of rows.

        Raises:
            DataError: If a column is missing or has the wrong type, or an item is not in the catalogue.
        """
        for name in filter(None, (self.user, self.items, self.time)):
            if name not in rows.schema.names:
                raise DataError(f"data.source: no column {name!r}; there are {', '.join(rows.schema.names)}")
        values, offsets = flatten_lists(rows.column(self.items), self.items)
        item = self._index_items(values)
        times = (
            np.arange(len(values))
            if self.time is None
            else self._convert_times(rows.column(self.time), offsets)
        )
        cuts = pa.array(offsets)
        return {
            "user_key": pa.array(compute_keys("user", as_numbers(rows.column(self.user)))),
            "item": pa.ListArray.from_arrays(cuts, pa.array(item)),
            "time": pa.ListArray.from_arrays(cuts, pa.array(times)),
        }

    def _index_items(self, values: pa.Array) -> np.ndarray:
        """Return catalogue rows [N] int32."""
        if values.null_count:
            raise DataError(
                f"data.source: {values.null_count} values of {self.items!r} are missing; write lists without them"
            )
        try:
            item = self.index.find(values)
        except DataError as error:
            raise DataError(f"data.source: column {self.items!r}: {error}") from None
        absent = np.flatnonzero(item < 0)
        if len(absent):
            raise DataError(
                f"data.source: {len(absent)} events are of items that data.items does not hold, "
                f"the first: {values[int(absent[0])].as_py()!r}"
            )
        return item

    def _convert_times(self, column: pa.Array, offsets: np.ndarray) -> np.ndarray:
        """Return unix seconds [N] int64. Raises DataError if they do not match the items or cannot be trained on."""
        assert self.time is not None
        values, own = flatten_lists(column, self.time)
        unlike = np.flatnonzero(np.diff(own) != np.diff(offsets))
        if len(unlike):
            row = int(unlike[0])
            raise DataError(
                f"data.source: {len(unlike)} of {len(column)} rows have another number of {self.time!r} than of {self.items!r}, "
                f"the first: {own[row + 1] - own[row]} and {offsets[row + 1] - offsets[row]}; write a time for each item"
            )
        if values.null_count:
            raise DataError(
                f"data.source: {values.null_count} values of {self.time!r} are missing; write a time for each item"
            )
        try:
            seconds, finer = convert_to_seconds(pa.chunked_array([values]), self.time, self.unit)
        except TypeError as error:
            raise DataError(
                f"data.source: column {self.time!r} holds {error}; it must hold lists of timestamps or numbers"
            ) from None
        except ValueError as error:
            raise DataError(
                f"data.source: column {self.time!r}: {error}. Say data.source.unit: s, ms, us or ns"
            ) from None
        ordered = seconds if finer is None else finer
        back = np.flatnonzero(np.diff(ordered) < 0) + 1
        back = back[~np.isin(back, offsets)]
        if len(back):
            raise DataError(
                f"data.source: {len(back)} values of {self.time!r} are before the one in front of them in their row; write each "
                "row's events in the order of time"
            )
        if self.until is not None and (late := int((seconds >= self.until).sum())):
            raise DataError(
                f"data.source: {late} of {len(seconds)} events are of {self.until} unix seconds or later, where data.split "
                "begins to hold events out; write files that end before it, or give a later data.split.test"
            )
        return seconds


def flatten_lists(column: pa.Array, name: str) -> tuple[pa.Array, np.ndarray]:
    """Return the values [N] of a list column and the offsets [B + 1] int32; a missing list is empty."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise DataError(f"data.source: column {name!r} is {kind}; it must be a list of each row's events")
    lengths = np.asarray(pc.list_value_length(column).fill_null(0))
    return column.flatten(), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

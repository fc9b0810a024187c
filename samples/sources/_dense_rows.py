"""Converts the rows of users' files to item indices, user keys and unix seconds, and checks them."""

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
    """Converts rows to `user_key` [B] int64, and lists of `item` [N] int32 (dense item indices) and `time` [N] int64.

    Attributes:
        user: Column of user ids.
        items: List column of item ids.
        time: List column of times; None to number the events instead.
        index: The index of the run's catalogue of items.
        unit: Unit of times that are plain numbers; None to determine it by their name or size.
        until: Unix seconds from which on `data.split` holds events out; None for no end.
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
        item_ids, offsets = flatten_lists(rows.column(self.items), self.items)
        item_index = self._find_item_indices(item_ids)
        times = (
            np.arange(len(item_ids))
            if self.time is None
            else self._convert_times(rows.column(self.time), offsets)
        )
        offsets_array = pa.array(offsets)
        return {
            "user_key": pa.array(compute_keys("user", as_numbers(rows.column(self.user)))),
            "item": pa.ListArray.from_arrays(offsets_array, pa.array(item_index)),
            "time": pa.ListArray.from_arrays(offsets_array, pa.array(times)),
        }

    def _find_item_indices(self, item_ids: pa.Array) -> np.ndarray:
        """Return the dense indices [N] int32 of items. Raises DataError if one is missing or not in the catalogue."""
        if item_ids.null_count:
            raise DataError(
                f"data.source: {item_ids.null_count} values of {self.items!r} are missing; write lists without them"
            )
        try:
            item_index = self.index.find(item_ids)
        except DataError as error:
            raise DataError(f"data.source: column {self.items!r}: {error}") from None
        unknown = np.flatnonzero(item_index < 0)
        if len(unknown):
            raise DataError(
                f"data.source: {len(unknown)} events are of items that data.items does not hold, "
                f"the first: {item_ids[int(unknown[0])].as_py()!r}"
            )
        return item_index

    def _convert_times(self, column: pa.Array, offsets: np.ndarray) -> np.ndarray:
        """Convert the times of events to unix seconds.

        Args:
            column: The list column of times [B].
            offsets: Offsets [B + 1] of the items of each row, which the times must match.

        Returns:
            Unix seconds [N] int64.

        Raises:
            DataError: If the times do not match the items, are no valid times, are not ascending, or are held out.
        """
        assert self.time is not None
        values, own_offsets = flatten_lists(column, self.time)
        unequal_rows = np.flatnonzero(np.diff(own_offsets) != np.diff(offsets))
        if len(unequal_rows):
            row = int(unequal_rows[0])
            raise DataError(
                f"data.source: {len(unequal_rows)} of {len(column)} rows have another number of {self.time!r} than of "
                f"{self.items!r}, the first: {own_offsets[row + 1] - own_offsets[row]} and "
                f"{offsets[row + 1] - offsets[row]}; write a time for each item"
            )
        if values.null_count:
            raise DataError(
                f"data.source: {values.null_count} values of {self.time!r} are missing; write a time for each item"
            )
        try:
            seconds, raw_times = convert_to_seconds(pa.chunked_array([values]), self.time, self.unit)
        except TypeError as error:
            raise DataError(
                f"data.source: column {self.time!r} holds {error}; it must hold lists of timestamps or numbers"
            ) from None
        except ValueError as error:
            raise DataError(
                f"data.source: column {self.time!r}: {error}. Say data.source.unit: s, ms, us or ns"
            ) from None
        finest_times = seconds if raw_times is None else raw_times
        # Events that are earlier than the one before them.
        earlier = np.flatnonzero(np.diff(finest_times) < 0) + 1
        earlier = earlier[~np.isin(earlier, offsets)]  # The first event of a row has none before it.
        if len(earlier):
            raise DataError(
                f"data.source: {len(earlier)} values of {self.time!r} are before the one in front of them in their row; write "
                "each row's events in the order of time"
            )
        if self.until is not None and (late_count := int((seconds >= self.until).sum())):
            raise DataError(
                f"data.source: {late_count} of {len(seconds)} events are of {self.until} unix seconds or later, where data.split "
                "begins to hold events out; write files that end before it, or give a later data.split.test"
            )
        return seconds


def flatten_lists(column: pa.Array, name: str) -> tuple[pa.Array, np.ndarray]:
    """Flatten a list column; a missing list counts as empty.

    Args:
        column: The list column [B].
        name: Name of the column, for messages.

    Returns:
        The values [N], and the offsets [B + 1] int32 of each row's values.

    Raises:
        DataError: If the column is no list column.
    """
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise DataError(f"data.source: column {name!r} is {kind}; it must be a list of each row's events")
    lengths = np.asarray(pc.list_value_length(column).fill_null(0))
    return column.flatten(), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

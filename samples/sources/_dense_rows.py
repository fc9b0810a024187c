"""Converts the rows of users' files to item indices, user keys and unix seconds, and checks them."""

# Shapes: B rows, N events.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import DataError
from nonet.samples.preparation import ItemIndex
from nonet.samples.sequences import convert_column
from nonet.samples.tables import as_numbers, compute_keys, convert_to_seconds, match_rows
from nonet.suggest import join_names

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them


@dataclass(frozen=True)
class DenseRowConverter:
    """Converts rows to `user_key` [B] int64, and lists of `item` [N] int32 (dense item indices) and `time` [N] int64.

    If they are asked for, it also gives `user_id` [B], and lists of `target` [N] bool, `event` [N] int32 and of each of the
    `columns` [N].

    Attributes:
        user: Column of user ids.
        items: List column of item ids.
        time: List column of times; None to number the events instead.
        index: The index of the run's catalogue of items.
        unit: Unit of times that are plain numbers; None to determine it by their name or size.
        until: Unix seconds from which on `data.split` holds events out; None for no end.
        lists: List column of each column of events by the name that conditions use: those of the condition and of `columns`.
        columns: Names among `lists` of the columns that samples get.
        target: Condition on target events, and the prefix of its errors; None if all events are targets.
        event_names: Kinds of events, if samples get the kind of each event, from "event" among `lists`; else None.
        gives_users: Whether samples get the users' own ids.
        drops_unknown: Whether events are left out whose item is not in the catalogue; otherwise they are an error.
    """

    user: str
    items: str
    time: str | None
    index: ItemIndex
    unit: str | None = None
    until: int | None = None
    lists: Mapping[str, str] = field(default_factory=dict[str, str])
    columns: tuple[str, ...] = ()
    target: tuple[str, str] | None = None
    event_names: tuple[str, ...] | None = None
    gives_users: bool = False
    drops_unknown: bool = False
    keeps_rows: ClassVar[bool] = True
    """Every row stays a row, so the order of rows does not depend on this class."""

    def __call__(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        """Convert a batch of rows.

        Raises:
            DataError: If a column is missing or has the wrong type, or an item is not in the catalogue.
        """
        for name in filter(None, (self.user, self.items, self.time, *self.lists.values())):
            if name not in rows.schema.names:
                raise DataError(f"data.source: no column {name!r}; there are {', '.join(rows.schema.names)}")
        item_ids, offsets = flatten_lists(rows.column(self.items), self.items)
        item_index = self._find_item_indices(item_ids)
        times = (
            np.arange(len(item_ids))
            if self.time is None
            else self._convert_times(rows.column(self.time), offsets)
        )
        events = {name: self._flatten_column(rows, column, offsets) for name, column in self.lists.items()}
        is_known = item_index >= 0
        if not is_known.all():
            keep = pa.array(is_known)
            item_ids, item_index, times = item_ids.filter(keep), item_index[is_known], times[is_known]
            events = {name: values.filter(keep) for name, values in events.items()}
            offsets = np.concatenate([[0], np.cumsum(is_known)])[offsets].astype(np.int32)
        offsets_array = pa.array(offsets)
        flat = {name: convert_column(events[name]) for name in self.columns}
        if self.event_names is not None:
            flat["event"] = self._index_kinds(events["event"])
        if self.target is not None:
            condition, label = self.target
            users = rows.column(self.user).take(pa.array(np.repeat(np.arange(len(rows)), np.diff(offsets))))
            known_times = None if self.time is None else times
            table = make_event_table(users, item_ids, known_times, events)
            flat["target"] = match_rows(condition, table, name=label)
        own = {"user_id": rows.column(self.user)} if self.gives_users else {}
        own |= {
            name: pa.ListArray.from_arrays(offsets_array, pa.array(values)) for name, values in flat.items()
        }
        return own | {
            "user_key": pa.array(compute_keys("user", as_numbers(rows.column(self.user)))),
            "item": pa.ListArray.from_arrays(offsets_array, pa.array(item_index)),
            "time": pa.ListArray.from_arrays(offsets_array, pa.array(times)),
        }

    def _flatten_column(self, rows: pa.RecordBatch, column: str, offsets: np.ndarray) -> pa.Array:
        """Return the values [N] of a list column, which must have a value for each item."""
        values, own_offsets = flatten_lists(rows.column(column), column)
        self._check_lengths(column, own_offsets, offsets)
        return values

    def _check_lengths(self, column: str, own_offsets: np.ndarray, offsets: np.ndarray) -> None:
        """Raise DataError if a list of a column has another length than the list of items of its row.

        Args:
            column: Name of the column.
            own_offsets: Offsets [B + 1] of its lists.
            offsets: Offsets [B + 1] of the lists of items.
        """
        unequal_rows = np.flatnonzero(np.diff(own_offsets) != np.diff(offsets))
        if len(unequal_rows):
            row = int(unequal_rows[0])
            raise DataError(
                f"data.source: {len(unequal_rows)} of {len(offsets) - 1} rows have another number of {column!r} than of "
                f"{self.items!r}, the first: {own_offsets[row + 1] - own_offsets[row]} and "
                f"{offsets[row + 1] - offsets[row]}; write one for each item"
            )

    def _index_kinds(self, kinds: pa.Array) -> np.ndarray:
        """Return the index [N] int32 of each event's kind among the run's. Raises DataError for a kind that the run lacks."""
        assert self.event_names is not None
        texts = kinds.cast(pa.string())
        index = pc.index_in(texts, value_set=pa.array(self.event_names, pa.string()))
        if index.null_count:
            raise DataError(
                f"data.source: {index.null_count} events are of a kind that the interactions lack, the first: "
                f"{texts.filter(pc.is_null(index))[0].as_py()!r}; there are {join_names(self.event_names)}"
            )
        return index.to_numpy(zero_copy_only=False).astype(np.int32)

    def _find_item_indices(self, item_ids: pa.Array) -> np.ndarray:
        """Return the dense indices [N] int32 of items, -1 for those that are left out. Raises DataError for wrong ones."""
        if item_ids.null_count:
            raise DataError(
                f"data.source: {item_ids.null_count} values of {self.items!r} are missing; write lists without them"
            )
        try:
            item_index = self.index.find(item_ids)
        except DataError as error:
            raise DataError(f"data.source: column {self.items!r}: {error}") from None
        unknown = np.flatnonzero(item_index < 0)
        if len(unknown) and not self.drops_unknown:
            raise DataError(
                f"data.source: {len(unknown)} events are of items that data.items does not hold, "
                f"the first: {item_ids[int(unknown[0])].as_py()!r}; add those items, or say data.unknown_items: drop"
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
        self._check_lengths(self.time, own_offsets, offsets)
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


def make_event_table(
    user_ids: pa.Array, item_ids: pa.Array, times: np.ndarray | None, columns: Mapping[str, pa.Array]
) -> pa.Table:
    """Return events [N] as a table for conditions, with the names and types that the interactions of a run have.

    Args:
        user_ids: Users [N].
        item_ids: Items [N], by their own ids.
        times: Unix seconds [N]; None if they are not known.
        columns: Other columns [N].
    """
    arrays: dict[str, Any] = {"user_id": user_ids, "item_id": item_ids}
    if times is not None:
        arrays["timestamp"] = pa.array(times)
    arrays |= columns
    if "rating" in columns:
        arrays["rating"] = columns["rating"].cast(pa.float32(), safe=False)
    return pa.table(arrays)


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

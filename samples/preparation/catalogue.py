"""Maps item ids of events to rows of the catalogue, one slice of events at a time."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import DataError
from nonet.samples.preparation.log import EventLog
from nonet.samples.sequences import index_items
from nonet.samples.tables import as_numbers, compile_condition, compute_keys

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

# Shapes: N events of a slice, I items.
# The lookup table of integer ids has at most this many entries per item, or `_MIN_TABLE_SIZE` entries.
_MAX_ENTRIES_PER_ITEM, _MIN_TABLE_SIZE = 8, 1 << 16
_MAX_COLLECTED_SLICES = (
    16  # number of slices after which the collected ids are made distinct, which bounds memory
)


class ItemIndex:
    """Maps item ids to catalogue rows; built once and used for any number of slices.

    Integers that are close together are looked up in a table (4 ns each). Other ids are found by binary search over their
    sorted 64-bit keys. A text that is found by its key is compared with the catalogue, so two texts with the same hash are not
    confused.

    Args:
        ids: The ids of the catalogue [I], distinct.
    """

    def __init__(self, ids: Any):
        self._ids = ids
        self._table: np.ndarray | None = None
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None
        if pa.types.is_integer(ids.type) and len(ids):
            values = ids.to_numpy()
            self._lowest, largest = int(values.min()), int(values.max())
            if largest - self._lowest < max(_MIN_TABLE_SIZE, _MAX_ENTRIES_PER_ITEM * len(ids)):
                self._table = np.full(largest - self._lowest + 1, -1, np.int32)
                self._table[values - self._lowest] = np.arange(len(ids), dtype=np.int32)

    @cached_property
    def keys(self) -> np.ndarray:
        """The sparse keys [I] of the items."""
        return compute_keys("item", as_numbers(self._ids))

    def find(self, item_id: Any) -> np.ndarray:
        """Return the catalogue row [N] int32 of each id, -1 for ids that are not in the catalogue.

        Raises:
            DataError: The ids are integers and those of the catalogue text, or the reverse.
        """
        if pa.types.is_integer(item_id.type) != pa.types.is_integer(self._ids.type):
            raise DataError(
                f"item ids are {item_id.type} here and {self._ids.type} in the items table; they can never match. Write both as "
                "text or both as whole numbers"
            )
        if not len(item_id) or not len(self._ids):
            return np.full(len(item_id), -1, np.int32)
        if self._table is not None:
            entry = item_id.to_numpy(zero_copy_only=False) - self._lowest
            in_table = (entry >= 0) & (entry < len(self._table))
            return np.where(in_table, self._table[np.where(in_table, entry, 0)], np.int32(-1))
        if self._sorted is None:
            keys = as_numbers(self._ids)
            order = np.argsort(keys, kind="stable")
            self._sorted = keys[order], order.astype(np.int32)
        sorted_keys, sorted_rows = self._sorted
        requested = as_numbers(item_id)
        index = np.minimum(np.searchsorted(sorted_keys, requested), len(sorted_keys) - 1)
        rows = np.where(sorted_keys[index] == requested, sorted_rows[index], np.int32(-1))
        return rows if pa.types.is_integer(self._ids.type) else self._resolve_collisions(rows, item_id)

    def _resolve_collisions(self, rows: np.ndarray, texts: Any) -> np.ndarray:
        """Compare the texts with those at the rows [N] that their hashes found, and correct `rows` in place where they differ."""
        found = np.flatnonzero(rows >= 0)
        is_same = pc.equal(self._ids.take(pa.array(rows[found])), texts.take(pa.array(found)))
        if pc.all(is_same).as_py() is False:
            collided = found[~is_same.to_numpy(zero_copy_only=False)]
            index = pc.index_in(texts.take(pa.array(collided)), value_set=self._ids)
            rows[collided] = index.fill_null(-1).to_numpy(zero_copy_only=False)
        return rows

    def locate(self, item_id: Any, label: str) -> np.ndarray:
        """Return the catalogue row [N] int32 of each event's item; unlike `find`, raise an error for an unknown id.

        Args:
            item_id: Item ids [N], an Arrow array.
            label: Prefix of the error message.

        Raises:
            DataError: If an item is not in the catalogue.
        """
        if self._table is not None and pa.types.is_integer(item_id.type):
            entry = item_id.to_numpy() - self._lowest
            if ((entry >= 0) & (entry < len(self._table))).all():
                rows = self._table[entry]
                if (rows >= 0).all():
                    return rows
        try:
            return index_items(item_id, pa.chunked_array([self._ids])).astype(np.int32)
        except DataError as error:
            raise DataError(f"{label}: {error}") from None


def collect_items(log: EventLog, where: str | None) -> pa.Table:
    """Build the catalogue of a log that has no items table: the distinct item ids of its events, ascending.

    Args:
        log: The event log.
        where: Condition on the events, or None for all of them.
    """
    collected: list[Any] = []
    for log_slice in log.slices:
        table, _ = log.read(log_slice, log.select_columns(where))
        if where:
            table = table.filter(compile_condition(where, table.schema, name="data.where"))
        collected.append(table["item_id"].combine_chunks().unique())
        if len(collected) > _MAX_COLLECTED_SLICES:
            collected = [pa.chunked_array(collected).combine_chunks().unique()]
    return pa.table({"item_id": pa.chunked_array(collected).combine_chunks().unique().sort()})

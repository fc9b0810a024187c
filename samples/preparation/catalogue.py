"""ItemIndex: from the ids of events to rows of the catalogue, for one slice of events after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import DataError
from nonet.samples.preparation.log import EventLog
from nonet.samples.sequences import catalogue_index
from nonet.samples.tables import condition

pc: Any = pyarrow.compute  # its functions are made at import time, unknown to type checkers

# Shapes: N events of a slice, I items.
_SPREAD = 8  # times as many places as items, up to which whole numbers are looked up in a table


class ItemIndex:
    """ids: of the catalogue [I], distinct. Whole numbers that lie close are looked up in a table, 4 ns each instead of 60."""

    def __init__(self, ids: Any):
        self._ids = ids
        self._table: np.ndarray | None = None
        if pa.types.is_integer(ids.type) and len(ids):
            values = ids.to_numpy()
            self._lowest, largest = int(values.min()), int(values.max())
            if largest - self._lowest < max(1 << 16, _SPREAD * len(ids)):
                self._table = np.full(largest - self._lowest + 1, -1, np.int32)
                self._table[values - self._lowest] = np.arange(len(ids), dtype=np.int32)

    def rows(self, item_id: Any, where: str) -> np.ndarray:
        """The catalogue row [N] int32 of each event's item. Raises DataError, which `where` opens, for one that is not there."""
        if self._table is not None and pa.types.is_integer(item_id.type):
            place = item_id.to_numpy() - self._lowest
            inside = (place >= 0) & (place < len(self._table))
            if inside.all():
                rows = self._table[place]
                if (rows >= 0).all():
                    return rows
        try:
            return catalogue_index(item_id, pa.chunked_array([self._ids])).astype(np.int32)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None


def distinct_items(log: EventLog, where: str | None) -> pa.Table:
    """The catalogue of a log that comes without one: the ids of its events, ascending."""
    found: list[Any] = []
    for part in log.slices:
        table, _ = log.read(part, log.needed(where))
        if where:
            table = table.filter(condition(where, table.schema, name="data.where"))
        found.append(table["item_id"].combine_chunks().unique())
        if len(found) > 16:
            found = [pa.chunked_array(found).combine_chunks().unique()]
    return pa.table({"item_id": pa.chunked_array(found).combine_chunks().unique().sort()})

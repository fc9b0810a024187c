"""A batch of a stream: tensors without padding, and the slice of the order that they came from.

A column of numbers becomes a tensor [B], a list column a `Jagged` (values [N], offsets [B + 1] int64), and text stays an
Arrow array. Where possible, values are views of the decoded Arrow buffers and not copies, so they must not be written to.
"""

# Shapes: B rows, N values of a list column.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch

from nonet.samples.ledger import OrderSlice
from nonet.types import Jagged, RowRange

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A batch: part `number` of the `count` parts of a slice. A slice is done when all of its parts are.

    Attributes:
        columns: The columns by name, each a tensor [B], a `Jagged` of B lists, or an Arrow array [B].
        slice: The slice, as places in the order of an epoch.
        rows: The slice as ranges of physical rows; empty if rows are shuffled within their row groups.
        number: Index of the part.
        count: Number of parts of the slice.
        filtered: Number of rows of the slice that a filter removed.
        skipped: Places of the slice's bad rows, which are left out.
    """

    columns: dict[str, Any]
    slice: OrderSlice
    rows: tuple[RowRange, ...] = ()
    number: int = 0
    count: int = 1
    filtered: int = 0
    skipped: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __len__(self) -> int:
        """Return the number of rows B."""
        for column in self.columns.values():
            return len(column)
        return 0

    @property
    def last(self) -> bool:
        """Whether this is the last part of its slice."""
        return self.number + 1 == self.count


def to_tensors(rows: pa.RecordBatch) -> dict[str, Any]:
    """Convert the columns of a record batch to tensors, `Jagged` or Arrow arrays, by name."""
    return {name: _convert_column(rows.column(index)) for index, name in enumerate(rows.schema.names)}


def _convert_column(column: pa.Array) -> Any:
    """Convert one column to a tensor, a `Jagged` or an Arrow array."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _convert_list(column)
    if pa.types.is_fixed_size_list(kind):
        values = _convert_values(column.flatten())
        return values.reshape(len(column), kind.list_size) if torch.is_tensor(values) else column
    return _convert_values(column)


def _convert_list(column: pa.Array) -> Any:
    """Convert a list column to a `Jagged`; return it unchanged if its values do not become a tensor."""
    offsets = column.offsets.to_numpy()
    start, stop = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    values = _convert_column(column.values.slice(start, stop - start))
    offsets_B1 = torch.from_numpy(offsets.astype(np.int64) - start)
    return Jagged(values, offsets_B1) if torch.is_tensor(values) else column


def _convert_values(column: pa.Array) -> Any:
    """Convert a column without lists to a tensor; return types that are no numbers or times unchanged.

    Missing numbers become NaN, so that integers with missing ones become floats; missing booleans become False.
    """
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        column = column.cast(pa.int64() if not pa.types.is_date32(kind) else pa.int32())
    elif pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif pa.types.is_boolean(kind):
        return torch.from_numpy(column.fill_null(False).to_numpy(zero_copy_only=False).copy())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return column
    if column.null_count:
        return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    if column.type == pa.uint64():
        column = column.view(pa.int64())  # Ids above 2^63 - 1 were rejected when they were read.
    return torch.from_dlpack(column) if len(column) else torch.from_numpy(column.to_numpy().copy())

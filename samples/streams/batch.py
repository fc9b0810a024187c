"""A batch of a stream: tensors without padding, and the slice of the order that they came from.

A column of numbers becomes a tensor [B], a list column a `Jagged` (values [N], offsets [B + 1] int64), and text stays an
Arrow array. Values are views of the decoded Arrow buffers where possible; they are not padded or copied and must not be
written to.
"""

# Shapes: B rows, N values of a list column, L semantic-id levels.

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
    """Part `number` of the `count` parts of a slice; a slice is done when all of its parts are.

    Attributes:
        columns: By name: a tensor [B], a Jagged [N] or an Arrow array.
        slice: The places of the order that the batch came from.
        rows: The same as physical rows, if rows are read in the file's order.
        number: Index of the part.
        count: Number of parts of the slice.
        filtered: Rows of the slice that a filter removed.
        skipped: Places of the order whose rows were invalid.
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
    """Convert the columns of a record batch to tensors, `Jagged` or Arrow arrays."""
    return {name: _convert_column(rows.column(at)) for at, name in enumerate(rows.schema.names)}


def _convert_column(array: pa.Array) -> Any:
    """Convert one column; lists may be nested."""
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _convert_list(array)
    if pa.types.is_fixed_size_list(kind):
        values = _convert_values(array.flatten())
        return values.reshape(len(array), kind.list_size) if torch.is_tensor(values) else array
    return _convert_values(array)


def _convert_list(array: pa.Array) -> Any:
    offsets = array.offsets.to_numpy()
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    values = _convert_column(array.values.slice(first, last - first))
    cuts = torch.from_numpy(offsets.astype(np.int64) - first)
    return Jagged(values, cuts) if torch.is_tensor(values) else array


def _convert_values(array: pa.Array) -> Any:
    """Convert numbers to a tensor, with NaN for missing ones; return other types unchanged."""
    kind = array.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        array = array.cast(pa.int64() if not pa.types.is_date32(kind) else pa.int32())
    elif pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
    elif pa.types.is_boolean(kind):
        return torch.from_numpy(array.fill_null(False).to_numpy(zero_copy_only=False).copy())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return array
    if array.null_count:
        return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    if array.type == pa.uint64():
        array = array.view(pa.int64())  # ids above 2^63 were rejected when they were read
    return torch.from_dlpack(array) if len(array) else torch.from_numpy(array.to_numpy().copy())

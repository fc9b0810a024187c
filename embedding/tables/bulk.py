"""Reads and writes rows with their complete state as plain arrays, by key or by slice.

Checkpoints, resharding and pipelines use these functions. They copy from a table's arrays without a conversion to Arrow:
2 M rows of width 64 take half a second.
"""

# Shapes: N requested keys, R returned rows, D width, S elements of optimizer state per row, B bytes of a packed row.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nonet.embedding import SLICES, compute_slices
from nonet.embedding.tables.base import ALL_SLICES, BaseTable
from nonet.embedding.tables.native_table import NativeTable
from nonet.embedding.tables.numpy_table import NumPyTable
from nonet.embedding.tables.optimizers import get_row_optimizer
from nonet.embedding.tables.protocol import DELETE, UPSERT
from nonet.embedding.tables.rows import WAIT, RowColumns, from_arrow_table, to_arrow_table
from nonet.embedding.tables.spec import TableSpec
from nonet.errors import ConfigError

_HASH_BITS = 48  # The number of hash bits below the slice, which is the top 16 of 64 bits.
_LISTED_ROWS = 1 << 20  # The rows of a native table that one call lists.
_COLUMN_NAMES = ("key", "row", "state", "step", "deleted", "seen", "uses", "waiting")


def get_state_width(spec: TableSpec) -> int:
    """Compute S, the elements of optimizer state per row."""
    return get_row_optimizer(spec.optimizer).state_width(spec.dim)


def take(table: BaseTable, keys: np.ndarray) -> RowColumns:
    """Read the rows of keys with their optimizer state and step, in the order of the keys.

    Args:
        table: The table to read.
        keys: Keys as int64 [N].

    Returns:
        N rows; a key that has no row is marked as deleted.

    Raises:
        ConfigError: If this kind of table cannot be read by key.
    """
    if isinstance(table, NativeTable):
        return _take_native(table, keys)
    if isinstance(table, NumPyTable):
        row_numbers = table._index.find(keys)
        safe_numbers = np.maximum(
            row_numbers, 0
        )  # An absent key reads row 0, which is then marked as deleted.
        if not len(table):
            return make_absent_rows(table.spec, keys)
        return RowColumns(
            keys,
            table._rows[safe_numbers],
            table._state[safe_numbers],
            table._touched[safe_numbers],
            row_numbers < 0,
        )
    if hasattr(table, "take"):  # A table of several tiers.
        return table.take(keys)  # type: ignore[attr-defined]
    raise ConfigError(f"rows of a {type(table).__name__} cannot be read by key")


def _take_native(table: NativeTable, keys: np.ndarray) -> RowColumns:
    """Read the rows of keys [N] from a native table."""
    key_array = np.require(keys, requirements=["C", "W"])
    places = np.empty(len(key_array), dtype=np.int64)
    core, handle = table._core, table._handle
    core.nonet_table_find(handle, key_array.ctypes.data, len(key_array), places.ctypes.data)
    absent = places < 0
    if absent.all():
        return make_absent_rows(table.spec, keys)
    places[absent] = places[~absent][
        0
    ]  # An absent key reads an existing row, which is then marked as deleted.
    pairs = np.ascontiguousarray(np.stack([key_array, places], axis=1))
    part = table._read_chosen(pairs.ctypes.data, 0, len(pairs))
    return RowColumns(keys, part.row, part.state, part.step, absent, part.seen, part.uses)


def iterate_changes(table: BaseTable, slices: range, since: int | None = None) -> Iterator[RowColumns]:
    """Yield the rows of slices sorted by slice and key, followed by deleted keys and keys that wait for admission.

    Args:
        table: The table to read.
        slices: The slices to read.
        since: Yield only rows that changed and keys that were deleted after this step. None yields all rows and no
            deleted keys.

    Yields:
        Rows, then deleted keys, then keys that wait for admission.
    """
    yield from iterate_rows(table, slices, since)
    if since is not None:
        yield from _to_columns(table, table._export_deletes(slices, since))
    yield from iterate_waiting(table, slices, since)


def iterate_rows(table: BaseTable, slices: range, since: int | None = None) -> Iterator[RowColumns]:
    """Yield the rows of slices sorted by slice and key; with `since`, only rows that changed after this step."""
    if not isinstance(table, NativeTable):
        yield from table._iterate_rows(slices, since)
        return
    # One call lists about a million rows (16 MB), because the overhead of calls for a few slices each exceeds the work.
    slices_per_call = max(1, SLICES * _LISTED_ROWS // max(1, len(table)))
    after_step = np.iinfo(np.int64).min if since is None else since
    for start in range(slices.start, slices.stop, slices_per_call):
        stop = min(start + slices_per_call, slices.stop)
        yield from table._read_hash_range(start << _HASH_BITS, (stop << _HASH_BITS) - 1, after_step)


def iterate_waiting(
    table: BaseTable, slices: range = ALL_SLICES, since: int | None = None
) -> Iterator[RowColumns]:
    """Yield the keys that have been counted for admission and have no row yet."""
    if not table.spec.admits_all:
        yield from _to_columns(table, table._export_waiting(slices, since))


def _to_columns(table: BaseTable, parts: Iterable[pa.Table]) -> Iterator[RowColumns]:
    """Convert exported Arrow tables of a sparse table to columns, with the keys that wait for admission."""
    for part in parts:
        yield from_arrow_table(part, table.name, table.dim, table._state_width, waiting=True)


def join_rows(parts: Sequence[RowColumns], spec: TableSpec) -> RowColumns:
    """Concatenate parts; an optional column that only some parts have is filled with zeros in the others."""
    if not parts:
        return RowColumns(np.empty(0, np.int64), *_make_blank_columns(spec, 0), np.empty(0, dtype=bool))
    if len(parts) == 1:
        return parts[0]

    def join_column(name: str) -> np.ndarray | None:
        columns = [getattr(part, name) for part in parts]  # None for parts without this column.
        present = [column for column in columns if column is not None]
        if not present:
            return None
        filled = [
            np.zeros(len(part.key), present[0].dtype) if column is None else column
            for part, column in zip(parts, columns, strict=True)
        ]
        return np.concatenate(filled)

    return RowColumns(*(join_column(name) for name in _COLUMN_NAMES))  # type: ignore[arg-type]


def sort_by_slice(part: RowColumns) -> RowColumns:
    """Sort rows by slice and key, followed by the deleted keys and then the waiting keys."""
    waiting = np.zeros(len(part.key), dtype=bool) if part.waiting is None else part.waiting
    return part.select(np.lexsort((part.key, compute_slices(part.key), part.deleted + 2 * waiting)))


def put_rows(table: BaseTable, part: RowColumns, slices: range | None = None) -> None:
    """Delete the deleted keys from a table and write the other rows; with `slices`, only those of these slices."""
    parts = to_arrow(part)
    table.load(parts) if slices is None else table.load(parts, slices)


def to_arrow(part: RowColumns) -> Iterator[pa.Table]:
    """Convert rows to the Arrow tables of the `SparseTable` protocol, one per operation (delete, upsert, wait)."""
    waiting = np.zeros(len(part.key), dtype=bool) if part.waiting is None else part.waiting
    for op, op_mask in ((DELETE, part.deleted), (UPSERT, ~part.deleted & ~waiting), (WAIT, waiting)):
        if op_mask.any():
            selected = part if op_mask.all() else part.select(op_mask)
            yield to_arrow_table(
                selected.key, selected.row, selected.state, selected.step, selected.seen, selected.uses, op
            )


def count_packed_bytes(spec: TableSpec) -> int:
    """Compute B, the bytes of a packed row: its float32 values and state, its int64 step and an int64 flag that it is absent."""
    return 4 * (spec.dim + get_state_width(spec)) + 16


def take_packed(table: BaseTable, keys: np.ndarray) -> Tensor:
    """Create the missing rows of keys [N], and return the rows of all keys, packed, as uint8 [N, B]."""
    if isinstance(table, NativeTable):
        return table.take_packed(keys, count_packed_bytes(table.spec))
    if not len(keys):
        return torch.empty(0, count_packed_bytes(table.spec), dtype=torch.uint8)
    table.lookup(keys, train=True)
    part = take(table, keys)
    pieces = [
        np.ascontiguousarray(column).reshape(len(keys), -1).view(np.uint8)
        for column in (part.row, part.state, part.step, part.deleted.astype(np.int64))
        if column.size
    ]
    return torch.from_numpy(np.concatenate(pieces, axis=1))


def put_packed(table: BaseTable, keys: np.ndarray, data: Tensor) -> None:
    """Write rows that `take_packed` returned, except absent ones.

    If a row has a later step than the table, the table's step becomes the latest step of the rows.

    Args:
        table: The table to write to.
        keys: Keys as int64 [N].
        data: Packed rows as uint8 [N, B].
    """
    if isinstance(table, NativeTable):
        table.put_packed(keys, data)
        return
    part = _unpack(keys, data, table.spec)
    part = part.select(~part.deleted)
    table._upsert(part)
    table.step = max(table.step, int(part.step.max(initial=0)))


def _unpack(keys: np.ndarray, data: Tensor, spec: TableSpec) -> RowColumns:
    """Convert packed rows [N, B] to columns."""
    packed = data.numpy()
    row_bytes, state_bytes = 4 * spec.dim, 4 * get_state_width(spec)

    def cut_columns(start: int, width: int, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(packed[:, start : start + width]).view(dtype)

    if not len(keys):
        return join_rows([], spec)
    state = (
        cut_columns(row_bytes, state_bytes, np.float32)
        if state_bytes
        else np.zeros((len(packed), 0), np.float32)
    )
    step = cut_columns(row_bytes + state_bytes, 8, np.int64).reshape(-1)
    absent = cut_columns(row_bytes + state_bytes + 8, 8, np.int64).reshape(-1) != 0
    return RowColumns(keys, cut_columns(0, row_bytes, np.float32), state, step, absent)


def make_absent_rows(spec: TableSpec, keys: np.ndarray, step: np.ndarray | None = None) -> RowColumns:
    """Build the columns of keys that have no row: zeros that are marked as deleted, with `step` [N] or 0."""
    row, state, zero_step = _make_blank_columns(spec, len(keys))
    return RowColumns(keys, row, state, zero_step if step is None else step, np.ones(len(keys), dtype=bool))


def _make_blank_columns(spec: TableSpec, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return zeros for the columns row, state and step of `count` keys."""
    return (
        np.zeros((count, spec.dim), np.float32),
        np.zeros((count, get_state_width(spec)), np.float32),
        np.zeros(count, np.int64),
    )

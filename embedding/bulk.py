"""Rows with everything they own, by key or by slice, as plain arrays: what checkpoints, moves and pipelines carry.

A table that offers `take(keys)` and `columns(slices, since)` itself is asked; the NumPy table's arrays are read here, and
any other table goes through the protocol's `export`. All rows of a table at once cost one pass over its keys.
"""

# Shapes: N keys asked for, R rows given, D width, S numbers of optimizer state in a row, B bytes of a packed row.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nonet.embedding.arrow import RowColumns, columns_of, table_of
from nonet.embedding.optimizer import row_optimizer
from nonet.embedding.slices import SLICES
from nonet.embedding.store import DELETE, SparseTable, TableSpec
from nonet.embedding.table import NumPyTable

ALL = range(SLICES)


def state_width(spec: TableSpec) -> int:
    """Numbers of optimizer state in a row."""
    return row_optimizer(spec.optimizer).state_width(spec.dim)


def take(table: Any, keys: np.ndarray) -> RowColumns:
    """The rows of keys [N] with state and step, in that order; a key that is not there is marked deleted."""
    if hasattr(table, "take"):
        return table.take(keys)
    if isinstance(table, NumPyTable):
        found = table._index.find(keys)
        if len(table) == 0:
            found, arrays = np.zeros(0, np.int64), _blank(table.spec, len(keys))
            return RowColumns(keys, *arrays, np.ones(len(keys), dtype=bool))
        at = np.maximum(found, 0)
        return RowColumns(keys, table._rows[at], table._state[at], table._touched[at], found < 0)
    return _picked(columns(table), keys, table.spec)


def columns(table: Any, slices: range = ALL, since: int | None = None) -> RowColumns:
    """The rows of these slices that changed after step `since`, by slice and key, deletes included."""
    if hasattr(table, "columns"):
        return table.columns(slices, since)
    parts = [columns_of(part, table.name, table.dim, _width(table)) for part in table.export(slices, since)]
    return joined(parts, table.spec)


def _width(table: Any) -> int:
    return state_width(table.spec)


def joined(parts: Sequence[RowColumns], spec: TableSpec) -> RowColumns:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return RowColumns(np.empty(0, np.int64), *_blank(spec, 0), np.empty(0, dtype=bool))
    fields = ("key", "row", "state", "step", "deleted")
    return RowColumns(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


def chosen(part: RowColumns, which: np.ndarray) -> RowColumns:
    """Some of the rows: a mask [R] or positions."""
    return RowColumns(
        part.key[which], part.row[which], part.state[which], part.step[which], part.deleted[which]
    )


def put(table: SparseTable, part: RowColumns) -> None:
    """Write these rows into a table, deletes included."""
    table.load(arrow(part))


def arrow(part: RowColumns) -> Iterable[pa.Table]:
    """The same rows as the protocol's tables."""
    alive = chosen(part, ~part.deleted) if part.deleted.any() else part
    if part.deleted.any():
        gone = chosen(part, part.deleted)
        table = table_of(gone.key, gone.row, gone.state, gone.step)
        yield table.set_column(table.column_names.index("op"), "op", pa.array([DELETE] * len(gone.key)))
    if len(alive.key):
        yield table_of(alive.key, alive.row, alive.state, alive.step)


def packed_bytes(spec: TableSpec) -> int:
    """B: row, state and step of one key."""
    return 4 * (spec.dim + state_width(spec)) + 8


def packed(part: RowColumns) -> Tensor:
    """Rows that are all there as bytes [R, B]."""
    count = len(part.key)
    pieces = [np.ascontiguousarray(column).view(np.uint8) for column in (part.row, part.state) if column.size]
    step = np.ascontiguousarray(part.step).reshape(count, 1).view(np.uint8)
    return torch.from_numpy(np.concatenate([*pieces, step.reshape(count, 8)], axis=1))


def unpacked(keys: np.ndarray, data: Tensor, spec: TableSpec) -> RowColumns:
    """What `packed` gave, with the keys it was asked for."""
    raw = data.numpy()
    row, state = 4 * spec.dim, 4 * state_width(spec)

    def cut(start: int, width: int, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(raw[:, start : start + width]).view(dtype)

    step = cut(row + state, 8, np.int64).reshape(-1)
    values = cut(row, state, np.float32) if state else np.zeros((len(raw), 0), np.float32)
    return RowColumns(keys, cut(0, row, np.float32), values, step, np.zeros(len(keys), dtype=bool))


def _blank(spec: TableSpec, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.zeros((count, spec.dim), np.float32),
        np.zeros((count, state_width(spec)), np.float32),
        np.zeros(count, np.int64),
    )


def _picked(part: RowColumns, keys: np.ndarray, spec: TableSpec) -> RowColumns:
    order = np.argsort(part.key)
    if not len(order):
        return RowColumns(keys, *_blank(spec, len(keys)), np.ones(len(keys), dtype=bool))
    at = order[np.minimum(np.searchsorted(part.key[order], keys), len(order) - 1)]
    missing = (part.key[at] != keys) | part.deleted[at]
    return RowColumns(keys, part.row[at], part.state[at], part.step[at], missing)

"""Operators of a stream: each one maps an Arrow record batch to another."""

# Shapes: B rows, N values of a list column, I items, L semantic-id levels.

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from nonet.errors import ConfigError, DataError, NonetError
from nonet.plugins import load_heavy
from nonet.samples.stores import StoreJoin
from nonet.samples.tables import match_rows

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

ComposedOperators = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True)
class MapOperator:
    """Applies a function to batches of at most `batch` rows.

    Attributes:
        function: A callable, a class that is instantiated once per worker, or "file.py:Name". It takes a RecordBatch
            and returns a
            RecordBatch, a Table or a mapping of arrays.
        batch: Most rows of a call.
        workers: Number of parallel calls.
    """

    function: Any
    batch: int
    workers: int = 1

    def build(self) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """Build the function that one worker calls."""
        function = load_heavy(self.function)
        function = function() if isinstance(function, type) else function
        return lambda rows: _concat_batches(
            [_to_batch(self._call_function(function, part)) for part in _split_batch(rows, self.batch)], rows
        )

    def _call_function(self, function: Callable[[pa.RecordBatch], Any], part: pa.RecordBatch) -> Any:
        """Call the function and convert its errors to DataError."""
        try:
            return function(part)
        except NonetError:
            raise
        except Exception as error:
            raise DataError(f"{self.title}: {type(error).__name__}: {error}") from error

    @property
    def title(self) -> str:
        """The operator as messages show it."""
        return f"map({_get_name(self.function)}, batch={self.batch}, workers={self.workers})"


@dataclass(frozen=True)
class FilterOperator:
    """Keeps rows: a condition such as "rating >= 4", or a function of a batch that gives [B] bool."""

    keep: Any

    def build(self) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """Build the function that one worker calls."""
        if isinstance(self.keep, str) and ":" not in self.keep:
            return lambda rows: rows.filter(
                pa.array(match_rows(str(self.keep), pa.Table.from_batches([rows]), name="filter"))
            )
        function = load_heavy(self.keep)
        return lambda rows: rows.filter(pa.array(np.asarray(function(rows), bool)))

    @property
    def title(self) -> str:
        """The operator as messages show it."""
        return f"filter({self.keep if isinstance(self.keep, str) else _get_name(self.keep)})"


@dataclass(frozen=True)
class TokenizeOperator:
    """Adds `sid`, the semantic ids of a column's items: [N, L] int32 for a list column.

    Attributes:
        sids: An array [I, L] for a column of dense indices, or the folder of a run's artifacts for a column of item ids.
        column: The column of items.
    """

    sids: Any
    column: str = "item_id"
    title: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", f"tokenize({self.column} -> sid)")

    def build(self) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """Build the function that one worker calls."""
        return self._add_semantic_ids

    def _add_semantic_ids(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Add the semantic ids to a batch."""
        if self.column not in rows.schema.names:
            raise ConfigError(
                f"{self.title}: there is no such column; there are {', '.join(rows.schema.names)}"
            )
        column = rows.column(self.column)
        nested = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        index = self._index_items(column.flatten() if nested else column)
        codes = pa.FixedSizeListArray.from_arrays(
            pa.array(self._codes[index].reshape(-1)), self._codes.shape[1]
        )
        if nested:
            offsets = column.offsets.to_numpy()
            codes = type(column).from_arrays(pa.array(offsets - offsets[0]), codes)
        return rows.append_column("sid", codes)

    def _index_items(self, items: pa.Array) -> np.ndarray:
        """Return the dense index of each item. Raises DataError for items without a semantic id."""
        if self._item_id is None:
            index = items.to_numpy(zero_copy_only=False)
            wrong = (index < 0) | (index >= len(self._codes))
        else:
            index = pc.index_in(items, value_set=self._item_id.cast(items.type)).fill_null(-1).to_numpy()
            wrong = index < 0
        if wrong.any():
            first = items[int(np.flatnonzero(wrong)[0])].as_py()
            raise DataError(
                f"{self.title}: {int(wrong.sum())} items have no semantic id, the first: {first!r}"
            )
        return index

    @cached_property
    def _codes(self) -> np.ndarray:
        if isinstance(self.sids, np.ndarray):
            return np.ascontiguousarray(self.sids, np.int32)
        table = pq.read_table(self._find_artifact("sids") / "sids.parquet")
        levels = [name for name in table.column_names if name != "item"]
        return np.stack([table[name].to_numpy() for name in levels], 1).astype(np.int32)

    @cached_property
    def _item_id(self) -> pa.Array | None:
        if isinstance(self.sids, np.ndarray):
            return None
        return pq.read_table(self._find_artifact("sequences") / "items.parquet", columns=["item_id"])[
            "item_id"
        ].combine_chunks()

    def _find_artifact(self, kind: str) -> Path:
        """Return the newest artifact folder of a kind."""
        folders = sorted(Path(os.fspath(self.sids)).glob(f"{kind}-*"))
        if not folders:
            raise ConfigError(
                f"{self.title}: {self.sids} holds no {kind}-*; name the artifacts folder of a run"
            )
        return folders[-1]


@dataclass(frozen=True)
class JoinOperator:
    """Adds columns of a store by the ids in a column; ids that are missing in the store give null.

    For a list column, each added column is a list of the same length.

    Attributes:
        store: An address (`nonet.samples.stores.open_store`), or an open store.
        on: The column of ids.
        columns: Names, or name -> name in the store.
        as_of: The column of times; each row or list element gets the latest value written strictly before its time.
            None for the latest value.
    """

    store: Any
    on: str
    columns: Any
    as_of: str | None = None

    def build(self) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """Build the function that one worker calls."""
        return self._add_columns

    @property
    def title(self) -> str:
        """The operator as messages show it."""
        names = list(self.columns)
        named = self.store if isinstance(self.store, str) else self.store.name
        return f"join({named}, on={self.on}, columns={', '.join(names)}, as_of={self.as_of or 'newest'})"

    @cached_property
    def _join(self) -> StoreJoin:
        if isinstance(self.store, str):
            return StoreJoin.open(self.store, self.columns, self._when)
        names = self.columns if isinstance(self.columns, Mapping) else {name: name for name in self.columns}
        return StoreJoin(self.store, names, self._when)

    @property
    def _when(self) -> str:
        return "time" if self.as_of else "newest"

    def _add_columns(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Add the columns of the store to a batch."""
        for name in filter(None, (self.on, self.as_of)):
            if name not in rows.schema.names:
                raise ConfigError(
                    f"{self.title}: there is no column {name!r}; there are {', '.join(rows.schema.names)}"
                )
        column, lists = rows.column(self.on), None
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            lists, column = column, column.flatten()
        times = np.zeros(len(column), np.int64)
        if self.as_of is not None:
            times = _get_times(rows.column(self.as_of), lists)
        for name, values in self._join.read(column, times).items():
            if lists is not None:
                offsets = lists.offsets.to_numpy()
                values = type(lists).from_arrays(pa.array(offsets - offsets[0]), values)
            rows = rows.append_column(name, values)
        return rows


def _get_times(column: pa.Array, lists: pa.Array | None) -> np.ndarray:
    """Return unix seconds [N] for each id; a time per row is repeated for each element of the row's list."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column, lists = column.flatten(), None
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("s"), safe=False)
    times = column.cast(pa.int64()).to_numpy()
    return times if lists is None else np.repeat(times, pc.list_value_length(lists).to_numpy())


Operator = MapOperator | FilterOperator | TokenizeOperator | JoinOperator


def list_row_changes(operators: tuple[Operator, ...]) -> list[str]:
    """Return what decides which rows there are after these operators, as text that is the same in every process."""
    said = []
    for operator in operators:
        if isinstance(operator, MapOperator) and not getattr(operator.function, "keeps_rows", False):
            said.append(f"map {_get_qualified_name(operator.function)} {operator.batch}")
        elif isinstance(operator, FilterOperator):
            keep = operator.keep
            said.append(f"filter {keep if isinstance(keep, str) else _get_qualified_name(keep)}")
    return said


def describe_operators(operators: tuple[Operator, ...]) -> list[str]:
    """Return one line per operator."""
    return [operator.title for operator in operators]


def _split_batch(rows: pa.RecordBatch, max_rows: int) -> list[pa.RecordBatch]:
    return [rows.slice(at, max_rows) for at in range(0, max(1, len(rows)), max_rows)]


def _to_batch(value: Any) -> pa.RecordBatch:
    """Convert the result of a function to a record batch."""
    if isinstance(value, pa.Table):
        value = (
            value.combine_chunks().to_batches()[0]
            if len(value)
            else pa.RecordBatch.from_pylist([], value.schema)
        )
    elif isinstance(value, Mapping):
        value = pa.RecordBatch.from_pydict({name: pa.array(column) for name, column in value.items()})
    if not isinstance(value, pa.RecordBatch):
        raise DataError(
            f"a map gave {type(value).__name__}; wanted a RecordBatch, a Table or arrays by column"
        )
    return value


def _concat_batches(parts: list[pa.RecordBatch], rows: pa.RecordBatch) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _get_qualified_name(function: Any) -> str:
    if isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _get_name(function: Any) -> str:
    return function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)


def compose_operators(operators: Iterable[Operator]) -> ComposedOperators:
    """Compose operators to one function, for one worker."""
    works = [operator.build() for operator in operators]

    def work(rows: pa.RecordBatch) -> pa.RecordBatch:
        for each in works:
            rows = each(rows)
        return rows

    return work

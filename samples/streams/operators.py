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
        function: A callable, a class that is instantiated once per worker, or "file.py:Name" of one of them. The callable takes a
            RecordBatch and returns a RecordBatch, a Table or a mapping from names to arrays.
        batch: Maximum number of rows per call.
        workers: Maximum number of calls at the same time.
    """

    function: Any
    batch: int
    workers: int = 1

    def build(self) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """Build the function that one worker calls."""
        function = load_heavy(self.function)
        function = function() if isinstance(function, type) else function
        return lambda rows: _concat_batches(
            [_to_batch(self._call_function(function, part)) for part in _split_batch(rows, self.batch)]
        )

    def _call_function(self, function: Callable[[pa.RecordBatch], Any], rows: pa.RecordBatch) -> Any:
        """Call the function and convert its errors, except those of Nonet, to DataError."""
        try:
            return function(rows)
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
    """Keeps the rows that meet a condition.

    Attributes:
        keep: A condition such as "rating >= 4", or a function of a RecordBatch that returns which rows to keep, [B] bool, or
            "file.py:Name" of one.
    """

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
    """Adds the column `sid`, the semantic id of each item of a column: L codes int32 per row, or per list element.

    Attributes:
        sids: The semantic ids of all items: an array [I, L] for a column of item indices, or the folder of a run's artifacts for
            a column of item ids.
        column: Name of the column of items.
        title: The operator as messages show it.
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
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        item_index = self._find_item_indices(column.flatten() if is_list else column)
        codes = pa.FixedSizeListArray.from_arrays(
            pa.array(self._item_codes[item_index].reshape(-1)), self._item_codes.shape[1]
        )
        if is_list:
            # Offsets do not start at 0 if the batch is a part of a larger one.
            offsets = column.offsets.to_numpy()
            codes = type(column).from_arrays(pa.array(offsets - offsets[0]), codes)
        return rows.append_column("sid", codes)

    def _find_item_indices(self, items: pa.Array) -> np.ndarray:
        """Return the row in `_item_codes` of each item [N]. Raises DataError for items without a semantic id."""
        if self._item_ids is None:
            index = items.to_numpy(zero_copy_only=False)
            is_unknown = (index < 0) | (index >= len(self._item_codes))
        else:
            index = pc.index_in(items, value_set=self._item_ids.cast(items.type)).fill_null(-1).to_numpy()
            is_unknown = index < 0
        if is_unknown.any():
            first_unknown = items[int(np.flatnonzero(is_unknown)[0])].as_py()
            raise DataError(
                f"{self.title}: {int(is_unknown.sum())} items have no semantic id, the first: {first_unknown!r}"
            )
        return index

    @cached_property
    def _item_codes(self) -> np.ndarray:
        """The semantic ids of all items, [I, L] int32."""
        if isinstance(self.sids, np.ndarray):
            return np.ascontiguousarray(self.sids, np.int32)
        table = pq.read_table(self._find_artifact("sids") / "sids.parquet")
        levels = [name for name in table.column_names if name != "item"]
        return np.stack([table[name].to_numpy() for name in levels], 1).astype(np.int32)

    @cached_property
    def _item_ids(self) -> pa.Array | None:
        """The item id of each row of `_item_codes` [I]; None for a column of item indices."""
        if isinstance(self.sids, np.ndarray):
            return None
        items = pq.read_table(self._find_artifact("sequences") / "items.parquet", columns=["item_id"])
        return items["item_id"].combine_chunks()

    def _find_artifact(self, kind: str) -> Path:
        """Return the artifact folder of a kind, such as "sids". Raises ConfigError unless there is exactly one."""
        folders = sorted(Path(os.fspath(self.sids)).glob(f"{kind}-*"))
        if not folders:
            raise ConfigError(
                f"{self.title}: {self.sids} holds no {kind}-*; name the artifacts folder of a run"
            )
        if len(folders) > 1:
            names = ", ".join(folder.name for folder in folders)
            raise ConfigError(f"{self.title}: {self.sids} holds {names}; it must hold one {kind}-*")
        return folders[0]


@dataclass(frozen=True)
class JoinOperator:
    """Adds columns of a store by the ids in a column; an id that is missing in the store gives null.

    For a list column of ids, each added column has lists of the same lengths.

    Attributes:
        store: An address (`nonet.samples.stores.open_store`), or an open store.
        on: Name of the column of ids.
        columns: Names, or name -> name in the store.
        as_of: Name of the column of times; each row or list element gets the newest value written strictly before its time.
            None for the newest value of all.
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
        store_name = self.store if isinstance(self.store, str) else self.store.name
        return f"join({store_name}, on={self.on}, columns={', '.join(names)}, as_of={self.as_of or 'newest'})"

    @cached_property
    def _join(self) -> StoreJoin:
        if isinstance(self.store, str):
            return StoreJoin.open(self.store, self.columns, self._as_of_mode)
        names = self.columns if isinstance(self.columns, Mapping) else {name: name for name in self.columns}
        return StoreJoin(self.store, names, self._as_of_mode)

    @property
    def _as_of_mode(self) -> str:
        """The argument `as_of` of `StoreJoin`."""
        return "time" if self.as_of else "newest"

    def _add_columns(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Add the columns of the store to a batch."""
        for name in filter(None, (self.on, self.as_of)):
            if name not in rows.schema.names:
                raise ConfigError(
                    f"{self.title}: there is no column {name!r}; there are {', '.join(rows.schema.names)}"
                )
        ids, list_column = rows.column(self.on), None
        if pa.types.is_list(ids.type) or pa.types.is_large_list(ids.type):
            list_column, ids = ids, ids.flatten()
        times = np.zeros(len(ids), np.int64)
        if self.as_of is not None:
            times = _get_times(rows.column(self.as_of), list_column)
        for name, values in self._join.read(ids, times).items():
            if list_column is not None:
                # Offsets do not start at 0 if the batch is a part of a larger one.
                offsets = list_column.offsets.to_numpy()
                values = type(list_column).from_arrays(pa.array(offsets - offsets[0]), values)
            rows = rows.append_column(name, values)
        return rows


def _get_times(column: pa.Array, list_column: pa.Array | None) -> np.ndarray:
    """Return the time of each id in unix seconds [N].

    Args:
        column: Times, one per row or a list per row.
        list_column: The list column of the ids, for whose elements a time per row is repeated; None for one id per row.
    """
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column, list_column = column.flatten(), None
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("s"), safe=False)
    times = column.cast(pa.int64()).to_numpy()
    return times if list_column is None else np.repeat(times, pc.list_value_length(list_column).to_numpy())


Operator = MapOperator | FilterOperator | TokenizeOperator | JoinOperator


def list_row_changes(operators: tuple[Operator, ...]) -> list[str]:
    """Describe the operators that may change which rows there are, as texts that are the same in every process."""
    descriptions = []
    for operator in operators:
        if isinstance(operator, MapOperator) and not getattr(operator.function, "keeps_rows", False):
            descriptions.append(f"map {_get_qualified_name(operator.function)} {operator.batch}")
        elif isinstance(operator, FilterOperator):
            keep = operator.keep
            descriptions.append(f"filter {keep if isinstance(keep, str) else _get_qualified_name(keep)}")
    return descriptions


def describe_operators(operators: tuple[Operator, ...]) -> list[str]:
    """Return a line of text per operator."""
    return [operator.title for operator in operators]


def _split_batch(rows: pa.RecordBatch, max_rows: int) -> list[pa.RecordBatch]:
    return [rows.slice(start, max_rows) for start in range(0, max(1, len(rows)), max_rows)]


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


def _concat_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _get_qualified_name(function: Any) -> str:
    """Return the module and qualified name of a function, or of the class of a callable object; "file.py:Name" as it is."""
    if isinstance(function, str):
        return function
    named_object = function if hasattr(function, "__qualname__") else type(function)
    return f"{named_object.__module__}.{named_object.__qualname__}"


def _get_name(function: Any) -> str:
    """Return the short name of a function, or of the class of a callable object; "file.py:Name" as it is."""
    return function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)


def compose_operators(operators: Iterable[Operator]) -> ComposedOperators:
    """Compose operators to one function, for one thread or actor."""
    functions = [operator.build() for operator in operators]

    def apply(rows: pa.RecordBatch) -> pa.RecordBatch:
        for function in functions:
            rows = function(rows)
        return rows

    return apply

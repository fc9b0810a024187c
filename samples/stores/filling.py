"""Fills a store from Parquet, one part at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import ConfigError, DataError
from nonet.samples.stores.addresses import create_store, open_store
from nonet.samples.stores.base import Store
from nonet.samples.tables import (
    conform,
    convert_to_seconds,
    find_files,
    find_parquet,
    get_unit_by_size,
    is_plain,
    read_groups,
    read_parquet_footer,
    read_parquet_schema,
)
from nonet.suggest import join_names, suggest_sentence

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them
_PART = 1 << 22  # rows that are written at once
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StoreFiller:
    """Describes what of a Parquet path is written to a store.

    Attributes:
        source: Path of the Parquet files.
        key: Column of keys.
        time: Column of the versions' times; None for a store without versions.
        columns: Columns to write, by default all others; for HBase name -> "family:qualifier type".
        options: Options of the store.
    """

    source: str | os.PathLike[str]
    key: str
    time: str | None = None
    columns: Sequence[str] | Mapping[str, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def pack(self, use: str, progress: Progress | None = None) -> tuple[Store, int]:
        """Create the store (HBase: open it) and write every row. Returns the store and the number of rows.

        Raises:
            ConfigError: If a column does not exist, or the store already exists.
            DataError: If a row has no key or no time.
        """
        schema = self._read_schema()
        if use.startswith("hbase:"):
            return self.put(open_store(use, self._require_mapping(), **self.options), progress)
        made = _get_local_folder(use)
        was_there = made is None or made.exists()
        store = create_store(
            use,
            pa.schema([schema.field(name) for name in self._list_kept(schema)]),
            key=schema.field(self.key).type,
            versions=self.time is not None,
            **self.options,
        )
        try:
            return self.put(store, progress)
        except BaseException:
            store.close()
            if not was_there and made is not None:
                shutil.rmtree(made, ignore_errors=True)
            raise

    def put(self, store: Store, progress: Progress | None = None) -> tuple[Store, int]:
        """Write every row to an existing store. Returns the store and the number of rows."""
        schema, done, unit = self._read_schema(), 0, None
        names = [name for name in self._list_kept(schema) if name in store.schema.names]
        total = self._count_rows()
        for part in self._iterate_parts([self.key, *([self.time] if self.time else []), *names]):
            keys = part[self.key].combine_chunks()
            if keys.null_count:
                raise DataError(
                    f"{self.source}: column {self.key!r} has {keys.null_count} rows without a key"
                )
            times = None
            if self.time is not None:
                if unit is None and is_plain(part[self.time].type):
                    unit = get_unit_by_size(
                        pc.max(pc.abs(part[self.time])).as_py() or 0
                    )  # the unit of the first part applies to all
                times, finer = self._convert_times(part[self.time], self.time, unit)
                if finer is not None:
                    kept = pa.array(_select_newest(keys, times, finer))
                    keys, part, times = keys.take(kept), part.take(kept), times[kept.to_numpy()]
            store.put(keys, part.select(names), times)
            done += len(part)
            if progress is not None:
                progress(done, total)
        return store, done

    def _convert_times(
        self, column: pa.ChunkedArray, name: str, unit: str | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Convert times to unix seconds. Raises DataError if they are missing or not times."""
        if column.null_count:
            raise DataError(f"{self.source}: column {name!r} has {column.null_count} rows without a time")
        try:
            return convert_to_seconds(column, name, unit)
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.source}: column {name!r} does not hold times: {error}") from None

    def _require_mapping(self) -> Mapping[str, str]:
        if not isinstance(self.columns, Mapping):
            raise ConfigError("an HBase table wants --column NAME='family:qualifier type' for each column")
        return self.columns

    def _read_schema(self) -> pa.Schema:
        """Read the schema of the files. Raises ConfigError if a column does not exist."""
        schema = read_parquet_schema(self.source, "rows")
        for name in (self.key, self.time, *(self.columns or ())):
            if name is not None and name not in schema.names:
                raise ConfigError(
                    f"{self.source}: no column {name!r}; there are {join_names(schema.names)}."
                    f"{suggest_sentence(name, schema.names)}"
                )
        return schema

    def _list_kept(self, schema: pa.Schema) -> list[str]:
        if self.columns is not None:
            return list(self.columns)
        return [name for name in schema.names if name not in (self.key, self.time)]

    def _count_rows(self) -> int:
        system, files = find_parquet(self.source, "rows")
        return sum(read_parquet_footer(system, file, "rows").num_rows for file in files)

    def _iterate_parts(self, names: list[str]) -> Iterator[pa.Table]:
        """Yield the rows in parts of about four million."""
        found, whole = find_files(self.source, "rows"), self._read_schema()
        schema = pa.schema([whole.field(name) for name in dict.fromkeys(names)])
        waiting: list[pa.Table] = []
        for file in found.files:
            for group in range(read_parquet_footer(found.system, file, "rows").num_row_groups):
                table = read_groups(found.system, file, [group], "rows", names)
                table = found.partitions.add_to_table(table, file, names)
                waiting.append(conform(table, schema, f"rows {file}"))
                if sum(map(len, waiting)) >= _PART:
                    yield pa.concat_tables(waiting)
                    waiting = []
        if waiting:
            yield pa.concat_tables(waiting)


def _select_newest(keys: pa.Array, times: np.ndarray, finer: np.ndarray) -> np.ndarray:
    """Return the rows of which no other of the same key and second is newer: what a reader as of a later second sees."""
    code = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.lexsort((finer, times, code))
    ahead, behind = order[1:], order[:-1]
    replaced = (
        (code[ahead] == code[behind]) & (times[ahead] == times[behind]) & (finer[ahead] > finer[behind])
    )
    return np.sort(order[np.append(~replaced, True)]) if len(order) else order


def _get_local_folder(use: str) -> Path | None:
    """Return the folder of a local store; None for a server."""
    path = use.removeprefix("lmdb:")
    return None if "://" in path else Path(path)


def get_rows(store: Store, keys: Sequence[str], as_of: int | None = None) -> list[dict[str, Any] | None]:
    """Return each key's row as Python values, None if there is none. Raises DataError for text that is not an integer."""
    typed: Any = list(keys)
    if pa.types.is_integer(store.key):
        try:
            typed = np.array([int(key) for key in keys], np.int64)
        except ValueError:
            raise DataError(f"{store.name}: keys are whole numbers, got {join_names(keys)}") from None
    values, offsets = store.multi_get(typed, None, None if as_of is None else [as_of] * len(keys))
    rows = values.to_pylist()
    return [
        rows[at] if stop > at else None
        for at, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]

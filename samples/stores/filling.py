"""Writes the rows of Parquet files to a feature store, in parts of about four million rows."""

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

pc: Any = pyarrow.compute  # Its functions are generated at import time, so type checkers do not know them.
_MIN_WRITE_ROWS = 1 << 22  # Minimum number of rows per write, except for the last one.
Progress = Callable[[int, int], None]  # Arguments: the number of rows written and the total number of rows.


@dataclass(frozen=True)
class StoreFiller:
    """Writes the rows of Parquet files to a store.

    Attributes:
        source: Path of the Parquet files.
        key: Name of the column with the keys.
        time: Name of the column with the time of each row's version; None for a store without versions.
        columns: Columns to write; None writes all except the key and the time. HBase needs a mapping from each column's
            name to "family:qualifier type".
        options: Options that are passed to the store.
    """

    source: str | os.PathLike[str]
    key: str
    time: str | None = None
    columns: Sequence[str] | Mapping[str, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def pack(self, use: str, progress: Progress | None = None) -> tuple[Store, int]:
        """Create a store, or open it if it is an HBase table, and write every row to it.

        A local store that did not exist before is deleted if writing fails.

        Args:
            use: Address of the store, as in a scenario.
            progress: Called after each part with the number of rows written and the total number of rows.

        Returns:
            The open store and the number of rows written.

        Raises:
            ConfigError: If a column does not exist, or the store already exists.
            DataError: If a row has no key or no time.
        """
        schema = self._read_schema()
        if use.startswith("hbase:"):
            return self.put(open_store(use, self._require_mapping(), **self.options), progress)
        local_folder = _get_local_folder(use)
        is_new_folder = local_folder is not None and not local_folder.exists()
        store = create_store(
            use,
            pa.schema([schema.field(name) for name in self._list_columns(schema)]),
            key=schema.field(self.key).type,
            versions=self.time is not None,
            **self.options,
        )
        try:
            return self.put(store, progress)
        except BaseException:
            store.close()
            if is_new_folder and local_folder is not None:
                shutil.rmtree(local_folder, ignore_errors=True)
            raise

    def put(self, store: Store, progress: Progress | None = None) -> tuple[Store, int]:
        """Write every row to an open store; return the store and the number of rows written."""
        schema, written_count, unit = self._read_schema(), 0, None
        names = [name for name in self._list_columns(schema) if name in store.schema.names]
        total_count = self._count_rows()
        for rows in self._iterate_parts([self.key, *([self.time] if self.time else []), *names]):
            keys = rows[self.key].combine_chunks()
            if keys.null_count:
                raise DataError(
                    f"{self.source}: column {self.key!r} has {keys.null_count} rows without a key"
                )
            times = None
            if self.time is not None:
                if unit is None and is_plain(rows[self.time].type):
                    # The unit of plain numbers is determined from the first part and used for all parts.
                    unit = get_unit_by_size(pc.max(pc.abs(rows[self.time])).as_py() or 0)
                times, raw_times = self._convert_times(rows[self.time], self.time, unit)
                if raw_times is not None:  # A store keeps one version per second: the newest.
                    newest = pa.array(_select_newest(keys, times, raw_times))
                    keys, rows, times = keys.take(newest), rows.take(newest), times[newest.to_numpy()]
            store.put(keys, rows.select(names), times)
            written_count += len(rows)
            if progress is not None:
                progress(written_count, total_count)
        return store, written_count

    def _convert_times(
        self, column: pa.ChunkedArray, name: str, unit: str | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Convert times to unix seconds.

        Args:
            column: The times [N].
            name: Name of the column.
            unit: Unit of times that are plain numbers ("s", "ms", ...); None for others.

        Returns:
            Unix seconds [N], and the raw values [N] if they are finer than seconds (None otherwise).

        Raises:
            DataError: If a time is missing, or the column does not hold times.
        """
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
        """Read the schema of the files; raise ConfigError if the key, the time or a column to write does not exist."""
        schema = read_parquet_schema(self.source, "rows")
        for name in (self.key, self.time, *(self.columns or ())):
            if name is not None and name not in schema.names:
                raise ConfigError(
                    f"{self.source}: no column {name!r}; there are {join_names(schema.names)}."
                    f"{suggest_sentence(name, schema.names)}"
                )
        return schema

    def _list_columns(self, schema: pa.Schema) -> list[str]:
        """Return the names of the columns to write."""
        if self.columns is not None:
            return list(self.columns)
        return [name for name in schema.names if name not in (self.key, self.time)]

    def _count_rows(self) -> int:
        system, files = find_parquet(self.source, "rows")
        return sum(read_parquet_footer(system, file, "rows").num_rows for file in files)

    def _iterate_parts(self, names: list[str]) -> Iterator[pa.Table]:
        """Yield columns of the rows of all files in parts of at least four million rows, except for the last part."""
        sources, full_schema = find_files(self.source, "rows"), self._read_schema()
        schema = pa.schema([full_schema.field(name) for name in dict.fromkeys(names)])
        pending_tables: list[pa.Table] = []
        for file in sources.files:
            for group_index in range(read_parquet_footer(sources.system, file, "rows").num_row_groups):
                table = read_groups(sources.system, file, [group_index], "rows", names)
                table = sources.partitions.add_to_table(table, file, names)
                pending_tables.append(conform(table, schema, f"rows {file}"))
                if sum(map(len, pending_tables)) >= _MIN_WRITE_ROWS:
                    yield pa.concat_tables(pending_tables)
                    pending_tables = []
        if pending_tables:
            yield pa.concat_tables(pending_tables)


def _select_newest(keys: pa.Array, times: np.ndarray, raw_times: np.ndarray) -> np.ndarray:
    """Return the indices of the rows to write, without those that a newer row of the same key and second replaces.

    Args:
        keys: Keys [N].
        times: Unix seconds [N].
        raw_times: The same times [N] in a finer unit.

    Returns:
        Row indices, ascending. Rows with the same key and raw time are all returned, so that the store reports them.
    """
    key_codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    row_order = np.lexsort((raw_times, times, key_codes))
    if not len(row_order):
        return row_order
    # In `row_order`, the last row of each run of equal key and second has the newest raw time; older rows are replaced.
    is_run_end = (np.diff(key_codes[row_order]) != 0) | (np.diff(times[row_order]) != 0)
    run_ends = np.append(np.flatnonzero(is_run_end), len(row_order) - 1)  # The last row ends the last run.
    newest_raw_times = np.repeat(raw_times[row_order][run_ends], np.diff(run_ends, prepend=-1))
    return np.sort(row_order[raw_times[row_order] == newest_raw_times])


def _get_local_folder(use: str) -> Path | None:
    """Return the folder of the local store at this address; None if the address is that of a server."""
    path = use.removeprefix("lmdb:")
    return None if "://" in path else Path(path)


def get_rows(store: Store, keys: Sequence[str], as_of: int | None = None) -> list[dict[str, Any] | None]:
    """Read the rows of keys as Python values.

    Args:
        store: The store to read.
        keys: Keys as text; they are converted to integers if the store has integer keys.
        as_of: Unix seconds; a store with versions returns the newest version before this time. None reads the newest.

    Returns:
        One dict per key; None for a key without a row.

    Raises:
        DataError: If the store has integer keys and a key is not an integer.
    """
    times_asked = None if as_of is None else [as_of] * len(keys)
    values, offsets = store.multi_get(_parse_keys(store, keys), None, times_asked)
    rows = values.to_pylist()
    return [
        rows[start] if stop > start else None
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]


def get_row_times(store: Store, keys: Sequence[str], as_of: int | None = None) -> list[int] | None:
    """Return the unix seconds of the rows that `get_rows` returns, or None if the store cannot find times.

    The value of a key without a row means nothing.
    """
    times_asked = None if as_of is None else [as_of] * len(keys)
    times = store.get_times(_parse_keys(store, keys), times_asked)
    return None if times is None else times.tolist()


def _parse_keys(store: Store, keys: Sequence[str]) -> list[str] | np.ndarray:
    """Convert keys from text to the type of a store's keys. Raises DataError if one cannot be converted."""
    if not pa.types.is_integer(store.key):
        return list(keys)
    try:
        return np.array([int(key) for key in keys], np.int64)
    except ValueError:
        raise DataError(f"{store.name}: keys are whole numbers, got {join_names(keys)}") from None

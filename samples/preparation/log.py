"""EventLog: the interactions behind a path as slices of row groups that are checked when they are read.

Opening a log reads only file footers: the schema of all files, the rows of each row group, and, from statistics, the unit
of numeric times. A slice consists of whole row groups of one file and has about two million rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.errors import DataError
from nonet.samples.sequences import select_carried_columns
from nonet.samples.tables import (
    Columns,
    check_events,
    conform,
    find_files,
    find_unit,
    get_unit_by_name,
    get_unit_by_size,
    is_plain,
    read_groups,
    read_parquet_footer,
    read_unified_schema,
    to_table_format,
)

# Shapes: N rows of a slice.

_SLICE_ROWS = 1 << 21  # default maximum number of rows of a slice; each thread holds one slice in memory


@dataclass(frozen=True, slots=True)
class LogSlice:
    """Consecutive row groups of a file.

    Attributes:
        file: Path of the file.
        groups: Indices of the row groups.
        first_row: Index of the first row within the file.
        rows: Number of rows.
    """

    file: str
    groups: tuple[int, ...]
    first_row: int
    rows: int


class EventLog:
    """The interactions behind a path, glob, folder, URI or `builtin:` name.

    Args:
        path: The path.
        columns: Names of columns, or the whole table format.
        slice_rows: Maximum number of rows of a slice, which has at least one row group.
        table: The name of the table in error messages.

    Attributes:
        schema: Schema of the tables that `read` returns.
        slices: Slices in the order of files and rows.
        rows: Number of rows of all slices.

    Raises:
        DataError: If the files cannot be read as events.
    """

    def __init__(
        self, path: str, columns: Columns, slice_rows: int = _SLICE_ROWS, *, table: str = "interactions"
    ):
        self._table = table
        self.path, self._format = path, to_table_format(columns)
        self._found = table_files = find_files(path, self._table)
        self._system, self.files = table_files.system, table_files.files
        self._partitions = table_files.partitions  # columns whose values are in the names of folders
        self._file_schema: pa.Schema = read_unified_schema(
            self._system, self.files, self._partitions, f"{self._table} {path}", self._table
        )
        self._footers = {file: read_parquet_footer(self._system, file, self._table) for file in self.files}
        empty_table, _ = check_events(self._file_schema.empty_table(), self._format, f"{self._table} {path}")
        self.schema: pa.Schema = empty_table.schema
        self.slices = list(self._cut_slices(slice_rows))
        self.rows = sum(part.rows for part in self.slices)
        if not self.rows:
            raise DataError(
                f"{self._table} {path}: the table is empty (columns {', '.join(self._file_schema.names)}, no rows). "
                "Give a table with rows."
            )
        self._unit = self._detect_time_unit()

    @property
    def names(self) -> list[str]:
        """The column names in the files."""
        return list(self._file_schema.names)

    def compute_hash(self) -> str:
        """Return a hash of the files' names and contents."""
        return hashlib.sha256(json.dumps(self._found.identify(self._table)).encode()).hexdigest()

    def find_time_unit(self) -> str:
        """Return the unit ("s", "ms", "us" or "ns") of the numbers in the column of times; "s" if it has timestamps or text."""
        if self._unit is not None:
            return self._unit
        times = self.read_column(self.slices[0], "timestamp", groups=1)
        return find_unit(times, self._get_file_column("timestamp"))

    def select_columns(self, *conditions: str | None) -> list[str]:
        """Return the columns, by their names in the files, that sequences carry or that one of the conditions may name."""
        _, dropped = select_carried_columns(self.schema, None)
        dropped_names = {description.rpartition(" (")[0] for description in dropped}
        all_conditions = " ".join(condition for condition in conditions if condition)
        # A name that is only a part of a longer word of a condition is also kept, which does no harm.
        return [
            name for name in self._file_schema.names if name not in dropped_names or name in all_conditions
        ]

    def read(self, log_slice: LogSlice, names: Collection[str]) -> tuple[pa.Table, np.ndarray | None]:
        """Read a slice: its rows in order, with columns renamed, checked and normalised.

        Args:
            log_slice: The slice.
            names: The columns to read, by their names in the files.

        Returns:
            The table, and the times [N] of its rows if they are finer than seconds, else None.

        Raises:
            DataError: The rows are not valid events; the message names the file, the row and the column.
        """
        file, groups = log_slice.file, log_slice.groups
        table = read_groups(self._system, file, groups, self._table, names)
        table = self._partitions.add_to_table(table, file, list(names))
        label = (
            f"{self._table} {file}, row groups {groups[0]} to {groups[-1]} (their first row is "
            f"{log_slice.first_row:,})"
        )
        return check_events(self._conform(table, names, label), self._format, label, self._unit)

    def read_column(self, log_slice: LogSlice, role: str, groups: int | None = None) -> Any:
        """Read one column of a slice, or of its first row groups, without conversion.

        Args:
            log_slice: The slice.
            role: `user_id`, `item_id` or `timestamp`.
            groups: Number of row groups to read, from the first one on; None for all.
        """
        name = self._get_file_column(role)
        table = read_groups(self._system, log_slice.file, log_slice.groups[:groups], self._table, [name])
        table = self._partitions.add_to_table(table, log_slice.file, [name])
        return self._conform(table, [name], f"{self._table} {log_slice.file}")[name]

    def _conform(self, table: pa.Table, names: Collection[str], label: str) -> pa.Table:
        """Cast the named columns of a file to the types of the schema of all files; a missing column becomes nulls."""
        return conform(table, pa.schema([field for field in self._file_schema if field.name in names]), label)

    def _cut_slices(self, max_rows: int) -> Iterator[LogSlice]:
        """Yield slices of at most `max_rows` rows, but of at least one row group each."""
        for file, footer in self._footers.items():
            groups: list[int] = []
            first_row = rows = 0
            for group in range(footer.num_row_groups):
                group_rows = footer.row_group(group).num_rows
                if groups and rows + group_rows > max_rows:
                    yield LogSlice(file, tuple(groups), first_row, rows)
                    groups, first_row, rows = [], first_row + rows, 0
                groups.append(group)
                rows += group_rows
            if rows:
                yield LogSlice(file, tuple(groups), first_row, rows)

    def _get_file_column(self, role: str) -> str:
        """Return the name in the files of the column `user_id`, `item_id` or `timestamp`."""
        short_role = {"user_id": "user", "item_id": "item", "timestamp": "time"}[role]
        return self._format.columns.get(role, self._format.columns.get(short_role, role))

    def _detect_time_unit(self) -> str | None:
        """Determine the unit of numeric times from their largest value; None if the type or the name of the column defines it."""
        name = self._get_file_column("timestamp")
        if not is_plain(self._file_schema.field(name).type) or get_unit_by_name(name):
            return None
        return get_unit_by_size(max(self._find_largest(log_slice, name) for log_slice in self.slices))

    def _find_largest(self, log_slice: LogSlice, name: str) -> float:
        """Return the largest absolute value of a column of a slice, from the statistics in the footer if there are any."""
        footer, largest = self._footers[log_slice.file], 0.0
        for group in log_slice.groups:
            columns = footer.row_group(group)
            index = next(
                (i for i in range(columns.num_columns) if columns.column(i).path_in_schema == name), None
            )
            statistics = None if index is None else columns.column(index).statistics
            if statistics is None or not statistics.has_min_max:
                return self._read_largest(log_slice, name)
            largest = max(largest, abs(float(statistics.min)), abs(float(statistics.max)))
        return largest

    def _read_largest(self, log_slice: LogSlice, name: str) -> float:
        """Return the largest absolute value of a column of a slice by reading it; 0 if the file has no such column."""
        table = read_groups(self._system, log_slice.file, log_slice.groups, self._table, [name])
        table = self._partitions.add_to_table(table, log_slice.file, [name])
        if name not in table.column_names:
            return 0.0
        times = table[name].drop_null().cast(pa.float64()).to_numpy()
        return float(np.abs(times[np.isfinite(times)]).max(initial=0))

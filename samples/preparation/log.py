"""Provides the interactions behind a path as slices of row groups that are checked when they are read.

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
    get_unit_by_name,
    get_unit_by_size,
    is_plain,
    read_groups,
    read_parquet_footer,
    read_unified_schema,
    to_table_format,
)

# Shapes: N rows of a slice.

_WHAT = "interactions"
_SLICE_ROWS = 1 << 21


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

    Attributes:
        schema: Schema of the tables that `read` returns.
        slices: Slices in the order of files and rows.
        rows: Number of rows of all slices.

    Raises:
        DataError: If the files cannot be read as events.
    """

    def __init__(self, path: str, columns: Columns, slice_rows: int = _SLICE_ROWS):
        self.path, self._format = path, to_table_format(columns)
        found = find_files(path, _WHAT)
        self._system, self.files, self._partitions = found.system, found.files, found.partitions
        self._given: pa.Schema = read_unified_schema(
            self._system, self.files, self._partitions, f"{_WHAT} {path}", _WHAT
        )
        self._footers = {file: read_parquet_footer(self._system, file, _WHAT) for file in self.files}
        empty, _ = check_events(self._given.empty_table(), self._format, f"{_WHAT} {path}")
        self.schema: pa.Schema = empty.schema
        self.slices = list(self._cut_slices(slice_rows))
        self.rows = sum(part.rows for part in self.slices)
        if not self.rows:
            raise DataError(
                f"{_WHAT} {path}: the table is empty (columns {', '.join(self._given.names)}, no rows)."
            )
        self._unit = self._detect_time_unit()

    @property
    def names(self) -> list[str]:
        """The column names in the files."""
        return list(self._given.names)

    def compute_hash(self) -> str:
        """Return a hash of the files' names, sizes, modification times and row counts."""
        infos = self._system.get_file_info(self.files)
        facts = [
            [info.path, info.size, info.mtime_ns, self._footers[file].num_rows]
            for info, file in zip(infos, self.files, strict=True)
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def select_columns(self, *conditions: str | None) -> list[str]:
        """Return the columns, by their names in the files, that sequences carry or that a condition may name."""
        _, dropped = select_carried_columns(self.schema, None)
        unfit = {text.rpartition(" (")[0] for text in dropped}
        text = " ".join(condition for condition in conditions if condition)
        return [name for name in self._given.names if name not in unfit or name in text]

    def read(self, part: LogSlice, only: Collection[str]) -> tuple[pa.Table, np.ndarray | None]:
        """Read a slice: its rows in order, with columns renamed, checked and normalised.

        Args:
            part: The slice.
            only: The columns to read, by their names in the files.

        Returns:
            The table, and times [N] that order its rows where they are finer than seconds (None otherwise).

        Raises:
            DataError: Names the file, the row and the column.
        """
        table = read_groups(self._system, part.file, part.groups, _WHAT, only)
        table = self._partitions.add_to_table(table, part.file, list(only))
        where = f"{_WHAT} {part.file}, row groups {part.groups[0]} to {part.groups[-1]} (their first row is {part.first_row:,})"
        return check_events(self._conform(table, only, where), self._format, where, self._unit)

    def read_column(self, part: LogSlice, role: str, groups: int | None = None) -> Any:
        """Read one column of a slice, or of its first row groups, without conversion.

        Args:
            part: The slice.
            role: `user_id`, `item_id` or `timestamp`.
            groups: Number of row groups to read; None for all.
        """
        source = self._get_source_column(role)
        table = read_groups(self._system, part.file, part.groups[:groups], _WHAT, [source])
        table = self._partitions.add_to_table(table, part.file, [source])
        return self._conform(table, [source], f"{_WHAT} {part.file}")[source]

    def _conform(self, table: pa.Table, only: Collection[str], where: str) -> pa.Table:
        """Cast a file's columns to the types that all files have together; a missing column becomes nulls."""
        return conform(table, pa.schema([field for field in self._given if field.name in only]), where)

    def _cut_slices(self, most: int) -> Iterator[LogSlice]:
        """Yield slices of at most `most` rows, each at least one row group."""
        for file, footer in self._footers.items():
            groups: list[int] = []
            first = rows = 0
            for group in range(footer.num_row_groups):
                there = footer.row_group(group).num_rows
                if groups and rows + there > most:
                    yield LogSlice(file, tuple(groups), first, rows)
                    groups, first, rows = [], first + rows, 0
                groups.append(group)
                rows += there
            if rows:
                yield LogSlice(file, tuple(groups), first, rows)

    def _get_source_column(self, role: str) -> str:
        short = {"user_id": "user", "item_id": "item", "timestamp": "time"}[role]
        return self._format.columns.get(role, self._format.columns.get(short, role))

    def _detect_time_unit(self) -> str | None:
        """Determine the unit of numeric times from their largest value; None if the type or the column name tells it."""
        source = self._get_source_column("timestamp")
        if not is_plain(self._given.field(source).type) or get_unit_by_name(source):
            return None
        return get_unit_by_size(max(self._find_largest(part, source) for part in self.slices))

    def _find_largest(self, part: LogSlice, source: str) -> float:
        """Return the largest absolute value of a column of a slice, from statistics where they exist."""
        footer, largest = self._footers[part.file], 0.0
        for group in part.groups:
            columns = footer.row_group(group)
            place = next(
                (i for i in range(columns.num_columns) if columns.column(i).path_in_schema == source), None
            )
            facts = None if place is None else columns.column(place).statistics
            if facts is None or not facts.has_min_max:
                return self._read_largest(part, source)
            largest = max(largest, abs(float(facts.min)), abs(float(facts.max)))
        return largest

    def _read_largest(self, part: LogSlice, source: str) -> float:
        """Return the largest absolute value of a column of a slice by reading it."""
        table = read_groups(self._system, part.file, part.groups, _WHAT, [source])
        table = self._partitions.add_to_table(table, part.file, [source])
        if source not in table.column_names:
            return 0.0
        times = table[source].drop_null().cast(pa.float64()).to_numpy()
        return float(np.abs(times[np.isfinite(times)]).max(initial=0))

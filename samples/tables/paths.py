"""Parquet files by path, glob, folder, URI or `builtin:` name, read as one Arrow table.

Several files are concatenated in the order of their names. Their columns are matched by name (`unite.py`), and folders named
`key=value` add columns. URIs (s3://, gs://, hdfs://, file://) use Arrow's filesystems and their default credentials. Reads are
retried while the storage does not respond (`retries.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from nonet.atomic import make_folder, replace_file, sync
from nonet.errors import ConfigError, DataError
from nonet.samples.tables.files import FolderColumns, find_files, find_parquet
from nonet.samples.tables.retries import CorruptDataError, is_corruption, read_with_retries
from nonet.samples.tables.unite import conform, unify_schemas

Result = TypeVar("Result")
GROUP_ROWS = b"nonet.rows"
"""The key of the schema metadata that holds the row count of each batch, so that rows of a remote file can be counted
without reading them."""


def read_parquet(path: str | os.PathLike[str], label: str, only: Collection[str] | None = None) -> pa.Table:
    """Read all rows of the Parquet files at a path.

    Args:
        path: Path, glob, folder, URI or `builtin:` name.
        label: Prefix of every error message, such as "interactions".
        only: Names of the columns to read; names that a file does not have are ignored. None reads all columns.

    Returns:
        The rows of all files, with the columns that all files and their `key=value` folders together have.
    """
    source = find_files(path, label)
    tables = []
    for file in source.files:
        table = _call_with_file(source.system, file, label, lambda parquet: _read_columns(parquet, only))
        tables.append(source.partitions.add_to_table(table, file, None if only is None else list(only)))
    if len(tables) == 1:
        return tables[0]
    schemas_by_file = [
        (file, table.schema, len(table)) for file, table in zip(source.files, tables, strict=True)
    ]
    schema = unify_schemas(schemas_by_file, f"{label} {path}")
    filled_tables = [(file, table) for file, table in zip(source.files, tables, strict=True) if len(table)]
    return pa.concat_tables(
        [schema.empty_table(), *(conform(table, schema, f"{label} {file}") for file, table in filled_tables)]
    )


def read_first_rows(path: str | os.PathLike[str], label: str = "table") -> pa.Table:
    """Read the first row group that is not empty of the files at a path; return an empty table if there is none."""
    source = find_files(path, label)
    for file in source.files:
        footer = read_parquet_footer(source.system, file, label)
        for group in range(footer.num_row_groups):
            if footer.row_group(group).num_rows:
                table = read_groups(
                    source.system, file, [group], label, footer.schema.to_arrow_schema().names
                )
                return source.partitions.add_to_table(table, file)
    return read_parquet_schema(path, label).empty_table()


def read_parquet_schema(path: str | os.PathLike[str], label: str) -> pa.Schema:
    """Read the schema of the Parquet files at a path, without rows."""
    source = find_files(path, label)
    return read_unified_schema(source.system, source.files, source.partitions, f"{label} {path}", label)


def read_unified_schema(
    system: pafs.FileSystem, files: Collection[str], partitions: FolderColumns, table_label: str, label: str
) -> pa.Schema:
    """Return the union of the columns of all files and of their `key=value` folders.

    Args:
        system: Filesystem of the files.
        files: Paths of the files.
        partitions: Columns that the folder names define.
        table_label: Prefix of error messages about the whole table.
        label: Prefix of error messages about one file.
    """

    def get_schema_and_rows(parquet: pq.ParquetFile) -> tuple[pa.Schema, int]:
        return parquet.schema_arrow, parquet.metadata.num_rows

    schemas_by_file = [(file, *_call_with_file(system, file, label, get_schema_and_rows)) for file in files]
    schema = (
        schemas_by_file[0][1] if len(schemas_by_file) == 1 else unify_schemas(schemas_by_file, table_label)
    )
    return partitions.extend_schema(schema)


def count_rows(path: str | os.PathLike[str], label: str) -> int:
    """Count the rows of the files at a path by reading their footers."""
    source = find_files(path, label)
    return sum(read_parquet_footer(source.system, file, label).num_rows for file in source.files)


def read_parquet_footer(system: pafs.FileSystem, file: str, label: str) -> pq.FileMetaData:
    """Read the metadata of one file, without rows."""
    return _call_with_file(system, file, label, lambda parquet: parquet.metadata)


def read_groups(
    system: pafs.FileSystem, file: str, groups: Collection[int], label: str, only: Collection[str]
) -> pa.Table:
    """Read some row groups of one file.

    Args:
        system: Filesystem of the file.
        file: Path of the file.
        groups: Indices of the row groups.
        label: Prefix of error messages.
        only: Names of the columns to read; names that the file does not have are ignored.

    Raises:
        DataError: If a row group cannot be read. The message names the file and the row group.
    """

    def read(parquet: pq.ParquetFile) -> pa.Table:
        names = [name for name in parquet.schema_arrow.names if name in only]
        tables = []
        for group in groups:
            try:
                tables.append(parquet.read_row_group(group, columns=names, use_threads=False))
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and not is_corruption(error, system, file):
                    raise  # The storage does not respond; the read is retried.
                raise CorruptDataError(
                    f"{label} {file}: row group {group} cannot be read: {_get_first_line(error)}"
                ) from None
        return pa.concat_tables(tables)

    return _call_with_file(system, file, label, read)


def write_parquet(table: pa.Table, path: str | os.PathLike[str]) -> Path:
    """Write a table atomically to a Parquet file, create its folder if necessary, and return its path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(target) as draft:
        pq.write_table(table, draft, compression="zstd")
    return target


def _read_columns(parquet: pq.ParquetFile, only: Collection[str] | None) -> pa.Table:
    """Read all rows, with the columns of `only` that the file has; None for all columns."""
    if only is None:
        return parquet.read()
    return parquet.read(columns=[name for name in parquet.schema_arrow.names if name in only])


def _call_with_file(
    system: pafs.FileSystem, file: str, label: str, use: Callable[[pq.ParquetFile], Result]
) -> Result:
    """Return the result of `use`, called with the open Parquet file; it is called again if the storage does not respond.

    Raises:
        DataError: If the file cannot be read. The message starts with `label`.
    """

    def read() -> Result:
        with system.open_input_file(file) as source:
            try:
                # Nanoseconds would overflow after the year 2262.
                parquet = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise CorruptDataError(
                    f"{label} {file}: not a Parquet file ({_get_first_line(error)}) `nonet import csv SRC DST` makes "
                    "Parquet of a CSV."
                ) from None
            return use(parquet)

    return read_with_retries(read, f"{label} {file}", lambda error: is_corruption(error, system, file))


def _get_first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def pack_files(
    source: str, folder: str | os.PathLike[str], report_progress: Callable[[int, int], None] | None = None
) -> list[Path]:
    """Convert each Parquet file at `source` to an Arrow IPC file with one batch per row group, written atomically.

    Args:
        source: Path of the Parquet files.
        folder: Folder to write to.
        report_progress: Called after each file with the number of files written and the total number of files.

    Returns:
        The paths of the written files.

    Raises:
        DataError: If a file cannot be read or packed.
        ConfigError: If two files have the same name.
    """
    system, files = find_parquet(source, "samples")
    targets = [Path(folder) / f"{Path(file).stem}.arrow" for file in files]
    if len(set(targets)) < len(targets):
        raise ConfigError(
            f"{source}: files of several folders have the same name; pack one folder after the other"
        )
    make_folder(Path(folder))
    for file_index, (file, target) in enumerate(zip(files, targets, strict=True)):
        footer = read_parquet_footer(system, file, "samples")
        rows_by_group = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        schema = footer.schema.to_arrow_schema().remove_metadata()
        schema_with_counts = schema.with_metadata({GROUP_ROWS: ",".join(map(str, rows_by_group)).encode()})
        draft_path = target.with_name(f".{target.name}")
        with pa.OSFile(str(draft_path), "wb") as sink, pa.ipc.new_file(sink, schema_with_counts) as writer:
            for group, count in enumerate(rows_by_group):
                table = read_groups(system, file, [group], "samples", schema.names).combine_chunks()
                batches = table.replace_schema_metadata().to_batches()
                if len(batches) != 1 and count:
                    raise DataError(
                        f"{file}, row group {group}: too large for one batch; write smaller row groups"
                    )
                # An empty table has no batch, but each row group is to have one.
                writer.write_batch(
                    pa.record_batch(batches[0].columns, schema=schema_with_counts)
                    if count
                    else _make_empty_batch(schema_with_counts)
                )
        sync(draft_path)
        os.replace(draft_path, target)
        if report_progress is not None:
            report_progress(file_index + 1, len(files))
    return targets


def _make_empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)

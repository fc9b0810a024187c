"""The files of a stream after inspection: their manifest, the order of their rows, and their row groups.

A row group is decoded once for all slices that it holds. A row is bad if an id is missing or above 2^63 - 1. With `on_bad_rows:
fail` the first bad row raises an error; with `skip`, bad rows and groups that cannot be read are left out and counted.
"""

# Shapes: G row groups of all files, N rows of a group.

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.fs as pafs

from nonet.contents import describe_difference
from nonet.errors import ConfigError, DataError
from nonet.samples.ledger import DataManifest, RowOrder
from nonet.samples.streams.formats import FOLDER_ENDINGS, OpenedFile, detect_format, inspect_file, read_group
from nonet.samples.streams.plan import StreamPlan
from nonet.samples.tables import (
    CorruptDataError,
    FolderColumns,
    compile_condition,
    conform,
    find_files,
    identify_file,
    match_rows,
    unify_schemas,
)
from nonet.suggest import join_names, suggest_sentence

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

_INSPECTION_THREADS = 8  # Inspecting waits mostly for the filesystem.


@dataclass(frozen=True)
class DecodedGroup:
    """A decoded row group.

    Attributes:
        rows: All rows of the group as one Arrow batch; None if the group cannot be read.
        keep: Which rows [N] bool are neither bad nor removed by the condition; None for all.
        bad: Which rows [N] bool are bad; None for none.
    """

    rows: pa.RecordBatch | None
    keep: np.ndarray | None
    bad: np.ndarray | None


class StreamLeaf:
    """The inspected files of one stream.

    Args:
        stream: The stream.
        name: Name that the random order depends on in addition to the seed.
        manifest: The files as an earlier opening found them, with the same sizes and contents. None to inspect the files.

    Attributes:
        stream: The stream.
        files: The stream's options of reading.
        file_format: Format of the files.
        schema: Names and types of the columns of all files and of their folders.
        manifest: The files and their row groups.
        groups: Indices in the manifest of the row groups that are read; the others can have no matching row.
        pruned_rows: Number of rows in the groups that are not read.
        order: The order in which an epoch reads the rows; its row groups are numbered as in `groups`.

    Raises:
        ConfigError: If a column or the format does not exist.
        DataError: If files cannot be read, cannot form one table, have changed, or leave no row.
    """

    def __init__(self, stream: StreamPlan, name: str, manifest: DataManifest | None = None):
        assert stream.files is not None
        self.stream, self.files = stream, stream.files
        self._located_files = [
            located_file
            for path in self.files.paths
            for located_file in _locate_files(path, self.files.format)
        ]
        self._partitions = FolderColumns.from_files([path for _, path in self._located_files])
        self.file_format = detect_format(self._located_files[0][1], self.files.format)
        if manifest is None:
            opened_files = _inspect_files(self._located_files, self.file_format)
            self.schema = self._unify_file_schemas(opened_files)
            self.manifest = DataManifest(tuple(opened.file for opened in opened_files))
        else:
            self.manifest = _relocate_manifest(manifest, self._located_files)
            # The first file with rows has the schema; the others are not opened.
            first_with_rows = next((i for i, file in enumerate(manifest.files) if file.rows), 0)
            schema_file = self._located_files[first_with_rows]
            self.schema = self._unify_file_schemas(_inspect_files([schema_file], self.file_format))
        self._check_columns()
        self.groups = np.flatnonzero(~self._is_pruned)
        group_rows = self.manifest.group_rows[self.groups]
        self.pruned_rows = int(self.manifest.group_rows[self._is_pruned].sum())
        if not group_rows.sum():
            raise DataError(f"{join_names(self.files.paths)}: no row is left to read")
        self.order = RowOrder(group_rows, stream.seed, name, stream.in_group)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.manifest.files)

    def read(self, order_index: int) -> DecodedGroup:
        """Read and check a row group by its index in the order. Raises DataError, for bad rows only with `fail`."""
        group_index = int(self.groups[order_index])
        file_index = int(self.manifest.group_file[group_index])
        file, index_in_file = self.manifest.files[file_index], self.manifest.get_group_in_file(group_index)
        try:
            system = self._located_files[file_index][0]
            rows = read_group(system, file, index_in_file, self.file_format, self.schema, self._read_columns)
        except CorruptDataError:
            if self.files.on_bad_rows == "fail":
                raise
            no_rows = np.zeros(file.groups[index_in_file], bool)
            return DecodedGroup(None, no_rows, ~no_rows)
        rows = self._conform_table(rows, file.path)
        is_bad = self._find_bad_rows(rows, group_index)
        is_kept = match_rows(self.files.where, rows, name="where") if self.files.where else None
        if is_bad is not None:
            is_kept = ~is_bad if is_kept is None else is_kept & ~is_bad
        if self.files.columns is not None:
            rows = rows.select(list(self.files.columns))
        batches = rows.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
        return DecodedGroup(batches[0], is_kept, is_bad)

    @cached_property
    def digest(self) -> str:
        """A hash of all that the result of `read` depends on: the files, their contents, the columns and the conditions."""
        files = [
            (path, file) for (_, path), file in zip(self._located_files, self.manifest.files, strict=True)
        ]
        content = repr((files, self.files, str(self.schema), self.file_format))
        return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()

    def _unify_file_schemas(self, opened_files: Sequence[OpenedFile]) -> pa.Schema:
        """Return the columns of all files and of their folders. Raises DataError if the files cannot form one table."""
        file_schemas = [(opened.file.path, opened.schema, opened.file.rows) for opened in opened_files]
        read_names = self.files.columns
        if read_names is not None and self.files.where is None:
            # Columns that are not read may differ between the files; the type in the first file stands for all.
            file_schemas = [
                (path, pa.schema([field for field in schema if field.name in read_names]), rows)
                for path, schema, rows in file_schemas
            ]
            all_fields = [field for opened in opened_files for field in opened.schema]
            unread_fields = [field for field in all_fields if field.name not in read_names]
            unread_schema = pa.schema({field.name: field for field in reversed(unread_fields)}.values())
        else:
            unread_schema = pa.schema([])
        schema = opened_files[0].schema
        if len(opened_files) > 1:
            schema = unify_schemas(file_schemas, join_names(self.files.paths))
        unified_names = {*schema.names}
        schema = pa.schema([*schema, *(field for field in unread_schema if field.name not in unified_names)])
        return self._partitions.extend_schema(schema.remove_metadata())

    def _conform_table(self, table: pa.Table, path: str) -> pa.Table:
        """Convert a file's rows to the types of all files and add the columns of its folders."""
        names = self._read_columns or self.schema.names
        unknown_names = [name for name in table.column_names if name not in names]
        if unknown_names and not self._read_columns:
            raise DataError(
                f"{path}: column {unknown_names[0]!r} is not in the file that the columns were read from; open without a manifest"
            )
        table = self._partitions.add_to_table(table, path, names)
        return conform(table, pa.schema([self.schema.field(name) for name in names]), path)

    @cached_property
    def _read_columns(self) -> list[str] | None:
        """The columns to read from files: the stream's and those of the condition; None for all."""
        if self.files.columns is None:
            return None
        # A name that occurs in the text of the condition only as a part of another one is read in vain.
        condition_names = {
            name for name in self.schema.names if self.files.where and name in self.files.where
        }
        return [name for name in self.schema.names if name in {*self.files.columns, *condition_names}]

    @cached_property
    def _id_columns(self) -> list[str]:
        """The columns whose ids are checked: the given ones, or every integer column of the stream."""
        id_names = self.files.ids if self.files.ids is not None else self.files.present_ids
        if id_names is not None:
            return [name for name in self._read_columns or self.schema.names if name in id_names]
        read_types = {name: self.schema.field(name).type for name in self.files.columns or self.schema.names}
        return [name for name, kind in read_types.items() if pa.types.is_integer(_get_value_type(kind))]

    def _check_columns(self) -> None:
        """Raise ConfigError if a column to read or an id column does not exist."""
        for name in (*(self.files.columns or ()), *(self.files.ids or ())):
            if name not in self.schema.names:
                near = suggest_sentence(name, self.schema.names)
                raise ConfigError(
                    f"{self.manifest.files[0].path}: no column {name!r}; it has {join_names(self.schema.names)}.{near}"
                )

    def _find_bad_rows(self, table: pa.Table, group_index: int) -> np.ndarray | None:
        """Find the rows with missing or too large ids.

        Args:
            table: The rows [N] of a group.
            group_index: Index of the group in the manifest, for messages.

        Returns:
            Which rows are bad, [N] bool; None if there are none.

        Raises:
            DataError: For the first bad row if `on_bad_rows` is "fail".
        """
        is_bad: np.ndarray | None = None
        for name in self._id_columns:
            is_invalid = _find_invalid_ids(table[name])
            if is_invalid is None:
                continue
            if self.files.on_bad_rows == "fail":
                bad_count = int(is_invalid.sum())
                row_id = int(self.manifest.compute_row_ids(group_index, np.flatnonzero(is_invalid)[:1])[0])
                raise DataError(
                    f"{self.manifest.describe_row(row_id)}: column {name!r} has no id, or one above 2^63 ({bad_count} such "
                    "rows in the group). Repair them, or read with on_bad_rows=skip."
                )
            is_bad = is_invalid if is_bad is None else is_bad | is_invalid
        return is_bad

    @cached_property
    def _is_pruned(self) -> np.ndarray:
        """Which row groups [G] bool are not read, because according to their statistics no row can meet the condition."""
        is_pruned = np.zeros(len(self.manifest.group_rows), bool)
        if self.files.where is None:
            return is_pruned
        expression = compile_condition(self.files.where, self.schema, name="where")
        if self.file_format != "parquet":
            return is_pruned
        import pyarrow.dataset as ds  # Imports pandas, half a second that runs without `where` need not pay.

        parquet_format = ds.ParquetFileFormat()
        # The index in the manifest of each file's first group; `group_file` is ascending.
        first_groups = np.searchsorted(self.manifest.group_file, np.arange(len(self._located_files)))
        for file_index, (system, path) in enumerate(self._located_files):
            stored_schema = pa.schema(
                [field for field in self.schema if field.name not in self._partitions.schema.names]
            )
            folder_equalities = [
                pc.field(name) == value
                for name, value in self._partitions.values[path].items()
                if value is not None and name not in stored_schema.names
            ]
            # The values in a path such as dt=2026-11-26 hold for all rows of the file.
            folder_condition = (
                functools.reduce(operator.and_, folder_equalities) if folder_equalities else None
            )
            fragment = parquet_format.make_fragment(path, system, partition_expression=folder_condition)
            left_groups = fragment.subset(expression, schema=self.schema).row_groups
            is_pruned_in_file = np.ones(len(self.manifest.files[file_index].groups), bool)
            is_pruned_in_file[[group.id for group in left_groups]] = False
            first_group = first_groups[file_index]
            is_pruned[first_group : first_group + len(is_pruned_in_file)] = is_pruned_in_file
        return is_pruned


def _locate_files(path: str, file_format: str | None) -> list[tuple[pafs.FileSystem, str]]:
    """Return the files behind a path: each one's filesystem and path in it.

    In a folder, these are the files of the given format or, without one, of the first format that has files.

    Raises:
        DataError: If there is no such file.
    """
    formats = [file_format] if file_format is not None else list(FOLDER_ENDINGS)
    first_error: DataError | None = None
    for candidate_format in formats:
        try:
            source = find_files(path, "samples", FOLDER_ENDINGS.get(candidate_format, (".parquet",)))
            return [(source.system, file) for file in source.files]
        except DataError as error:
            if "holds no" not in str(error) and "file is there" not in str(error):
                raise  # The error is another one than that there are no files of this format.
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _inspect_files(
    located_files: Sequence[tuple[pafs.FileSystem, str]], file_format: str
) -> list[OpenedFile]:
    """Inspect files in parallel, after the first one, whose columns the others are compared with."""
    first_file = inspect_file(*located_files[0], file_format, first_schema=None)
    with ThreadPoolExecutor(_INSPECTION_THREADS) as pool:
        other_files = pool.map(
            lambda file: inspect_file(file[0], file[1], file_format, first_file.schema), located_files[1:]
        )
        return [first_file, *other_files]


def _relocate_manifest(
    manifest: DataManifest, located_files: Sequence[tuple[pafs.FileSystem, str]]
) -> DataManifest:
    """Return the manifest with the files' current paths. Raises DataError if the files have other sizes or contents."""
    sizes = [system.get_file_info(path).size for system, path in located_files]
    listed_sizes = [file.bytes for file in manifest.files]
    if sizes != listed_sizes:
        triples = zip(located_files, sizes, listed_sizes, strict=False)  # The numbers of files may differ.
        different = [path for (_, path), size, listed_size in triples if size != listed_size]
        difference = (
            f"{different[0]} has another size"
            if different
            else f"{len(listed_sizes)} files then, {len(sizes)} now"
        )
        raise DataError(f"the data are not those of the manifest: {difference}")
    pairs = list(zip(manifest.files, located_files, strict=True))
    for file, (system, path) in pairs:
        if file.content and (content := identify_file(system, path, path)) != file.content:
            raise DataError(
                f"the data are not those of the manifest: {path}: {describe_difference(file.content, content)}"
            )
    return DataManifest(tuple(replace(file, path=path) for file, (_, path) in pairs))


def _get_value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a list's values; other types are returned unchanged."""
    return kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind


def _find_invalid_ids(column: pa.ChunkedArray) -> np.ndarray | None:
    """Return which rows [N] bool have no id, or one that exceeds 63 bits; None if there are none."""
    masks = [_find_invalid_in_chunk(chunk) for chunk in column.chunks]
    if all(mask is None for mask in masks):
        return None
    pairs = zip(masks, column.chunks, strict=True)
    return np.concatenate([np.zeros(len(chunk), bool) if mask is None else mask for mask, chunk in pairs])


def _find_invalid_in_chunk(chunk: pa.Array) -> np.ndarray | None:
    """Return which rows of a chunk have an invalid id, or None for none; a list is invalid if it or one of its values is."""
    is_list = pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)
    values = chunk.flatten() if is_list else chunk
    is_invalid = None
    if values.null_count:
        is_invalid = values.is_null().to_numpy(zero_copy_only=False)
    if values.type == pa.uint64() and len(values) and (pc.max(values).as_py() or 0) > 2**63 - 1:
        is_too_large = (
            pc.greater(values, pa.scalar(2**63 - 1, pa.uint64()))
            .fill_null(False)
            .to_numpy(zero_copy_only=False)
        )
        is_invalid = is_too_large if is_invalid is None else is_invalid | is_too_large
    if is_list and is_invalid is not None:  # From the values of the lists to the rows.
        parents = pc.list_parent_indices(chunk).to_numpy()
        is_invalid = np.bincount(parents[is_invalid], minlength=len(chunk)).astype(bool)
    if is_list and chunk.null_count:
        is_null = chunk.is_null().to_numpy(zero_copy_only=False)
        is_invalid = is_null if is_invalid is None else is_invalid | is_null
    return is_invalid

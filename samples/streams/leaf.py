"""The files of a stream after inspection: their manifest, the order of their rows, and their row groups.

A row group is decoded once for all slices that it holds. A row is bad if an id is missing or above 2^63. With `on_bad_rows:
fail` the first one raises an error; with `skip`, bad rows and groups that cannot be read are left out and counted.
"""

# Shapes: G row groups, N rows of a group.

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from nonet.errors import ConfigError, DataError
from nonet.samples.ledger import DataFile, DataManifest, RowOrder
from nonet.samples.streams.formats import FOLDER_ENDINGS, OpenedFile, detect_format, inspect_file, read_group
from nonet.samples.streams.plan import StreamPlan
from nonet.samples.tables import (
    CorruptDataError,
    FolderColumns,
    compile_condition,
    conform,
    find_files,
    match_rows,
    unify_schemas,
)
from nonet.suggest import join_names, suggest_sentence

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

_LOOKERS = 8


@dataclass(frozen=True)
class DecodedGroup:
    """A decoded row group: its rows as one Arrow batch (None: it cannot be read), and which of them are kept and bad.

    keep [N] bool, None for all; bad [N] bool, None for none.
    """

    rows: pa.RecordBatch | None
    keep: np.ndarray | None
    bad: np.ndarray | None

    @property
    def bytes(self) -> int:
        """Bytes of the decoded rows."""
        return 0 if self.rows is None else self.rows.nbytes


class StreamLeaf:
    """The inspected files of one stream.

    Args:
        stream: The stream.
        name: Name that the order is drawn for.
        manifest: The files as an earlier opening found them; their sizes must be the same. None to inspect the files.
    """

    def __init__(self, stream: StreamPlan, name: str, manifest: DataManifest | None = None):
        assert stream.files is not None
        self.stream, self.files = stream, stream.files
        self._places = [place for path in self.files.paths for place in _find_places(path, self.files.format)]
        self._partitions = FolderColumns.from_files([path for _, path in self._places])
        self.form = detect_format(self._places[0][1], self.files.format)
        if manifest is None:
            opened = _inspect_files(self._places, self.form)
            self.schema = self._unify_file_schemas(opened)
            self.manifest = DataManifest(tuple(each.file for each in opened))
        else:
            self.manifest = _relocate_manifest(manifest, self._places)
            with_rows = next((at for at, file in enumerate(manifest.files) if file.rows), 0)
            self.schema = self._unify_file_schemas(
                _inspect_files(self._places[with_rows : with_rows + 1], self.form)
            )
        self._check_columns()
        pruned = self._ruled_out
        self.groups = np.flatnonzero(~pruned)
        rows = self.manifest.group_rows[self.groups]
        self.pruned_rows = int(self.manifest.group_rows[pruned].sum())
        if not rows.sum():
            raise DataError(f"{join_names(self.files.paths)}: no row is left to read")
        self.order = RowOrder(rows, stream.seed, name, stream.in_group)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.manifest.files)

    def read(self, at: int) -> DecodedGroup:
        """Read a row group by its index in the order. Raises DataError."""
        group = int(self.groups[at])
        number = int(self.manifest.group_file[group])
        file, inside = self.manifest.files[number], self.manifest.get_group_in_file(group)
        try:
            table = read_group(self._places[number][0], file, inside, self.form, self.schema, self._columns)
        except CorruptDataError:
            if self.files.on_bad_rows == "fail":
                raise
            none = np.zeros(file.groups[inside], bool)
            return DecodedGroup(None, none, ~none)
        table = self._conform_table(table, file.path)
        bad = self._find_bad_rows(table, group)
        keep = match_rows(self.files.where, table, name="where") if self.files.where else None
        if bad is not None:
            keep = ~bad if keep is None else keep & ~bad
        if self.files.columns is not None:
            table = table.select(list(self.files.columns))
        batches = table.combine_chunks().to_batches()
        return DecodedGroup(batches[0] if batches else _make_empty_batch(table.schema), keep, bad)

    @cached_property
    def digest(self) -> str:
        """Return a hash of all that decides what `read` gives: the files, their contents, the columns and the conditions."""
        files = [(path, file) for (_, path), file in zip(self._places, self.manifest.files, strict=True)]
        facts = repr((files, self.files, str(self.schema), self.form))
        return hashlib.blake2b(facts.encode(), digest_size=12).hexdigest()

    def _unify_file_schemas(self, opened: Sequence[OpenedFile]) -> pa.Schema:
        """Return the columns of all files and of their folders. Raises DataError if the files cannot form one table."""
        facts = [(each.file.path, each.schema, each.file.rows) for each in opened]
        wanted = self.files.columns
        if wanted is not None and self.files.where is None:  # columns that are not read may differ
            facts = [
                (path, pa.schema([field for field in schema if field.name in wanted]), rows)
                for path, schema, rows in facts
            ]
            others = [field for each in opened for field in each.schema if field.name not in wanted]
            left = pa.schema({field.name: field for field in reversed(others)}.values())
        else:
            left = pa.schema([])
        schema = opened[0].schema if len(opened) == 1 else unify_schemas(facts, join_names(self.files.paths))
        names = {*schema.names}
        schema = pa.schema([*schema, *(field for field in left if field.name not in names)])
        return self._partitions.extend_schema(schema.remove_metadata())

    def _conform_table(self, table: pa.Table, path: str) -> pa.Table:
        """Convert a file's rows to the types of all files and add the columns of its folders."""
        names = self._columns or self.schema.names
        more = [] if self._columns else [name for name in table.column_names if name not in names]
        if more:
            raise DataError(
                f"{path}: column {more[0]!r} is not in the file that the columns were read from; open without a manifest"
            )
        table = self._partitions.add_to_table(table, path, names)
        return conform(table, pa.schema([self.schema.field(name) for name in names]), path)

    @cached_property
    def _columns(self) -> list[str] | None:
        """The columns to read: those that are wanted and those that the condition names."""
        if self.files.columns is None:
            return None
        named = {name for name in self.schema.names if self.files.where and name in self.files.where}
        return [name for name in self.schema.names if name in {*self.files.columns, *named}]

    @cached_property
    def _ids(self) -> list[str]:
        names = self.files.columns or self.schema.names
        ids = self.files.ids if self.files.ids is not None else self.files.present_ids
        if ids is not None:
            return [name for name in self._columns or self.schema.names if name in ids]
        return [name for name in names if pa.types.is_integer(_get_value_type(self.schema.field(name).type))]

    def _check_columns(self) -> None:
        """Raise ConfigError if a wanted column does not exist."""
        for name in (*(self.files.columns or ()), *(self.files.ids or ())):
            if name not in self.schema.names:
                near = suggest_sentence(name, self.schema.names)
                raise ConfigError(
                    f"{self.manifest.files[0].path}: no column {name!r}; it has {join_names(self.schema.names)}.{near}"
                )

    def _find_bad_rows(self, table: pa.Table, group: int) -> np.ndarray | None:
        """Return which rows [N] have missing or too large ids, or None. Raises DataError for the first one with `fail`."""
        bad: np.ndarray | None = None
        for name in self._ids:
            wrong = _find_wrong_ids(table[name])
            if wrong is None:
                continue
            if self.files.on_bad_rows == "fail":
                row = int(self.manifest.compute_row_ids(group, np.flatnonzero(wrong)[:1])[0])
                raise DataError(
                    f"{self.manifest.describe_row(row)}: column {name!r} has no id, or one above 2^63 ({int(wrong.sum())} such "
                    "rows in the group). Repair them, or read with on_bad_rows=skip."
                )
            bad = wrong if bad is None else bad | wrong
        return bad

    @cached_property
    def _ruled_out(self) -> np.ndarray:
        """Which row groups [G] can have no matching row according to their statistics."""
        out = np.zeros(len(self.manifest.group_rows), bool)
        if self.files.where is None:
            return out
        expression = compile_condition(self.files.where, self.schema, name="where")
        if self.form != "parquet":
            return out
        formats, firsts = (
            ds.ParquetFileFormat(),
            np.searchsorted(self.manifest.group_file, np.arange(len(self._places))),
        )
        for number, (system, path) in enumerate(self._places):
            there = pa.schema(
                [field for field in self.schema if field.name not in self._partitions.schema.names]
            )
            known = [
                ds.field(name) == value
                for name, value in self._partitions.values[path].items()
                if value is not None and name not in there.names
            ]
            where = functools.reduce(operator.and_, known) if known else None
            fragment = formats.make_fragment(path, system, partition_expression=where)
            left = fragment.subset(expression, schema=self.schema).row_groups
            mine = np.ones(len(self.manifest.files[number].groups), bool)
            mine[[group.id for group in left]] = False
            out[firsts[number] : firsts[number] + len(mine)] = mine
        return out


def _find_places(path: str, form: str | None) -> list[tuple[pafs.FileSystem, str]]:
    """Return the files behind a path; in a folder, those of the given format or of the first format that has files."""
    forms = [form] if form is not None else list(FOLDER_ENDINGS)
    nothing: DataError | None = None
    for each in forms:
        try:
            found = find_files(path, "samples", FOLDER_ENDINGS.get(each, (".parquet",)))
            return [(found.system, file) for file in found.files]
        except DataError as error:
            if "holds no" not in str(error) and "file is there" not in str(error):
                raise
            nothing = nothing or error
    assert nothing is not None
    raise nothing


def _inspect_files(places: Sequence[tuple[pafs.FileSystem, str]], form: str) -> list[OpenedFile]:
    first = inspect_file(places[0][0], places[0][1], form, None)
    with ThreadPoolExecutor(_LOOKERS) as pool:
        rest = list(pool.map(lambda place: inspect_file(place[0], place[1], form, first.schema), places[1:]))
    return [first, *rest]


def _relocate_manifest(manifest: DataManifest, places: Sequence[tuple[pafs.FileSystem, str]]) -> DataManifest:
    """Return the manifest with the files' current paths. Raises DataError if sizes differ."""
    sizes = [system.get_file_info(path).size for system, path in places]
    then = [file.bytes for file in manifest.files]
    if sizes != then:
        different = [path for (_, path), a, b in zip(places, sizes, then, strict=False) if a != b]
        what = (
            f"{different[0]} has another size" if different else f"{len(then)} files then, {len(sizes)} now"
        )
        raise DataError(f"the data are not those of the manifest: {what}")
    facts = zip(manifest.files, places, strict=True)
    return DataManifest(
        tuple(DataFile(path, f.bytes, f.groups, f.fingerprint, f.marks) for f, (_, path) in facts)
    )


def _get_value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind


def _find_wrong_ids(column: pa.ChunkedArray) -> np.ndarray | None:
    """Return which rows [N] have no id, or one that exceeds 63 bits; None if there are none."""
    masks = [_find_wrong_in_chunk(chunk) for chunk in column.chunks]
    if all(mask is None for mask in masks):
        return None
    pairs = zip(masks, column.chunks, strict=True)
    return np.concatenate([np.zeros(len(chunk), bool) if mask is None else mask for mask, chunk in pairs])


def _find_wrong_in_chunk(chunk: pa.Array) -> np.ndarray | None:
    """Return which rows of a chunk have an invalid id, or None; a list is invalid if one of its values is."""
    nested = pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)
    values = chunk.flatten() if nested else chunk
    wrong = None
    if values.null_count:
        wrong = values.is_null().to_numpy(zero_copy_only=False)
    if values.type == pa.uint64() and len(values) and (pc.max(values).as_py() or 0) > 2**63 - 1:
        large = (
            pc.greater(values, pa.scalar(2**63 - 1, pa.uint64()))
            .fill_null(False)
            .to_numpy(zero_copy_only=False)
        )
        wrong = large if wrong is None else wrong | large
    if nested and wrong is not None:
        parents = pc.list_parent_indices(chunk).to_numpy()
        wrong = np.bincount(parents[wrong], minlength=len(chunk)).astype(bool)
    if nested and chunk.null_count:
        missing = chunk.is_null().to_numpy(zero_copy_only=False)
        wrong = missing if wrong is None else wrong | missing
    return wrong


def _make_empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema)

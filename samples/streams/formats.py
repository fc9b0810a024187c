"""The file formats of streams, their row groups, and how to read one: Parquet, packed Arrow, CSV, and one user per line.

Parquet has row groups of its own; the fingerprint is a hash of the footer. Packed Arrow (`nonet pack SRC FOLDER`, or any
Arrow IPC file) has record batches as groups; a local file is memory-mapped and its values are not copied. A mapped file
must not be written in place: replace it by a rename, as `nonet pack` does. Text is cut at the ends of lines into groups of
about 8 MiB, once, when the file is inspected (1 GB/s); its fingerprint is a hash of the cuts and of both ends. A line `user
item item ...` is a row with the columns user_id and item_id (a list); both are integers if all of the first group are.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as pc_csv
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from nonet.errors import ConfigError, DataError
from nonet.samples.ledger import DataFile
from nonet.samples.tables import (
    GROUP_ROWS,
    CorruptDataError,
    is_corruption,
    read_with_retries,
)
from nonet.suggest import join_names, suggest_sentence

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

_GROUP_BYTES = 8 << 20
_OPEN_FILES = 4
_open = local()
_ENDINGS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".txt": "lines",
    ".inter": "lines",
}
FOLDER_ENDINGS = {
    form: tuple(ending for ending, of in _ENDINGS.items() if of == form)
    for form in dict.fromkeys(_ENDINGS.values())
}
"""The endings of the files that a folder stands for, by format."""
FORMATS = ("parquet", "arrow", "csv", "lines")


@dataclass(frozen=True)
class OpenedFile:
    """A file that was looked at: its entry in a manifest and its columns."""

    file: DataFile
    schema: pa.Schema


def detect_format(path: str, said: str | None) -> str:
    """Return parquet, arrow, csv or lines: the given format, or the one of the file's ending. Raises ConfigError."""
    if said is not None and said not in FORMATS:
        raise ConfigError(
            f"format {said!r}: there are {join_names(FORMATS)}.{suggest_sentence(said, FORMATS)}"
        )
    name = path.rpartition("/")[2]
    ending = name[name.rfind(".") :].lower() if "." in name else ""
    if said is None and not ending:
        return "parquet"  # Hive's parts; the footer is checked as the file is opened
    if said is None and ending not in _ENDINGS:
        raise ConfigError(f"{path}: say which format=: {join_names(FORMATS)}")
    return said or _ENDINGS[ending]


def inspect_file(system: pafs.FileSystem, path: str, form: str, first: pa.Schema | None) -> OpenedFile:
    """Inspect a file's row groups and columns; text takes the columns of the `first` file. Raises DataError."""

    def read() -> OpenedFile:
        return _LOOKS[form](system, path) if form in _LOOKS else _inspect_text(system, path, form, first)

    try:
        return read_with_retries(read, path, lambda error: is_corruption(error, system, path))
    except CorruptDataError as error:
        raise CorruptDataError(
            str(error).replace("cannot be read:", "cannot be read, maybe truncated:")
        ) from None


def read_group(
    system: pafs.FileSystem,
    file: DataFile,
    group: int,
    form: str,
    schema: pa.Schema,
    columns: Sequence[str] | None,
) -> pa.Table:
    """Read the rows of a row group.

    Args:
        system: Filesystem of the file.
        file: Entry of the file in the manifest.
        group: Index of the row group.
        form: Format of the file.
        schema: Types of the columns of text files.
        columns: Columns to read; None for all.

    Raises:
        CorruptDataError: If the content is invalid; names file and row group.
        UnreachableDataError: If the file could not be read after several attempts.
    """
    opened = False

    def read() -> pa.Table:
        nonlocal opened
        opened = form not in ("parquet", "arrow")
        if form == "parquet":
            parquet = _open_parquet(system, file.path, file.fingerprint)
            opened = True
            return parquet.read_row_group(
                group, columns=None if columns is None else list(columns), use_threads=False
            )
        if form == "arrow":
            _check_size(system, file)
            reader = _open_arrow(system, file.path, file.fingerprint)
            opened = True
            table = pa.Table.from_batches([reader.get_batch(group)])
        else:
            table = _read_text_group(system, file, group, form, schema)
        return (
            table
            if columns is None
            else table.select([name for name in columns if name in table.column_names])
        )

    def is_corrupt(error: OSError) -> bool:
        if opened and is_corruption(error, system, file.path):
            return True
        _open.__dict__.pop("files", None)  # a broken connection is not reused
        return False

    table = read_with_retries(read, f"{file.path}, row group {group}", is_corrupt)
    if len(table) != file.groups[group]:
        raise DataError(
            f"{file.path}, row group {group}: {len(table)} rows, but {file.groups[group]} when it was listed"
        )
    return table


# --- Parquet ------------------------------------------------------------------------------------------------------


def _inspect_parquet(system: pafs.FileSystem, path: str) -> OpenedFile:
    """Inspect a Parquet file."""
    with system.open_input_file(path) as source:
        size, (footer, digest) = source.size(), _read_footer(source)
        parquet = pq.ParquetFile(pa.BufferReader(footer), coerce_int96_timestamp_unit="us")
        meta, schema = parquet.metadata, parquet.schema_arrow
    groups = tuple(meta.row_group(group).num_rows for group in range(meta.num_row_groups))
    return OpenedFile(DataFile(path, size, groups, digest), schema.remove_metadata())


def _read_footer(source: pa.NativeFile) -> tuple[bytes, str]:
    """Return a parsable file that consists of the footer alone, and the hash of the footer."""
    size = source.size()
    if size < 12:
        raise pa.ArrowInvalid(f"{size} bytes are not a Parquet file")
    tail = source.read_at(8, size - 8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or length + 12 > size:
        raise pa.ArrowInvalid("it does not end in a Parquet footer")
    footer = source.read_at(length, size - 8 - length)
    return b"PAR1" + footer + tail, hashlib.blake2b(footer, digest_size=12).hexdigest()


def _open_parquet(system: pafs.FileSystem, path: str, fingerprint: str) -> pq.ParquetFile:
    def open_source() -> Any:
        return system.open_input_file(path), lambda source: _read_footer(source)[1], _make_reader

    return _open_once(path, fingerprint, open_source)


def _make_reader(source: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        source, coerce_int96_timestamp_unit="us"
    )  # nanoseconds would wrap beyond the year 2262


def _open_once(path: str, fingerprint: str, open_file: Callable[[], Any]) -> Any:
    """Return a file's reader, opened once per thread because two threads must not share one."""
    files: dict[tuple[str, str], Any] = _open.__dict__.setdefault("files", {})
    if (path, fingerprint) not in files:
        source, digest, reader = open_file()
        if digest(source) != fingerprint:
            raise DataError(f"{path}: its content changed since it was listed")
        files[path, fingerprint] = reader(source)
        while len(files) > _OPEN_FILES:
            del files[next(iter(files))]
    return files[path, fingerprint]


# --- packed Arrow -------------------------------------------------------------------------------------------------


def _inspect_arrow(system: pafs.FileSystem, path: str) -> OpenedFile:
    """Inspect an Arrow IPC file."""
    with system.open_input_file(path) as source:
        size, digest = source.size(), _hash_arrow_footer(source)
        reader = pa.ipc.open_file(source)
        told = (reader.schema.metadata or {}).get(GROUP_ROWS)
        if told is not None:
            groups = tuple(int(rows) for rows in told.decode().split(",") if rows)
        else:
            groups = tuple(reader.get_batch(at).num_rows for at in range(reader.num_record_batches))
        return OpenedFile(DataFile(path, size, groups, digest), reader.schema.remove_metadata())


def _hash_arrow_footer(source: pa.NativeFile) -> str:
    """Hash the footer, which contains the position of each batch, and the size."""
    size = source.size()
    tail = source.read_at(min(10, size), max(0, size - 10))
    if size < 18 or tail[4:] != b"ARROW1":
        raise pa.ArrowInvalid("it does not end in an Arrow footer")
    length = int.from_bytes(tail[:4], "little")
    footer = source.read_at(length, size - 10 - length)
    return hashlib.blake2b(footer + size.to_bytes(8, "little"), digest_size=12).hexdigest()


def _open_arrow(system: pafs.FileSystem, path: str, fingerprint: str) -> pa.ipc.RecordBatchFileReader:
    """Open an Arrow IPC file; a local one is memory-mapped."""
    mapped = isinstance(system, pafs.LocalFileSystem)

    def open_source() -> Any:
        # checked with plain reads before it is mapped, because reading a truncated mapped file kills the process
        reader = (lambda _: pa.ipc.open_file(pa.memory_map(path))) if mapped else pa.ipc.open_file
        return system.open_input_file(path), _hash_arrow_footer, reader

    return _open_once(path, fingerprint, open_source)


def _check_size(system: pafs.FileSystem, file: DataFile) -> None:
    """Raise DataError if a mapped file does not have the size that the manifest lists."""
    if isinstance(system, pafs.LocalFileSystem) and os.stat(file.path).st_size != file.bytes:
        raise DataError(f"{file.path}: its content changed since it was listed")


# --- text ---------------------------------------------------------------------------------------------------------


def _inspect_text(system: pafs.FileSystem, path: str, form: str, first: pa.Schema | None) -> OpenedFile:
    """Inspect a text file and cut it into groups at the ends of lines."""
    marks, rows = [], []
    with system.open_input_file(path) as source:
        size = source.size()
        at = len(_read_header(source)) if form == "csv" else 0
        ends = [source.read_at(min(4096, size), 0), source.read_at(min(4096, size), max(0, size - 4096))]
        while at < size:
            block = source.read_at(min(_GROUP_BYTES, size - at), at)
            while block[-1:] != b"\n" and at + len(block) < size:
                block += source.read_at(min(1 << 16, size - at - len(block)), at + len(block))
                cut = block.find(b"\n", _GROUP_BYTES - 1)
                block = block[: cut + 1] if cut >= 0 else block
            marks.append(at)
            rows.append(_count_lines(block))
            at += len(block)
    digest = hashlib.blake2b(repr((marks, rows, ends)).encode(), digest_size=12).hexdigest()
    file = DataFile(path, size, tuple(rows), digest, (*marks, size))
    if first is None:
        first = _read_text_group(system, file, 0, form, None).schema if rows else pa.schema([])
    elif form == "csv" and (names := _read_names(system, path)) != first.names:
        raise DataError(
            f"{path}: its columns are {join_names(names)}, those of the first file {join_names(first.names)}"
        )
    return OpenedFile(file, first)


def _read_header(source: pa.NativeFile) -> bytes:
    line = source.read_at(min(1 << 16, source.size()), 0)
    return line[: line.find(b"\n") + 1] if b"\n" in line else line


def _read_names(system: pafs.FileSystem, path: str) -> list[str]:
    with system.open_input_file(path) as source:
        return pc_csv.read_csv(io.BytesIO(_read_header(source))).column_names


def _count_lines(block: bytes) -> int:
    """Count the lines that are not empty."""
    data = np.frombuffer(block.replace(b"\r", b""), np.uint8)
    ends = np.flatnonzero(data == 10)
    starts = np.concatenate([[-1], ends])
    lengths = np.diff(np.concatenate([starts, [len(data)]])) - 1
    return int((lengths > 0).sum())


def _read_text_group(
    system: pafs.FileSystem, file: DataFile, group: int, form: str, schema: pa.Schema | None
) -> pa.Table:
    """Read one group of a text file."""
    start, stop = file.marks[group : group + 2]
    with system.open_input_file(file.path) as source:
        block = source.read_at(stop - start, start)
        if len(block) < stop - start:
            raise pa.ArrowInvalid(f"it ends at byte {start + len(block)}, it had {file.bytes}: truncated")
        header = _read_header(source) if form == "csv" else b""
    if form == "lines":
        return _parse_users(block, schema)
    types = {} if schema is None else {field.name: field.type for field in schema}
    return pc_csv.read_csv(
        io.BytesIO(header + block),
        read_options=pc_csv.ReadOptions(use_threads=False, block_size=len(header) + len(block) + 1),
        convert_options=pc_csv.ConvertOptions(column_types=types),
    )


def _parse_users(block: bytes, schema: pa.Schema | None) -> pa.Table:
    """Parse lines of `user item item ...`."""
    text = pa.array([block.decode("utf-8")])
    lines = pc.list_flatten(pc.split_pattern_regex(text, r"\r?\n"))
    lines = pc.utf8_trim_whitespace(lines)
    words = pc.split_pattern_regex(lines.filter(pc.not_equal(lines, "")), r"[ \t]+")
    user = pc.list_element(words, 0)
    flat, ends = words.values, words.offsets.to_numpy()
    keep = np.ones(len(flat), bool)
    keep[ends[:-1]] = False
    items = flat.filter(pa.array(keep))
    offsets = pa.array((ends - np.arange(len(ends))).astype(np.int32))
    if schema is None:
        user, items = _parse_integers(user), _parse_integers(items)
    else:
        user, items = (
            user.cast(schema.field("user_id").type),
            items.cast(schema.field("item_id").type.value_type),
        )
    return pa.table({"user_id": user, "item_id": pa.ListArray.from_arrays(offsets, items)})


def _parse_integers(texts: pa.Array) -> pa.Array:
    try:
        return texts.cast(pa.int64())
    except pa.ArrowException:
        return texts


_LOOKS = {"parquet": _inspect_parquet, "arrow": _inspect_arrow}

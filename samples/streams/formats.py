"""The file formats of streams, and how their row groups are found and read: Parquet, packed Arrow, CSV, and one user per line.

A Parquet file has row groups; its fingerprint is a hash of the footer. The groups of a packed Arrow file (`nonet pack SRC
FOLDER`, or any Arrow IPC file) are its record batches; a local file is memory-mapped, without copying values. Never overwrite a
mapped file in place: replace it by a rename, as `nonet pack` does. A text file is cut at line ends into groups of about 8 MiB
when it is inspected (1 GB/s); its fingerprint is a hash of the cuts and of its first and last bytes. In the format "lines", a
line `user item item ...` is a row with the columns user_id and item_id (a list). A column is integer if all its values in the
first group of the first file are.
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

pc: Any = pyarrow.compute  # Its functions are generated at import time, so type checkers do not know them.

_GROUP_BYTES = 8 << 20
_OPEN_FILES = 4
_thread_local = local()  # `files`: the open readers of this thread by (path, fingerprint).
_ENDINGS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".txt": "lines",
    ".inter": "lines",
}
FOLDER_ENDINGS = {
    form: tuple(ending for ending, its_form in _ENDINGS.items() if its_form == form)
    for form in dict.fromkeys(_ENDINGS.values())
}
"""The endings of the files that are read from a folder, by format."""
FORMATS = ("parquet", "arrow", "csv", "lines")


@dataclass(frozen=True)
class OpenedFile:
    """The result of inspecting a file: its entry in a manifest and its columns."""

    file: DataFile
    schema: pa.Schema


def detect_format(path: str, given_format: str | None) -> str:
    """Return the format of a file: parquet, arrow, csv or lines.

    Args:
        path: The path of the file; its ending determines the format if none is given.
        given_format: The format that the user gave, or None.

    Raises:
        ConfigError: If the given format or the ending is unknown.
    """
    if given_format is not None and given_format not in FORMATS:
        raise ConfigError(
            f"format is {given_format!r}; it must be one of {join_names(FORMATS)}.{suggest_sentence(given_format, FORMATS)}"
        )
    name = path.rpartition("/")[2]
    ending = name[name.rfind(".") :].lower() if "." in name else ""
    if given_format is None and not ending:
        return (
            "parquet"  # Hive writes files without an ending; the footer is checked when the file is opened.
        )
    if given_format is None and ending not in _ENDINGS:
        raise ConfigError(
            f"{path}: the ending does not determine the format; set format= to one of {join_names(FORMATS)}"
        )
    return given_format or _ENDINGS[ending]


def inspect_file(system: pafs.FileSystem, path: str, form: str, first: pa.Schema | None) -> OpenedFile:
    """Inspect a file's row groups and columns.

    Args:
        system: Filesystem of the file.
        path: Path of the file.
        form: Format of the file.
        first: Columns of the first file, which text files must have too; None for the first file.

    Raises:
        DataError: If the file cannot be read or has other columns.
    """

    def read() -> OpenedFile:
        return (
            _INSPECTORS[form](system, path)
            if form in _INSPECTORS
            else _inspect_text(system, path, form, first)
        )

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
        CorruptDataError: If the content is invalid; the message names the file and the row group.
        UnreachableDataError: If the file could not be read after several attempts.
    """
    opened = False  # Errors before the file is open are connection errors, not corruption.

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
        _thread_local.__dict__.pop("files", None)  # A broken connection is not reused.
        return False

    table = read_with_retries(read, f"{file.path}, row group {group}", is_corrupt)
    if len(table) != file.groups[group]:
        raise DataError(
            f"{file.path}, row group {group}: {len(table)} rows, but it had {file.groups[group]} when it was listed"
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
    """Return a valid Parquet file that consists only of the footer, and the hash of the footer."""
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
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us")  # Nanoseconds overflow in the year 2262.


def _open_once(path: str, fingerprint: str, open_file: Callable[[], Any]) -> Any:
    """Return the reader of a file, which is opened once per thread, because threads must not share a reader.

    Args:
        path: The path of the file.
        fingerprint: The fingerprint that the file must have.
        open_file: A function that returns the file's source, the function that computes the fingerprint of a source, and the
            function that makes a reader from a source.

    Raises:
        DataError: If the file does not have the fingerprint.
    """
    files: dict[tuple[str, str], Any] = _thread_local.__dict__.setdefault("files", {})
    if (path, fingerprint) not in files:
        source, compute_fingerprint, make_reader = open_file()
        if compute_fingerprint(source) != fingerprint:
            raise DataError(f"{path}: its content changed since it was listed")
        files[path, fingerprint] = make_reader(source)
        while len(files) > _OPEN_FILES:
            del files[next(iter(files))]
    return files[path, fingerprint]


# --- packed Arrow -------------------------------------------------------------------------------------------------


def _inspect_arrow(system: pafs.FileSystem, path: str) -> OpenedFile:
    """Inspect an Arrow IPC file."""
    with system.open_input_file(path) as source:
        size, digest = source.size(), _hash_arrow_footer(source)
        reader = pa.ipc.open_file(source)
        group_rows = (reader.schema.metadata or {}).get(GROUP_ROWS)
        if group_rows is not None:
            groups = tuple(int(rows) for rows in group_rows.decode().split(",") if rows)
        else:
            groups = tuple(reader.get_batch(at).num_rows for at in range(reader.num_record_batches))
        return OpenedFile(DataFile(path, size, groups, digest), reader.schema.remove_metadata())


def _hash_arrow_footer(source: pa.NativeFile) -> str:
    """Compute a hash of the footer, which has the position of each batch, and of the file's size."""
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
        # The file is checked with plain reads before it is mapped, because reading a truncated mapped file kills the process.
        reader = (lambda _: pa.ipc.open_file(pa.memory_map(path))) if mapped else pa.ipc.open_file
        return system.open_input_file(path), _hash_arrow_footer, reader

    return _open_once(path, fingerprint, open_source)


def _check_size(system: pafs.FileSystem, file: DataFile) -> None:
    """Raise DataError if a mapped file does not have the size that the manifest lists."""
    if isinstance(system, pafs.LocalFileSystem) and os.stat(file.path).st_size != file.bytes:
        raise DataError(f"{file.path}: its content changed since it was listed")


# --- text ---------------------------------------------------------------------------------------------------------


_WHITESPACE = b" \t\v\f\x1c\x1d\x1e\x1f"  # what `_parse_users` trims from a line


def _inspect_text(system: pafs.FileSystem, path: str, form: str, first: pa.Schema | None) -> OpenedFile:
    """Inspect a text file and cut it into groups at line ends."""
    marks, rows = [], []
    with system.open_input_file(path) as source:
        size = source.size()
        at = len(_read_header(source)) if form == "csv" else 0
        first_and_last = [
            source.read_at(min(4096, size), 0),
            source.read_at(min(4096, size), max(0, size - 4096)),
        ]
        while at < size:
            block = source.read_at(min(_GROUP_BYTES, size - at), at)
            while block[-1:] != b"\n" and at + len(block) < size:
                block += source.read_at(min(1 << 16, size - at - len(block)), at + len(block))
                cut = block.find(b"\n", _GROUP_BYTES - 1)
                block = block[: cut + 1] if cut >= 0 else block
            marks.append(at)
            rows.append(_count_lines(block, _WHITESPACE if form == "lines" else b""))
            at += len(block)
    digest = hashlib.blake2b(repr((marks, rows, first_and_last)).encode(), digest_size=12).hexdigest()
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


def _count_lines(block: bytes, blank: bytes) -> int:
    """Count the lines of a block that have another character than those in `blank` and the end of the line."""
    data = np.frombuffer(block, np.uint8)
    is_blank = np.zeros(256, bool)
    is_blank[list(blank + b"\r\n")] = True
    starts = np.concatenate([[0], np.flatnonzero(data == ord("\n")) + 1])
    return int(np.logical_or.reduceat(~is_blank[data], starts[starts < len(data)]).sum()) if len(data) else 0


def _read_text_group(
    system: pafs.FileSystem, file: DataFile, group: int, form: str, schema: pa.Schema | None
) -> pa.Table:
    """Read one group of a text file."""
    start, stop = file.marks[group : group + 2]
    with system.open_input_file(file.path) as source:
        block = source.read_at(stop - start, start)
        if len(block) < stop - start:
            raise pa.ArrowInvalid(
                f"it ends at byte {start + len(block)}, but had {file.bytes} bytes when it was listed: truncated"
            )
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
    """Parse lines of `user item item ...` to the columns user_id and item_id."""
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


_INSPECTORS = {"parquet": _inspect_parquet, "arrow": _inspect_arrow}

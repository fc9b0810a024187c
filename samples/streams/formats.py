"""The file formats of streams, and how their row groups are found and read: Parquet, packed Arrow, CSV, and one user per line.

Inspecting a file identifies its content (`nonet.contents`). Its fingerprint is a hash of a small part, by which a reader checks
that the file that it opens is the one that was inspected. A Parquet file has row groups; its fingerprint is a hash of the footer.
The groups of a packed Arrow file (`nonet pack SRC FOLDER`, or any Arrow IPC file) are its record batches; a local file is
memory-mapped, without copying values. Never overwrite a mapped file in place: replace it by a rename, as `nonet pack` does. A
text file is cut at line ends into groups of about 8 MiB when it is inspected (1 GB/s); its fingerprint is a hash of where the
groups start, of their row counts, and of its first and last bytes. In the format "lines", a line `user item item ...` is a row
with the columns user_id and item_id (a list). A column of a text file is integer if all its values in the first group of the
first file are.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import local
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as pc_csv
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from nonet.contents import identify_content
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

_GROUP_BYTES = 8 << 20  # The bytes of a row group of a text file, up to the end of its last line.
_MAX_OPEN_FILES = 4  # Maximum number of open readers per thread.
_thread_local = local()  # `files`: the open readers of this thread by (path, fingerprint), the oldest first.
_FORMAT_BY_ENDING = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".txt": "lines",
    ".inter": "lines",
}
FOLDER_ENDINGS = {
    file_format: tuple(ending for ending in _FORMAT_BY_ENDING if _FORMAT_BY_ENDING[ending] == file_format)
    for file_format in dict.fromkeys(_FORMAT_BY_ENDING.values())
}
"""The endings of the files that are read from a folder, by format."""
FORMATS = ("parquet", "arrow", "csv", "lines")


@dataclass(frozen=True)
class OpenedFile:
    """The result of inspecting a file.

    Attributes:
        file: Its entry in a manifest: size, rows of each row group, fingerprint and content.
        schema: Names and types of its columns.
    """

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
    file_name = path.rpartition("/")[2]
    file_ending = file_name[file_name.rfind(".") :].lower() if "." in file_name else ""
    if given_format is None and not file_ending:
        return "parquet"  # Hive writes files without an ending. The footer is checked when a file is opened.
    if given_format is None and file_ending not in _FORMAT_BY_ENDING:
        raise ConfigError(
            f"{path}: the ending does not determine the format; set format= to one of {join_names(FORMATS)}"
        )
    return given_format or _FORMAT_BY_ENDING[file_ending]


def inspect_file(
    system: pafs.FileSystem, path: str, file_format: str, first_schema: pa.Schema | None
) -> OpenedFile:
    """Inspect a file's row groups and columns.

    Args:
        system: Filesystem of the file.
        path: Path of the file.
        file_format: Format of the file.
        first_schema: Columns of the stream's first file, which text files must have too; None for the first file itself.

    Raises:
        DataError: If the file cannot be read or has other columns.
    """

    def read() -> OpenedFile:
        content = identify_content(system, path)
        opened = (
            _INSPECTORS[file_format](system, path)
            if file_format in _INSPECTORS
            else _inspect_text(system, path, file_format, first_schema)
        )
        return replace(opened, file=replace(opened.file, content=content))

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
    file_format: str,
    schema: pa.Schema,
    columns: Sequence[str] | None,
) -> pa.Table:
    """Read the rows of a row group.

    Args:
        system: Filesystem of the file.
        file: Entry of the file in the manifest.
        group: Index of the row group.
        file_format: Format of the file.
        schema: Types of the columns of text files.
        columns: Columns to read, those that the file has; None for all.

    Raises:
        CorruptDataError: If the content is invalid; the message names the file and the row group.
        UnreachableDataError: If the file could not be read after several attempts.
        DataError: If the file has changed since the manifest was made.
    """
    is_open = False  # Errors before the file is open are connection errors, not corruption.

    def read() -> pa.Table:
        nonlocal is_open
        is_open = file_format not in ("parquet", "arrow")  # A text file counts as open from the start.
        if file_format == "parquet":
            reader = _open_parquet(system, file.path, file.fingerprint)
            is_open = True
            return reader.read_row_group(
                group, columns=None if columns is None else list(columns), use_threads=False
            )
        if file_format == "arrow":
            _check_size(system, file)
            reader = _open_arrow(system, file.path, file.fingerprint)
            is_open = True
            table = pa.Table.from_batches([reader.get_batch(group)])
        else:
            table = _read_text_group(system, file, group, file_format, schema)
        return (
            table
            if columns is None
            else table.select([name for name in columns if name in table.column_names])
        )

    def check_error(error: OSError) -> bool:
        """Return whether the content is invalid; if not, drop this thread's readers, whose connection may be broken."""
        if is_open and is_corruption(error, system, file.path):
            return True
        _thread_local.__dict__.pop("files", None)
        return False

    table = read_with_retries(read, f"{file.path}, row group {group}", check_error)
    if len(table) != file.groups[group]:
        raise DataError(
            f"{file.path}, row group {group}: {len(table)} rows, but it had {file.groups[group]} when it was listed"
        )
    return table


# --- Parquet ------------------------------------------------------------------------------------------------------


def _inspect_parquet(system: pafs.FileSystem, path: str) -> OpenedFile:
    """Inspect a Parquet file, of which only the footer is read."""
    with system.open_input_file(path) as file_source:
        size, (footer, fingerprint) = file_source.size(), _read_footer(file_source)
        footer_file = pq.ParquetFile(pa.BufferReader(footer), coerce_int96_timestamp_unit="us")
        metadata, schema = footer_file.metadata, footer_file.schema_arrow
    group_rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    return OpenedFile(DataFile(path, size, group_rows, fingerprint), schema.remove_metadata())


def _read_footer(source: pa.NativeFile) -> tuple[bytes, str]:
    """Return a valid Parquet file that consists only of the footer, and the hash of the footer."""
    size = source.size()
    if size < 12:  # Two markers of four bytes and the length of the footer.
        raise pa.ArrowInvalid(f"{size} bytes are not a Parquet file")
    last_bytes = source.read_at(8, size - 8)  # The length of the footer and the marker PAR1.
    footer_bytes = int.from_bytes(last_bytes[:4], "little")
    if last_bytes[4:] != b"PAR1" or footer_bytes + 12 > size:
        raise pa.ArrowInvalid("it does not end in a Parquet footer")
    footer = source.read_at(footer_bytes, size - 8 - footer_bytes)
    return b"PAR1" + footer + last_bytes, hashlib.blake2b(footer, digest_size=12).hexdigest()


def _open_parquet(system: pafs.FileSystem, path: str, fingerprint: str) -> pq.ParquetFile:
    """Return this thread's reader of a Parquet file. Raises DataError if the file does not have the fingerprint."""

    def open_source() -> Any:
        return system.open_input_file(path), lambda source: _read_footer(source)[1], _make_parquet_reader

    return _open_once(path, fingerprint, open_source)


def _make_parquet_reader(source: Any) -> pq.ParquetFile:
    """Return the reader of an open Parquet file, in which old INT96 timestamps are microseconds."""
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
    readers: dict[tuple[str, str], Any] = _thread_local.__dict__.setdefault("files", {})
    if (path, fingerprint) not in readers:
        source, compute_fingerprint, make_reader = open_file()
        if compute_fingerprint(source) != fingerprint:
            raise DataError(f"{path}: its content changed since it was listed")
        readers[path, fingerprint] = make_reader(source)
        while len(readers) > _MAX_OPEN_FILES:
            del readers[next(iter(readers))]
    return readers[path, fingerprint]


# --- packed Arrow -------------------------------------------------------------------------------------------------


def _inspect_arrow(system: pafs.FileSystem, path: str) -> OpenedFile:
    """Inspect an Arrow IPC file; the row counts are in its metadata if Nonet has written it, else batches are read."""
    with system.open_input_file(path) as source:
        size, fingerprint = source.size(), _hash_arrow_footer(source)
        reader = pa.ipc.open_file(source)
        listed_rows = (reader.schema.metadata or {}).get(GROUP_ROWS)
        if listed_rows is not None:
            group_rows = tuple(int(rows) for rows in listed_rows.decode().split(",") if rows)
        else:
            group_rows = tuple(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
        return OpenedFile(DataFile(path, size, group_rows, fingerprint), reader.schema.remove_metadata())


def _hash_arrow_footer(source: pa.NativeFile) -> str:
    """Return a hash of the file's size and of its footer, which has the position of each batch."""
    size = source.size()
    # The length of the footer (4 bytes) and the marker ARROW1.
    last_bytes = source.read_at(min(10, size), max(0, size - 10))
    if size < 18 or last_bytes[4:] != b"ARROW1":
        raise pa.ArrowInvalid("it does not end in an Arrow footer")
    footer_bytes = int.from_bytes(last_bytes[:4], "little")
    footer = source.read_at(footer_bytes, size - 10 - footer_bytes)
    return hashlib.blake2b(footer + size.to_bytes(8, "little"), digest_size=12).hexdigest()


def _open_arrow(system: pafs.FileSystem, path: str, fingerprint: str) -> pa.ipc.RecordBatchFileReader:
    """Return this thread's reader of an Arrow IPC file; a local file is memory-mapped.

    Raises:
        DataError: If the file does not have the fingerprint.
    """
    is_local = isinstance(system, pafs.LocalFileSystem)

    def open_source() -> Any:
        # The file is checked with plain reads before it is mapped, because reading a truncated mapped file kills the process.
        make_reader = (lambda _: pa.ipc.open_file(pa.memory_map(path))) if is_local else pa.ipc.open_file
        return system.open_input_file(path), _hash_arrow_footer, make_reader

    return _open_once(path, fingerprint, open_source)


def _check_size(system: pafs.FileSystem, file: DataFile) -> None:
    """Raise DataError if a local file, which is mapped, does not have the size that the manifest lists."""
    if isinstance(system, pafs.LocalFileSystem) and os.stat(file.path).st_size != file.bytes:
        raise DataError(f"{file.path}: its content changed since it was listed")


# --- text ---------------------------------------------------------------------------------------------------------


_LINE_WHITESPACE = (
    b" \t\v\f\x1c\x1d\x1e\x1f"  # What `_parse_user_lines` trims from a line, besides \r and \n.
)


def _inspect_text(
    system: pafs.FileSystem, path: str, file_format: str, first_schema: pa.Schema | None
) -> OpenedFile:
    """Inspect a text file and cut it into groups at line ends; arguments as for `inspect_file`."""
    group_starts, group_rows = [], []
    with system.open_input_file(path) as source:
        size = source.size()
        head = _read_first_line(source)
        _check_text_head(head, path)
        # The first group of a CSV file starts after the header.
        start = len(head) if file_format == "csv" else len(codecs.BOM_UTF8) * head.startswith(codecs.BOM_UTF8)
        first_and_last = [
            source.read_at(min(4096, size), 0),
            source.read_at(min(4096, size), max(0, size - 4096)),
        ]
        while start < size:
            group_bytes = source.read_at(min(_GROUP_BYTES, size - start), start)
            while group_bytes[-1:] != b"\n" and (stop := start + len(group_bytes)) < size:
                group_bytes += source.read_at(min(1 << 16, size - stop), stop)
                line_end = group_bytes.find(b"\n", _GROUP_BYTES - 1)
                group_bytes = group_bytes[: line_end + 1] if line_end >= 0 else group_bytes
            group_starts.append(start)
            group_rows.append(_count_lines(group_bytes, _LINE_WHITESPACE if file_format == "lines" else b""))
            start += len(group_bytes)
    facts = repr((group_starts, group_rows, first_and_last))
    fingerprint = hashlib.blake2b(facts.encode(), digest_size=12).hexdigest()
    file = DataFile(path, size, tuple(group_rows), fingerprint, (*group_starts, size))
    if first_schema is None:
        first_schema = (
            _read_text_group(system, file, group=0, file_format=file_format, schema=None).schema
            if group_rows
            else pa.schema([])
        )
    elif file_format == "csv" and (names := _read_csv_names(system, path)) != first_schema.names:
        raise DataError(
            f"{path}: its columns are {join_names(names)}, those of the first file {join_names(first_schema.names)}"
        )
    return OpenedFile(file, first_schema)


def _check_text_head(head: bytes, path: str) -> None:
    """Raise DataError if the first line of a text file is UTF-16 or one with which Excel begins a file."""
    if b"\0" in head or head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path}: the file is UTF-16 or binary, not UTF-8; save the file as UTF-8 text")
    if head.removeprefix(codecs.BOM_UTF8).lower().lstrip(b'"').startswith(b"sep="):
        line = head.decode("utf-8", errors="replace").strip()
        raise DataError(
            f"{path}: its first line is {line!r}; remove that line, and separate columns by commas"
        )


def _read_first_line(source: pa.NativeFile) -> bytes:
    """Return the first line of a file with its end, or the first 64 KiB if they have no end of a line."""
    first_bytes = source.read_at(min(1 << 16, source.size()), 0)
    return first_bytes[: first_bytes.find(b"\n") + 1] if b"\n" in first_bytes else first_bytes


def _read_csv_names(system: pafs.FileSystem, path: str) -> list[str]:
    """Return the column names of a CSV file."""
    with system.open_input_file(path) as source:
        return pc_csv.read_csv(io.BytesIO(_read_first_line(source))).column_names


def _count_lines(text_bytes: bytes, blank_bytes: bytes) -> int:
    """Count the lines of a text that have a byte other than those in `blank_bytes` and the end of the line."""
    codes = np.frombuffer(text_bytes, np.uint8)
    is_blank = np.zeros(256, bool)
    is_blank[list(blank_bytes + b"\r\n")] = True
    line_starts = np.concatenate([[0], np.flatnonzero(codes == ord("\n")) + 1])
    # No line starts after a newline at the end of the text.
    line_starts = line_starts[line_starts < len(codes)]
    return int(np.logical_or.reduceat(~is_blank[codes], line_starts).sum()) if len(codes) else 0


def _read_text_group(
    system: pafs.FileSystem, file: DataFile, group: int, file_format: str, schema: pa.Schema | None
) -> pa.Table:
    """Read one row group of a text file; without a schema, the types are detected from its values."""
    start, stop = file.marks[group : group + 2]
    with system.open_input_file(file.path) as source:
        group_bytes = source.read_at(stop - start, start)
        if len(group_bytes) < stop - start:
            raise pa.ArrowInvalid(
                f"it ends at byte {start + len(group_bytes)}, but had {file.bytes} bytes when it was listed: truncated"
            )
        header = _read_first_line(source) if file_format == "csv" else b""
    try:
        (header + group_bytes).decode("utf-8")
    except UnicodeDecodeError:
        raise pa.ArrowInvalid("a text is not UTF-8; save the file as UTF-8") from None
    if file_format == "lines":
        return _parse_user_lines(group_bytes, schema)
    types = {} if schema is None else {field.name: field.type for field in schema}
    return pc_csv.read_csv(
        io.BytesIO(header + group_bytes),
        read_options=pc_csv.ReadOptions(use_threads=False, block_size=len(header) + len(group_bytes) + 1),
        convert_options=pc_csv.ConvertOptions(column_types=types),
    )


def _parse_user_lines(text_bytes: bytes, schema: pa.Schema | None) -> pa.Table:
    """Parse lines of `user item item ...` to the columns user_id and item_id (a list).

    Args:
        text_bytes: Whole lines; blank ones are left out.
        schema: Types of the columns; None to detect whether ids are integers.
    """
    one_text = pa.array([text_bytes.decode("utf-8")])
    lines = pc.list_flatten(pc.split_pattern_regex(one_text, r"\r?\n"))
    lines = pc.utf8_trim_whitespace(lines)
    words_by_line = pc.split_pattern_regex(lines.filter(pc.not_equal(lines, "")), r"[ \t]+")
    user_ids = pc.list_element(words_by_line, 0)
    all_words, word_offsets = words_by_line.values, words_by_line.offsets.to_numpy()
    is_item = np.ones(len(all_words), bool)
    is_item[word_offsets[:-1]] = False  # The first word of each line is the user.
    item_ids = all_words.filter(pa.array(is_item))
    # Each line before an offset has one word, its user, that is not an item.
    item_offsets = pa.array((word_offsets - np.arange(len(word_offsets))).astype(np.int32))
    if schema is None:
        user_ids, item_ids = _parse_integers(user_ids), _parse_integers(item_ids)
    else:
        user_ids, item_ids = (
            user_ids.cast(schema.field("user_id").type),
            item_ids.cast(schema.field("item_id").type.value_type),
        )
    return pa.table({"user_id": user_ids, "item_id": pa.ListArray.from_arrays(item_offsets, item_ids)})


def _parse_integers(texts: pa.Array) -> pa.Array:
    """Convert texts to int64 if all of them are integers; otherwise return them unchanged."""
    try:
        return texts.cast(pa.int64())
    except pa.ArrowException:
        return texts


# The formats whose files list their row groups; text files are inspected by `_inspect_text`.
_INSPECTORS = {"parquet": _inspect_parquet, "arrow": _inspect_arrow}

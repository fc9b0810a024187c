"""TextForm: the format of a text file, detected from its content: JSON lines or delimited, with or without a header; encoding.

The endings .txt, .dat and .csv say little about the format, so the first 64 KiB of a file decide. A first line of data must not
be taken for a header: error messages would print its fields, and its event would be lost.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonet.errors import DataError
from nonet.samples.tables import MISSING, NAMES, normalise_name

_HEAD_BYTES = 1 << 16  # the length of the beginning of a file from which its format is detected
_DELIMITERS = (",", "\t", ";", "|", " ")  # an earlier one wins a tie
_MIN_ALIKE_SHARE = (
    0.9  # share of lines with as many fields as the first one, above which a delimiter is plausible
)
_SEPARATOR_LINE = re.compile(
    r'"?sep=(.)\1*"?[;, \t]*\r?\n', re.IGNORECASE
)  # Excel's first line, such as `sep=;`
_ENCODINGS = ("utf-8", "cp1252", "latin-1")  # tried in this order; the last one reads any bytes
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|\.\d+)([eE][+-]?\d+)?$")
_DATE = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}([T ]\d{1,2}:\d{2}.*)?$|\d{1,2}[./]\d{1,2}[./]\d{2,4}( .*)?$|\d{1,2}:\d{2}(:\d{2})?$"
)
_RECBOLE_TYPE = re.compile(r":(token|token_seq|float|float_seq)$")  # type suffix of a column name
_KNOWN_NAMES = {name for names in NAMES.values() for name in names.split()} | {"useridx", "itemidx", "index"}
# What a file that is not supported is, by its first bytes.
_BINARY_FORMATS = {
    b"PK\x03\x04": "a zip archive or an Excel file",
    b"%PDF": "a PDF",
    b"ARROW1": "an Arrow file",
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3": "a SQLite database",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
}


@dataclass(frozen=True, slots=True)
class TextForm:
    """The detected format of a text file.

    Attributes:
        kind: "json" for one JSON object per line, "delimited" for a table.
        delimiter: The character that separates fields; "" for JSON.
        has_header: Whether the first line holds the names of the columns.
        sure: Whether `has_header` is certain. If it is not, no error message may print fields of the first line.
        encoding: Python's name of the encoding.
        gzipped: Whether the content is compressed by gzip, whatever the file is called.
        names: Names of the columns; "column_1", "column_2", ... if there is no header; empty for JSON.
        missing: Texts that stand for a missing value in columns of numbers, in addition to the empty text.
        skipped_lines: The number of lines before the header or the first row, which are no data.
    """

    kind: str
    delimiter: str
    has_header: bool
    sure: bool
    encoding: str
    gzipped: bool
    names: tuple[str, ...]
    missing: tuple[str, ...] = MISSING
    skipped_lines: int = 0

    def list_encodings(self) -> list[str]:
        """Return the encodings to try in this order, because only the beginning of the file has been checked."""
        return list(_ENCODINGS[_ENCODINGS.index(self.encoding) :])


def detect_text_form(path: str | os.PathLike[str], label: str) -> TextForm:
    """Detect the format of a text file from its beginning; `label` opens every error message.

    Raises:
        DataError: The file does not exist, is empty, or is neither delimited text nor JSON lines.
    """
    head, gzipped = _read_head(Path(path), label)
    if not head.removeprefix(codecs.BOM_UTF8).strip():
        raise DataError(f"{label} {path}: the file is empty.")
    if _is_utf16(head):
        raise DataError(f"{label} {path}: the file is UTF-16, not UTF-8; save the file as UTF-8 text.")
    encoding = _detect_encoding(head)
    text = head.decode(encoding, errors="replace").lstrip("\ufeff")
    if len(head) >= _HEAD_BYTES and "\n" in text:
        text = text[: text.rindex("\n") + 1]  # the last line may be incomplete
    if "\0" in text:
        raise DataError(f"{label} {path}: the file holds binary data; give CSV, JSON lines or Parquet.")
    first_character = text.lstrip()[:1]
    if first_character in ("{", "["):
        _check_json(text.lstrip(), path, label)
        return TextForm(
            "json", delimiter="", has_header=True, sure=True, encoding=encoding, gzipped=gzipped, names=()
        )
    if first_character == "<":
        raise DataError(f"{label} {path}: the file is HTML or XML; give CSV, JSON lines or Parquet.")
    separator_line = _SEPARATOR_LINE.match(text)
    if separator_line is not None:
        text = text[separator_line.end() :]
        if not text.strip():
            raise DataError(f"{label} {path}: the file is empty, apart from its line sep=.")
    delimiter, records = _detect_delimiter(text, _DELIMITERS if separator_line is None else separator_line[1])
    if delimiter == "::":
        raise DataError(
            f"{label} {path}: fields are separated by '::', which is no delimiter of one character; "
            "write a comma or a tab instead"
        )
    has_header, sure = _detect_header(records)
    names = records[0] if has_header else [f"column_{number}" for number in range(1, len(records[0]) + 1)]
    skipped_lines = int(separator_line is not None)
    return TextForm(
        "delimited", delimiter, has_header, sure, encoding, gzipped, tuple(names), skipped_lines=skipped_lines
    )


def _is_utf16(head: bytes) -> bool:
    """Return whether the first bytes of a text are UTF-16, with a byte order mark or, without it, with many zero bytes."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    zeros, others = sorted((head[::2].count(0), head[1::2].count(0)))[::-1]
    return zeros > len(head) // 4 and others == 0


def decode_text(content: bytes) -> tuple[str, str]:
    """Decode the whole content of a text file in the first encoding in which it is valid.

    Returns:
        The text without a byte order mark, and Python's name of the encoding.
    """
    content = content.removeprefix(codecs.BOM_UTF8)
    for encoding in _ENCODINGS:
        try:
            return content.decode(encoding), encoding
        except UnicodeDecodeError:
            continue
    raise AssertionError("latin-1 reads any bytes")


def read_whole_text(path: str | os.PathLike[str], label: str) -> str:
    """Read a text file in its encoding; `label` opens every error message.

    Raises:
        DataError: The file does not exist, cannot be read, or is no text that is supported.
    """
    head, gzipped = _read_head(Path(path), label)
    if _is_utf16(head):
        raise DataError(f"{label} {path}: the file is UTF-16, not UTF-8; save the file as UTF-8 text.")
    try:
        with gzip.open(path, "rb") if gzipped else open(path, "rb") as source:
            return decode_text(source.read())[0]
    except (OSError, EOFError) as error:
        raise DataError(f"{label} {path}: cannot be read: {error}") from None


def is_parquet_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins with the magic number of Parquet."""
    with open(path, "rb") as source:
        return source.read(4) == b"PAR1"


def read_bytes(path: str | os.PathLike[str], form: TextForm) -> io.BufferedIOBase | Any:
    """Open a file for reading its decompressed bytes, without a byte order mark of UTF-8."""
    source = gzip.open(path, "rb") if form.gzipped else open(path, "rb")  # noqa: SIM115  the caller closes it
    if source.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        source.seek(0)
    return source


def split_lines(text: str) -> list[str]:
    """Split text at line feeds only, unlike `str.splitlines`, which also splits at U+2028 or U+0085, which occur in titles."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def _read_head(path: Path, label: str) -> tuple[bytes, bool]:
    """Return the first decompressed bytes of a file, and whether the file is gzipped.

    Raises:
        DataError: The file cannot be read, or has a known binary format.
    """
    if not path.is_file():
        raise DataError(f"{label} {path}: no such file.")
    try:
        with open(path, "rb") as source:
            head = source.read(_HEAD_BYTES)
        for magic, description in _BINARY_FORMATS.items():
            if head.startswith(magic):
                raise DataError(
                    f"{label} {path}: the file is {description}; give CSV, JSON lines or Parquet."
                )
        if head[:2] == b"\x1f\x8b":  # gzip
            with gzip.open(path, "rb") as source:
                return source.read(_HEAD_BYTES), True
        return head, False
    except (OSError, EOFError) as error:
        raise DataError(f"{label} {path}: cannot be read: {error}") from None


def _detect_encoding(head: bytes) -> str:
    """Return utf-8 if the bytes are valid, else cp1252."""
    decoder = codecs.getincrementaldecoder("utf-8")()  # accepts a character that is cut off at the end
    try:
        decoder.decode(head, final=False)
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def _check_json(text: str, path: str | os.PathLike[str], label: str) -> None:
    """Raise DataError if the first line is not a JSON object."""
    line = split_lines(text)[0]
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise DataError(
            f"{label} {path}: the file is JSON, but not JSON lines, which hold an object a line; write it so, or as CSV or "
            "Parquet"
        )


def _detect_delimiter(text: str, delimiters: Sequence[str]) -> tuple[str, list[list[str]]]:
    """Return the one of `delimiters` that splits most lines into as many fields, and the first lines split by it."""
    best: tuple[Any, str, list[list[str]]] | None = None  # score, delimiter and lines
    first_lines = [line for line in split_lines(text)[:50] if line]
    if len(delimiters) > 1 and first_lines and all("::" in line for line in first_lines):
        return "::", [first_lines[0].split("::")]
    for index, delimiter in enumerate(delimiters):
        try:
            rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
            records = [row for row, _ in zip(rows, range(400), strict=False) if row]
        except csv.Error:
            continue
        if not records or (delimiter == " " and len(records[0]) < 3):  # a space may also be part of a title
            continue
        width = len(records[0])
        is_regular = sum(len(row) == width for row in records) / len(records) > _MIN_ALIKE_SHARE
        score = (
            width > 1 and is_regular,
            width > 1,
            is_regular,
            width if delimiter != " " else 0,
            -index,
        )
        if best is None or score > best[0]:
            best = score, delimiter, records
    return (best[1], best[2]) if best else (delimiters[0], [[split_lines(text)[0]]])


def _detect_header(records: list[list[str]]) -> tuple[bool, bool]:
    """Return whether the first line holds names, and whether that is certain."""
    first, rest = [field.strip() for field in records[0]], records[1:]
    if any(_RECBOLE_TYPE.search(field) for field in first):
        return True, True
    known_count = sum(normalise_name(field) in _KNOWN_NAMES for field in first)
    if any(_is_value(field) for field in first):
        return known_count >= 2, True
    if known_count:
        return True, True
    for index, field in enumerate(first):
        column = [row[index].strip() for row in rest if index < len(row)]
        if field and field in column:  # a value that occurs again is no name
            return False, True
        values = [value for value in column if value]
        if values and all(map(_is_value, values)):  # a text above numbers or dates is a name
            return True, True
    return True, False


def _is_value(field: str) -> bool:
    """Return whether a field is a number, a date or a time, which is never a name."""
    return bool(_NUMBER.match(field) or _DATE.match(field))

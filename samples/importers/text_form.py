"""What a text file is, by its content: JSON lines or a table with a delimiter, with or without a line of names; its encoding.

Files are called .txt, .dat or .csv whatever is in them, so the first 64 KiB decide. A first line that is data is never taken for
names: its fields would be printed and its event lost.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonet.errors import DataError
from nonet.samples.tables import MISSING, NAMES, normalise_name

_HEAD = 1 << 16
_DELIMITERS = (",", "\t", ";", "|", " ")
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|\.\d+)([eE][+-]?\d+)?$")
_DATE = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}([T ]\d{1,2}:\d{2}.*)?$|\d{1,2}[./]\d{1,2}[./]\d{2,4}( .*)?$|\d{1,2}:\d{2}(:\d{2})?$"
)
_TYPED = re.compile(r":(token|token_seq|float|float_seq)$")
_KNOWN = {name for names in NAMES.values() for name in names.split()} | {"useridx", "itemidx", "index"}
_BINARY = {
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
    """What was found out about a text file.

    Attributes:
        kind: "json" for an object a line, "delimited" for a table.
        delimiter: what fields are cut at.
        has_header: whether the first line holds names.
        sure: whether that is certain; where it is not, nothing of the first line may be printed.
        encoding: as Python names it.
        gzipped: whether the content is compressed by gzip, whatever the file is called.
        names: of the columns; "column_1", "column_2", ... where there is no header.
        missing: texts that stand for a missing value in columns of numbers, beside the empty one.
    """

    kind: str
    delimiter: str
    has_header: bool
    sure: bool
    encoding: str
    gzipped: bool
    names: tuple[str, ...]
    missing: tuple[str, ...] = MISSING


def detect_text_form(path: str | os.PathLike[str], label: str) -> TextForm:
    """Look at the beginning of a file. Raises DataError for a file that is empty, missing or no text."""
    head, gzipped = _read_head(Path(path), label)
    if not head.strip():
        raise DataError(f"{label} {path}: the file is empty.")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{label} {path}: the file is UTF-16, not UTF-8; save the file as UTF-8 text.")
    encoding = _detect_encoding(head)
    text = head.decode(encoding, errors="replace").lstrip("\ufeff")
    if len(head) >= _HEAD and "\n" in text:
        text = text[: text.rindex("\n") + 1]  # the last line may be cut
    if "\0" in text:
        raise DataError(f"{label} {path}: the file holds binary data; give CSV, JSON lines or Parquet.")
    first = text.lstrip()[:1]
    if first in ("{", "["):
        _check_json(text.lstrip(), path, label)
        return TextForm("json", "", True, True, encoding, gzipped, ())
    if first == "<":
        raise DataError(f"{label} {path}: the file is HTML or XML; give CSV, JSON lines or Parquet.")
    delimiter, records = _detect_delimiter(text)
    if delimiter == "::":
        raise DataError(
            f"{label} {path}: fields are separated by '::', which is no delimiter of one character; "
            "write a comma or a tab instead"
        )
    has_header, sure = _detect_header(records)
    names = records[0] if has_header else [f"column_{number}" for number in range(1, len(records[0]) + 1)]
    return TextForm("delimited", delimiter, has_header, sure, encoding, gzipped, tuple(names))


def is_parquet_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's content begins as Parquet does."""
    with open(path, "rb") as source:
        return source.read(4) == b"PAR1"


def read_bytes(path: str | os.PathLike[str], form: TextForm) -> io.BufferedIOBase | Any:
    """Open the content of a file, decompressed."""
    return gzip.open(path, "rb") if form.gzipped else open(path, "rb")


def split_lines(text: str) -> list[str]:
    """Cut text at line feeds alone. `str.splitlines` also cuts at characters that titles hold, such as U+2028 and U+0085."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def _read_head(path: Path, what: str) -> tuple[bytes, bool]:
    """Read the first bytes of a file, decompressed. Returns them, and whether the file is gzipped. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{what} {path}: no such file.")
    try:
        with open(path, "rb") as source:
            head = source.read(_HEAD)
        for magic, said in _BINARY.items():
            if head.startswith(magic):
                raise DataError(f"{what} {path}: the file is {said}; give CSV, JSON lines or Parquet.")
        if head[:2] == b"\x1f\x8b":
            with gzip.open(path, "rb") as source:
                return source.read(_HEAD), True
        return head, False
    except (OSError, EOFError) as error:
        raise DataError(f"{what} {path}: cannot be read: {error}") from None


def _detect_encoding(head: bytes) -> str:
    """Return utf-8 if the bytes are valid, else cp1252."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(head, final=False)
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def _check_json(text: str, path: str | os.PathLike[str], what: str) -> None:
    """Raise DataError if the first line is not a JSON object."""
    line = split_lines(text)[0]
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise DataError(
            f"{what} {path}: the file is JSON, but not JSON lines, which hold an object a line; write it so, or as CSV or Parquet"
        )


def _detect_delimiter(text: str) -> tuple[str, list[list[str]]]:
    """Return the delimiter that splits most lines into the same number of fields, and the first lines split by it."""
    best: tuple[Any, str, list[list[str]]] | None = None
    doubled = [line for line in split_lines(text)[:50] if line]
    if doubled and all("::" in line for line in doubled):
        return "::", [doubled[0].split("::")]
    for place, delimiter in enumerate(_DELIMITERS):
        try:
            rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
            records = [row for row, _ in zip(rows, range(400), strict=False) if row]
        except csv.Error:
            continue
        if not records or (delimiter == " " and len(records[0]) < 3):
            continue
        width = len(records[0])
        alike = sum(len(row) == width for row in records) / len(records)
        score = (width > 1 and alike > 0.9, width > 1, alike > 0.9, width if delimiter != " " else 0, -place)
        if best is None or score > best[0]:
            best = score, delimiter, records
    return (best[1], best[2]) if best else (",", [[split_lines(text)[0]]])


def _detect_header(records: list[list[str]]) -> tuple[bool, bool]:
    """Return whether the first line holds names, and whether that is certain."""
    first, rest = [field.strip() for field in records[0]], records[1:]
    if any(_TYPED.search(field) for field in first):
        return True, True
    known = sum(normalise_name(field) in _KNOWN for field in first)
    if any(_is_value(field) for field in first):
        return known >= 2, True
    if known:
        return True, True
    for place, field in enumerate(first):
        column = [row[place].strip() for row in rest if place < len(row)]
        if field and field in column:
            return False, True
        filled = [value for value in column if value]
        if filled and all(map(_is_value, filled)):
            return True, True
    return True, False


def _is_value(field: str) -> bool:
    return bool(_NUMBER.match(field) or _DATE.match(field))

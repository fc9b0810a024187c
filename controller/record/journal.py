"""Journals of records: append-only files with one JSON record and its CRC for each line.

The journal of a run records which steps were applied and which checkpoints were written; the newest complete checkpoint is
authoritative. It is a sequence, which the first damaged line ends. The other journal has the commands that a run received. Each
of its records has a meaning of its own, so damaged lines are skipped.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from nonet.atomic import write_whole
from nonet.journal import LineJournal

_RECORD_START = re.compile(rb'\{"crc":')
_log = logging.getLogger(__name__)


class Journal(LineJournal):
    """The journal of a run, open for appending. A record is on disk when `write` returns; several threads may write.

    The lines from the first damaged one on are removed, since nobody would read what is appended behind them.
    """

    def __init__(self, path: Path):
        self._records_before = sum(1 for _ in read_journal(path))
        lines = sum(1 for _ in LineJournal(path, read_only=True).iterate_lines())
        if lines > self._records_before:
            _log.warning("%s: removed %d lines from a damaged one on", path, lines - self._records_before)
            cut_journal(path, self._records_before)
        super().__init__(path)

    @property
    def records(self) -> int:
        """The number of records in the file."""
        return self._records_before + self.appended_lines

    def write(self, **record: Any) -> None:
        """Append one record and wait until it is on disk."""
        self.append(encode_record(record))


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a journal in order, up to the first damaged line; none if there is no such file."""
    for _, line in LineJournal(path, read_only=True).iterate_lines():
        record = _decode_record(line)
        if record is None:
            return
        yield record


def read_intact_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a journal in order, without damaged lines; none if there is no such file.

    Earlier versions appended behind the torn line of a process that was killed. The record at the end of such a line is found.
    """
    for place, line in LineJournal(path, read_only=True).iterate_lines():
        ends = (line[match.start() :] for match in _RECORD_START.finditer(line))
        record = next((record for record in map(_decode_record, ends) if record is not None), None)
        if record is None:
            _log.warning("%s of %s is damaged and was skipped", place, path.parent)
        else:
            yield record


def cut_journal(path: Path, keep: int) -> None:
    """Truncate a journal to its first `keep` records, atomically."""
    records = islice(read_journal(path), keep)
    write_whole(path, b"".join(encode_record(record) + b"\n" for record in records))


def encode_record(record: dict[str, Any]) -> bytes:
    """Encode a record as a line {"crc": CRC-32 of the record's JSON text, "r": record}."""
    body = json.dumps(record, separators=(",", ":"))
    return f'{{"crc":{zlib.crc32(body.encode())},"r":{body}}}'.encode()


def _decode_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if the line is damaged."""
    try:
        entry = json.loads(line)
        body = json.dumps(entry["r"], separators=(",", ":"))
        return entry["r"] if zlib.crc32(body.encode()) == entry["crc"] else None
    except (ValueError, KeyError, TypeError):
        return None

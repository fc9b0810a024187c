"""A journal: an append-only file with one JSON line and its CRC for each record.

The journal of a run records which steps were applied and which checkpoints were written; the newest complete checkpoint is
authoritative. Another journal records the commands that a run received. The first damaged line ends a journal.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

from nonet.atomic import sync, write_whole


class Journal:
    """A journal that is open for appending.

    A record is on disk when `write` returns. Several threads may write.

    Attributes:
        records: The number of records in the file.
    """

    def __init__(self, path: Path):
        self.records = sum(1 for _ in read_journal(path))
        self._file, self._lock = path.open("ab"), Lock()
        sync(path.parent)

    def write(self, **record: Any) -> None:
        """Append one record and flush it to disk."""
        with self._lock:
            self._file.write(_encode_record(record))
            self._file.flush()
            os.fsync(self._file.fileno())
            self.records += 1

    def close(self) -> None:
        """Close the journal's file."""
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a journal in order, up to the first damaged line; none if there is no such file."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            record = _decode_record(line)
            if record is None:
                return
            yield record


def cut_journal(path: Path, keep: int) -> None:
    """Truncate a journal to its first `keep` records, atomically."""
    records = islice(read_journal(path), keep)
    write_whole(path, b"".join(_encode_record(record) for record in records))


def _encode_record(record: dict[str, Any]) -> bytes:
    """Encode a record as a line {"crc": CRC-32 of the record's JSON text, "r": record}."""
    body = json.dumps(record, separators=(",", ":"))
    return f'{{"crc":{zlib.crc32(body.encode())},"r":{body}}}\n'.encode()


def _decode_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if the line is damaged."""
    try:
        entry = json.loads(line)
        body = json.dumps(entry["r"], separators=(",", ":"))
        return entry["r"] if zlib.crc32(body.encode()) == entry["crc"] else None
    except (ValueError, KeyError, TypeError):
        return None

"""A journal of the events since the last checkpoint: one JSON line with a CRC for each record.

The newest complete checkpoint is authoritative. The journal adds what came after it, and the commands that a run
received. The first damaged line ends the journal.
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
    """An append-only file of records.

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
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records up to the first damaged line."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            record = _decode_record(line)
            if record is None:
                return
            yield record


def cut_journal(path: Path, keep: int) -> None:
    """Truncate a journal to its first `keep` records."""
    records = islice(read_journal(path), keep)
    write_whole(path, b"".join(_encode_record(record) for record in records))


def _encode_record(record: dict[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":"))
    return f'{{"crc":{zlib.crc32(body.encode())},"r":{body}}}\n'.encode()


def _decode_record(line: bytes) -> dict[str, Any] | None:
    """Decode a line, or return None if it is damaged."""
    try:
        entry = json.loads(line)
        body = json.dumps(entry["r"], separators=(",", ":"))
        return entry["r"] if zlib.crc32(body.encode()) == entry["crc"] else None
    except (ValueError, KeyError, TypeError):
        return None

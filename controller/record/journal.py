"""Journal: what happened since the last commit, one JSON line with a crc each; the first bad line ends it.

The truth is the newest whole checkpoint. The journal tells what came after it, and the commands a run was given.
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
    """Appends records; every record is on disk when `write` returns, whichever thread wrote it. `records`: how many there are."""

    def __init__(self, path: Path):
        self.records = sum(1 for _ in read_journal(path))
        self._file, self._lock = path.open("ab"), Lock()
        sync(path.parent)

    def write(self, **record: Any) -> None:
        """One record, flushed to disk."""
        with self._lock:
            self._file.write(_line(record))
            self._file.flush()
            os.fsync(self._file.fileno())
            self.records += 1

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The records up to the first torn or damaged line."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            record = _record(line)
            if record is None:
                return
            yield record


def cut_journal(path: Path, keep: int) -> None:
    """Keep the first `keep` records: what a commit does not know of is forgotten."""
    records = islice(read_journal(path), keep)
    write_whole(path, b"".join(_line(record) for record in records))


def _line(record: dict[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":"))
    return f'{{"crc":{zlib.crc32(body.encode())},"r":{body}}}\n'.encode()


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        whole = json.loads(line)
        body = json.dumps(whole["r"], separators=(",", ":"))
        return whole["r"] if zlib.crc32(body.encode()) == whole["crc"] else None
    except (ValueError, KeyError, TypeError):
        return None

"""The journal of posted events: one JSON line per post in a file that is sealed when it is full.

    events.jsonl             the segment that lines are appended to
    events/000001.jsonl      sealed segments, oldest first; they are never rewritten

A line counts when all of it is on disk. A failed write is truncated, so the next line starts on a new line.
Several processes may append to one journal: each write holds a lock on the file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, sync
from nonet.errors import ConfigError, NonetError

_SEGMENT_BYTES = 64 << 20
_DAY_S = 86_400.0
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger(__name__)


class StorageFull(NonetError):
    """The disk is full; nothing of the post was stored."""


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """Size and age of a journal's segments.

    Attributes:
        segment_bytes: Size at which the file is sealed and a new one begins.
        retention_days: Days after their last write at which sealed segments are deleted; None keeps all.
    """

    segment_bytes: int = _SEGMENT_BYTES
    retention_days: float | None = None


class EventJournal:
    """The journal at a path such as RUN/serving/events.jsonl.

    Args:
        path: The segment that lines are appended to; sealed segments are in the folder of that name without
            its suffix.
        options: Size and age of segments.
        read_only: Whether to change nothing on disk, because another process may be writing.
    """

    def __init__(self, path: Path, options: JournalOptions | None = None, *, read_only: bool = False):
        self.path, self.options, self._read_only = path, options or JournalOptions(), read_only
        self._sealed_folder = path.with_suffix("")
        self._file = -1  # descriptor of the file at `path`; -1 while it is not open
        self.cut_bytes = 0  # size of the incomplete line that was removed when the journal was opened
        self.dropped_segments = 0  # number of segments that this process deleted because of their age
        if not read_only:
            make_folder(path.parent)
            self._open()
            with self._hold_lock():
                self._cut_torn_line()
                self._drop_old_segments()

    def iterate_lines(self) -> Iterator[tuple[str, bytes]]:
        """Yield each complete line, oldest first, as its place (`file:line number`) and its content."""
        for path in (*self.list_sealed_segments(), self.path):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            *complete, _ = content.split(b"\n")
            for number, line in enumerate(complete, 1):
                yield f"{path.relative_to(self.path.parent)}:{number}", line

    def append(self, line: bytes) -> None:
        """Append a line; when this returns, all of it is on disk.

        Raises:
            StorageFull: The disk is full. The journal is as it was before.
            ConfigError: The journal was opened read only.
        """
        if self._file < 0:
            raise ConfigError("these histories are read-only because they were opened without a journal")
        with self._hold_lock():
            before = os.fstat(self._file).st_size
            if before and before + len(line) + 1 > self.options.segment_bytes:
                self._seal()
                before = 0
            try:
                _write_all(self._file, line + b"\n")
                os.fdatasync(self._file)
            except OSError as error:
                os.ftruncate(self._file, before)
                if error.errno in _DISK_FULL_ERRNOS:
                    raise StorageFull(
                        f"the disk of {self.path} is full ({error.strerror}): these events were not stored; "
                        "free some space and post them again"
                    ) from None
                raise

    def list_sealed_segments(self) -> list[Path]:
        """Return the sealed segments, oldest first."""
        paths = self._sealed_folder.glob("*.jsonl") if self._sealed_folder.is_dir() else ()
        return sorted((path for path in paths if path.stem.isdecimal()), key=lambda path: int(path.stem))

    def get_facts(self) -> dict[str, Any]:
        """Return the number and size of segments, their retention, and how much was cut or dropped."""
        paths = [path for path in (*self.list_sealed_segments(), self.path) if path.exists()]
        return {
            "segments": len(paths),
            "bytes": sum(path.stat().st_size for path in paths),
            "retention_days": self.options.retention_days,
            "cut_bytes": self.cut_bytes,
            "dropped_segments": self.dropped_segments,
        }

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        """Open the file at `path` for appending in place of the open one; create it if it is missing."""
        self.close()
        is_new = not self.path.exists()
        self._file = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
        if is_new:
            sync(self.path.parent)  # the directory entry must survive a power failure too

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the lock of the current segment, reopening it if another process sealed it."""
        while True:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                if os.stat(self.path).st_ino == os.fstat(self._file).st_ino:
                    break  # the open file is still the one at the path
            except FileNotFoundError:
                pass
            self._open()
        try:
            yield
        finally:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _seal(self) -> None:
        """Move the file to the sealed segments, and begin a new one under its lock."""
        make_folder(self._sealed_folder)
        segments = self.list_sealed_segments()
        number = int(segments[-1].stem) + 1 if segments else 1
        os.replace(self.path, self._sealed_folder / f"{number:06d}.jsonl")
        sync(self._sealed_folder)
        self._open()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._drop_old_segments()

    def _cut_torn_line(self) -> None:
        """Remove an incomplete last line; it was never acknowledged."""
        size = os.fstat(self._file).st_size
        content = os.pread(self._file, size, 0) if size else b""
        complete_size = content.rfind(b"\n") + 1
        if complete_size < size:
            self.cut_bytes = size - complete_size
            os.ftruncate(self._file, complete_size)
            os.fsync(self._file)
            _log.warning(
                "%s: removed an incomplete line of %d bytes, which was never acknowledged",
                self.path,
                self.cut_bytes,
            )

    def _drop_old_segments(self) -> None:
        """Delete sealed segments that are older than the retention."""
        if self.options.retention_days is None:
            return
        oldest_mtime = time.time() - self.options.retention_days * _DAY_S
        for path in self.list_sealed_segments():
            if path.stat().st_mtime >= oldest_mtime:
                break
            path.unlink()
            self.dropped_segments += 1


def _write_all(file: int, content: bytes) -> None:
    """Write all bytes to a file descriptor; `os.write` may write fewer than it is given, for example on a full disk."""
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]

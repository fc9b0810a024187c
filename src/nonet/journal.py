"""LineJournal: a file to which whole lines are appended, as one segment or as several.

    events.jsonl             the open segment, to which lines are appended
    events/000001.jsonl      sealed segments, oldest first; they do not change any more

A line counts when all of it, with its line break, is in the file. A process that was killed while it wrote may leave a part of a
line at the end, a torn line. It was never acknowledged, and is removed before the next line is appended.

Several processes may append to a durable journal, because each append holds a lock on the open segment. No process takes the lock
away from another one. If the process that holds it is suspended, an append fails after some seconds without writing anything.
Readers take no lock: they find each line that was acknowledged before they began exactly once, whatever is sealed meanwhile.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, open_file, sync
from nonet.errors import DISK_FULL_ERRNOS, ConfigError, DeadlineExceeded, NonetError

_SEGMENT_BYTES = 64 << 20
_DAY_S = 86_400.0
_SEGMENT_SHARE = 0.1  # of the retention: the longest time between the first and the last line of a segment
_LOCK_PATIENCE_S = 3.0  # the longest wait for another process that appends
_STUCK_LOCK_PATIENCE_S = (
    0.05  # the same after a wait that was in vain, so that appends do not queue behind each other
)
_LOCK_POLL_S = 0.002
_CHUNK_BYTES = 1 << 16
_log = logging.getLogger(__name__)


class StorageFull(NonetError):
    """The disk is full; nothing was stored."""


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """Size and age of the segments of a journal.

    Attributes:
        segment_bytes: Size at which the open segment is sealed and a new one begins.
        retention_days: Days for which lines are kept; None keeps all. A segment is deleted when its last line is older. The
            open segment is sealed after a tenth of this time, so that each line is deleted at most a tenth later.
    """

    segment_bytes: int = _SEGMENT_BYTES
    retention_days: float | None = None


class LineJournal:
    """The journal at a path such as RUN/serving/events.jsonl.

    Args:
        path: The open segment; sealed segments are in the folder of that name without its suffix.
        options: Size and age of segments; None for a journal of one segment, which nobody may replace.
        durable: Whether lines are on disk when `append` returns. If not, they survive the end of the process but maybe not a
            power loss, and no lock is taken, because a journal of this kind has one writer.
        read_only: Whether to change nothing on disk; `append` is refused.

    Attributes:
        path: The open segment.
        appended_lines: Number of lines that this process has appended.
        cut_bytes: Size of the torn lines that this process has removed.
        dropped_segments: Number of segments that this process has deleted because of their age.

    Raises:
        DeadlineExceeded: Another process holds the lock.
    """

    def __init__(
        self,
        path: Path,
        options: JournalOptions | None = None,
        *,
        durable: bool = True,
        read_only: bool = False,
    ):
        self.path, self._options, self._durable = path, options, durable
        self._sealed_folder = path.with_suffix("")
        self._file = -1  # descriptor of the open segment; -1 while it is not open
        self._thread_lock, self._is_lock_stuck = threading.Lock(), False
        self.appended_lines = self.cut_bytes = self.dropped_segments = 0
        if not read_only:
            make_folder(path.parent)
            if (
                options is not None
            ):  # the folder may be that of a process that was killed before it could sync its name
                sync(path.parent.parent)
            self._open()
            try:
                self.delete_old_segments()
            except BaseException:
                self.close()
                raise

    @property
    def closed(self) -> bool:
        """Whether nothing can be appended, because the journal was closed or is read only."""
        return self._file < 0

    def append(self, *lines: bytes) -> None:
        """Append lines without line breaks; when this returns, all of them are in the file, and on disk if it is durable.

        Raises:
            StorageFull: The disk is full. The journal is as it was before.
            DeadlineExceeded: Another process holds the lock. The journal is as it was before.
            NonetError: The file of a journal of one segment was removed or replaced.
            ConfigError: The journal is closed or read only.
        """
        content = b"".join(line + b"\n" for line in lines)
        with self._hold_lock():
            size = self._cut_torn_line()
            while self._is_full(size, len(content)):
                self._seal()
                size = self._cut_torn_line()
            try:
                _write_all(self._file, content)
                if self._durable:
                    os.fdatasync(self._file)
            except OSError as error:
                os.ftruncate(self._file, size)
                if error.errno in DISK_FULL_ERRNOS:
                    raise StorageFull(
                        f"the disk of {self.path} is full ({error.strerror}): nothing was stored; free some space and try again"
                    ) from None
                raise
            self.appended_lines += len(lines)

    def iterate_lines(self) -> Iterator[tuple[str, bytes]]:
        """Yield each complete line, oldest first, as its place (`file:line number`) and its content.

        Segments that are sealed meanwhile are neither missed nor read twice.
        """
        try:
            # Opened before the sealed segments are listed, so that it is either among them or newer than all of them.
            open_segment = open_file(self.path)
        except FileNotFoundError:
            open_segment = None
        with open_segment or nullcontext():
            sealed = self._scan_sealed_segments()
            # A listing beside a rename may have gaps.
            while (again := self._scan_sealed_segments()) != sealed:
                sealed = again
            for path in sealed:
                try:
                    with open_file(path) as segment:
                        content = segment.read()
                except FileNotFoundError:  # its retention has ended
                    continue
                yield from self._iterate_segment(path, content)
            if open_segment is not None and os.fstat(open_segment.fileno()).st_ino not in sealed.values():
                yield from self._iterate_segment(self.path, _read_whole_lines(open_segment))

    def list_sealed_segments(self) -> list[Path]:
        """Return the sealed segments, oldest first."""
        return list(self._scan_sealed_segments())

    def delete_old_segments(self) -> None:
        """Remove a torn line, seal an open segment with old lines, and delete the segments that are beyond the retention.

        Raises:
            DeadlineExceeded: Another process holds the lock.
            ConfigError: The journal is closed or read only.
        """
        with self._hold_lock():
            while self._cut_torn_line() and self._has_old_lines():
                self._seal()
            self._delete_expired()

    def get_facts(self) -> dict[str, Any]:
        """Return the number and size of segments, their retention, and how much was cut or dropped."""
        paths = [path for path in (*self.list_sealed_segments(), self.path) if path.exists()]
        return {
            "segments": len(paths),
            "bytes": sum(path.stat().st_size for path in paths),
            "retention_days": self._options.retention_days if self._options else None,
            "cut_bytes": self.cut_bytes,
            "dropped_segments": self.dropped_segments,
        }

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards. A second call does nothing."""
        with self._thread_lock:
            self._close_segment()

    def _close_segment(self) -> None:
        """Close the descriptor of the open segment, which also releases its lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        """Open the file at `path` for appending in place of the open one; create it if it is missing."""
        try:
            file = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        except OSError:
            if self.path.is_symlink():
                raise self._make_refusal() from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise self._make_refusal()
            # Names must survive a power loss, also of what another process sealed and created before it was killed. The
            # sealed name comes first: the other folder loses the name of that segment.
            if self._options is not None and self._sealed_folder.is_dir():
                sync(self._sealed_folder)
            sync(self.path.parent)
        except BaseException:
            os.close(file)
            raise
        self._close_segment()
        self._file = file

    def _make_refusal(self) -> ConfigError:
        """Return the error that there is something else than a file of this journal at its path."""
        return ConfigError(
            f"{self.path} is a link or no regular file, so nothing is appended to it; remove it"
        )

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Exclude other threads, and for a durable journal other processes."""
        with self._thread_lock:
            if self._file < 0:
                raise ConfigError(f"{self.path} is not open for appending; open it without read_only")
            if not self._durable:
                yield
                return
            self._lock_segment()
            try:
                yield
            finally:
                if self._file >= 0:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock_segment(self) -> None:
        """Lock the open segment, and open the next one if another process has sealed it."""
        deadline = time.monotonic() + (_STUCK_LOCK_PATIENCE_S if self._is_lock_stuck else _LOCK_PATIENCE_S)
        while True:
            self._is_lock_stuck = True
            self._wait_for_lock(deadline)
            self._is_lock_stuck = False
            try:
                if os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                    return
            except FileNotFoundError:
                pass
            if self._options is None:
                raise NonetError(
                    f"{self.path} was removed or replaced while this process had it open, so nothing was appended; let one "
                    "process at a time use this folder"
                )
            self._open()

    def _wait_for_lock(self, deadline: float) -> None:
        """Lock the file that is open. Raises DeadlineExceeded if another process holds its lock until the deadline."""
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"another process is appending to {self.path} and does not end, so nothing was stored; it may be "
                        "suspended: continue or end it, and try again"
                    ) from None
            except OSError:  # a filesystem without locks
                if self._options is not None:
                    raise
                return  # the folder of a run has a lock of its own
            time.sleep(_LOCK_POLL_S)

    def _cut_torn_line(self) -> int:
        """Remove a torn line at the end, and return the size of the open segment."""
        status = os.fstat(self._file)
        size = _find_line_end(self._file, status.st_size)
        if torn_bytes := status.st_size - size:
            os.ftruncate(self._file, size)
            os.utime(self._file, ns=(status.st_atime_ns, status.st_mtime_ns))  # lines are as old as they were
            self.cut_bytes += torn_bytes
            text = "%s: removed an incomplete line of %d bytes, which was never acknowledged"
            _log.warning(text, self.path, torn_bytes)
        return size

    def _is_full(self, size: int, added: int) -> bool:
        """Return whether the open segment of this size is sealed before bytes are added."""
        if not size or self._options is None:
            return False
        return size + added > self._options.segment_bytes or self._has_old_lines()

    def _has_old_lines(self) -> bool:
        """Return whether lines of the open segment may be older than a tenth of the retention.

        They are newer than the last write to the newest sealed segment. Without one, their age is unknown.
        """
        if self._options is None or self._options.retention_days is None:
            return False
        sealed = self.list_sealed_segments()
        oldest_s = self._options.retention_days * _DAY_S * _SEGMENT_SHARE
        return not sealed or sealed[-1].stat().st_mtime < time.time() - oldest_s

    def _seal(self) -> None:
        """Move the open segment to the sealed ones, begin a new one under its lock, and delete old ones."""
        make_folder(self._sealed_folder)
        sealed = self.list_sealed_segments()
        number = int(sealed[-1].stem) + 1 if sealed else 1
        os.replace(self.path, self._sealed_folder / f"{number:06d}.jsonl")
        self._open()
        self._lock_segment()  # another process may have appended to the new one, or sealed it, already
        self._delete_expired()

    def _delete_expired(self) -> None:
        """Delete the sealed segments that are older than the retention."""
        if self._options is None or self._options.retention_days is None:
            return
        oldest_mtime = time.time() - self._options.retention_days * _DAY_S
        for path in self.list_sealed_segments():
            if path.stat().st_mtime >= oldest_mtime:
                break
            path.unlink()
            self.dropped_segments += 1

    def _scan_sealed_segments(self) -> dict[Path, int]:
        """Return the inodes of the sealed segments by path, oldest first."""
        if self._options is None:
            return {}
        paths = [path for path in self._sealed_folder.glob("*.jsonl") if path.stem.isdecimal()]
        inodes: dict[Path, int] = {}
        for path in sorted(paths, key=lambda path: int(path.stem)):
            with suppress(FileNotFoundError):  # deleted meanwhile, because its retention has ended
                inodes[path] = path.stat().st_ino
        return inodes

    def _iterate_segment(self, path: Path, content: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield the complete lines of a segment with their places."""
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            yield f"{path.relative_to(self.path.parent)}:{number}", line


def _write_all(file: int, content: bytes) -> None:
    """Write all bytes to a file descriptor; `os.write` may write fewer than it is given, for example on a full disk."""
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def _find_line_end(file: int, size: int) -> int:
    """Return the position after the last line break among the first `size` bytes of a file, 0 without one."""
    end, length = size, 1  # a file that ends with a line break is the usual one
    while end:
        start = max(0, end - length)
        position = os.pread(file, end - start, start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end, length = start, _CHUNK_BYTES
    return 0


def _read_whole_lines(file: BufferedReader) -> bytes:
    """Return the complete lines of an open file.

    It is read until two contents agree, because a torn line may be removed and another one written in its place meanwhile.
    """
    content = None
    while True:
        file.seek(0)
        again = file.read()
        if content is not None and again.startswith(content):
            return content
        content = again[: again.rfind(b"\n") + 1]

"""The cache of this node: what is fetched or made once and used by many runs, below `$NONET_CACHE`, by default `~/.cache/nonet`.

    <kind>/<key>/       an entry, such as a fetched model or prepared data: complete, and never changed
    <kind>/<key>.lock   locked, shared, by each process that reads the entry; its time is that of the last use
    <kind>/<key>.make   locked by the process that makes the entry
    <kind>/.draft-*     what a process is making or deleting; it has locked .draft-*.lock

Entries of all kinds together take at most `$NONET_CACHE_BYTES`; those used longest ago make room, unless a process reads them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nonet.atomic import make_folder, sync
from nonet.errors import ConfigError
from nonet.storage.locks import FILE_LOCKS, Locks
from nonet.units import parse_bytes

_DEFAULT_BYTES = "50GB"
_LOCK, _MAKE, _DRAFT = ".lock", ".make", ".draft-"
_POLL_S = 0.2  # between two looks at the lock of a maker
_ALIVE_POLL_S = 5.0  # between two signs of life of a maker
_MAKER_PATIENCE_S = 60.0  # A maker without a sign of life for so long is suspended, and not waited for.
_KEY = re.compile(r"[0-9a-f]{32}")
KINDS = ("fetched", "artifacts")
"""The kinds of entries: folders at an address (`nonet.addresses`), and what runs have made from their data."""


def find_cache_root() -> Path:
    """Return the folder of the cache."""
    return Path(os.environ.get("NONET_CACHE") or Path.home() / ".cache" / "nonet").absolute()


def read_cache_bytes() -> int:
    """Return $NONET_CACHE_BYTES: how many bytes the cache may take.

    Entries share it; the contents of stored runs, and their work folders, may each take as much again.

    Raises:
        ConfigError: The variable is not a size.
    """
    text = os.environ.get("NONET_CACHE_BYTES") or _DEFAULT_BYTES
    try:
        return parse_bytes(text)
    except ValueError:
        raise ConfigError(
            f"NONET_CACHE_BYTES: wanted a size such as {_DEFAULT_BYTES}, got {text!r}"
        ) from None


def count_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, from which other processes may delete; 0 if there is no folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry of a cache.

    Attributes:
        kind: Its kind, one of `KINDS`.
        path: Its folder.
        size: Bytes of its files.
        used: When it was used last, in unix seconds.
    """

    kind: str
    path: Path
    size: int
    used: float


class CachedFolders:
    """The entries of one kind, which processes make once and share.

    Args:
        root: The folder of the entries.
        locks: How files are locked.
    """

    def __init__(self, root: Path, locks: Locks = FILE_LOCKS):
        self.root, self._locks = root, locks

    @contextmanager
    def read(self, key: str) -> Iterator[Path | None]:
        """Yield the folder of an entry, which is not deleted while the block runs; None if there is no such entry."""
        release = self.pin(key)
        try:
            yield folder if (folder := self.root / key).is_dir() else None
        finally:
            release()

    def pin(self, key: str) -> Callable[[], None]:
        """Keep an entry, or one that is about to be made, until the process ends; return what ends this earlier."""
        make_folder(self.root)
        lock = self.root / f"{key}{_LOCK}"
        while (release := self._locks.take(lock, shared=True)) is None:
            with self._locks.hold(lock):  # wait until another process has deleted the entry
                pass
        os.utime(lock)
        return release

    @contextmanager
    def make(self, key: str, report_waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
        """Let one process at a time make an entry, and others wait for it.

        Args:
            key: The entry.
            report_waiting: Called each `_POLL_S` while another process makes the entry.

        Yields:
            Whether this process is the only one. It is not if the maker seems to be suspended.
        """
        make_folder(self.root)
        file = self.root / f"{key}{_MAKE}"
        release, seen, seen_time = self._locks.take(file), -1.0, time.monotonic()
        while release is None and time.monotonic() - seen_time < _MAKER_PATIENCE_S:
            report_waiting()
            time.sleep(_POLL_S)
            # The clock of another machine may differ, so that only changes of the time tell something.
            if (changed := _get_time(file)) != seen:
                seen, seen_time = changed, time.monotonic()
            release = self._locks.take(file)
        if release is None:
            yield False
            return
        ended = threading.Event()
        thread = threading.Thread(target=_show_life, args=(file, ended), daemon=True)
        thread.start()
        try:
            yield True
        finally:
            ended.set()
            thread.join()
            file.unlink(missing_ok=True)
            release()

    def add(self, key: str, size: int, write: Callable[[Path], None]) -> Path:
        """Make an entry, unless there is one, and return its folder.

        Args:
            key: The entry.
            size: Its bytes, for which room is made; at most `read_cache_bytes()`.
            write: Writes its files into a new folder.
        """
        folder = self.root / key
        if folder.is_dir():
            return folder
        make_folder(self.root)
        self.make_room(read_cache_bytes() - size)
        with self._hold_draft() as draft:
            draft.mkdir()
            write(draft)
            with suppress(OSError):  # Another process was faster.
                os.rename(draft, folder)
                sync(self.root)
        return folder

    def remove(self, key: str) -> bool:
        """Delete an entry unless a process reads it; return whether it is gone."""
        with suppress(FileNotFoundError):
            release = self._locks.take(self.root / f"{key}{_LOCK}")
            if release is None:
                return False
            with self._hold_draft() as draft:
                try:
                    with suppress(FileNotFoundError):
                        os.rename(self.root / key, draft)  # so that no half of it is ever found
                    (self.root / f"{key}{_LOCK}").unlink(missing_ok=True)
                finally:
                    release()
        return True

    @contextmanager
    def _hold_draft(self) -> Iterator[Path]:
        """Yield the path of a folder that no process has, which is deleted in the end, even that of a killed process."""
        draft = self.root / f"{_DRAFT}{secrets.token_hex(8)}"
        lock = self.root / f"{draft.name}{_LOCK}"
        with self._locks.hold(lock):
            try:
                yield draft
            finally:
                shutil.rmtree(draft, ignore_errors=True)
                lock.unlink()

    def list_entries(self) -> list[CacheEntry]:
        """Return the entries, those used longest ago first."""
        folders = [path for path in self.root.glob("*") if _KEY.fullmatch(path.name) and path.is_dir()]
        entries = [
            CacheEntry(self.root.name, path, count_bytes(path), _get_time(self.root / f"{path.name}{_LOCK}"))
            for path in folders
        ]
        return sorted(entries, key=lambda entry: entry.used)

    def make_room(self, limit: int) -> None:
        """Delete entries of all kinds that are not read, those used longest ago first, until they take at most `limit` bytes."""
        kinds = open_kinds(self.root.parent, self._locks)
        entries = [(entry, kind) for kind in kinds for entry in kind.list_entries()]
        total = sum(entry.size for entry, _ in entries)
        for entry, kind in sorted(entries, key=lambda each: each[0].used):
            if total <= limit:
                break
            if kind.remove(entry.path.name):
                total -= entry.size
        for kind in kinds:
            kind.delete_drafts()

    def delete_drafts(self) -> None:
        """Delete what killed processes were making or deleting."""
        for lock in self.root.glob(f"{_DRAFT}*{_LOCK}"):
            if (release := self._locks.take(lock)) is not None:
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink(missing_ok=True)
                release()


def open_kinds(root: Path, locks: Locks = FILE_LOCKS) -> list[CachedFolders]:
    """Return the entries of each kind in a cache."""
    return [CachedFolders(root / kind, locks) for kind in KINDS]


def _get_time(path: Path) -> float:
    """Return when a file or folder was changed last, in unix seconds; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _show_life(file: Path, ended: threading.Event) -> None:
    """Set the time of a file again and again until an event is set."""
    while not ended.wait(_ALIVE_POLL_S):
        with suppress(OSError):
            os.utime(file)

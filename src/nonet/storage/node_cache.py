"""The entries of the cache of a node: they are complete or absent, share one bound, and stay while a process uses them.

    fetched/<key>/       folders at addresses (`nonet.addresses`)
    artifacts/<key>/     what runs have made from their data
    <kind>/<key>.lock    locked, shared, by each process that reads the entry; its time is that of the last use
    <kind>/<key>.make    locked by the process that makes the entry
    <kind>/.draft-*      what a process is making or deleting; it has locked .draft-*.lock
    objects/             downloads of stored runs (`ObjectCache`)
    <place>/<run>/       work folders of stored runs (`nonet.storage.local_folders`)

Together they take at most `$NONET_CACHE_BYTES`; those used longest ago make room. What exists on this node only is no entry.
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
from functools import partial
from pathlib import Path

from nonet.atomic import make_folder, sync
from nonet.cache import CacheEntry, count_bytes, find_cache_root, read_cache_bytes
from nonet.errors import DeadlineExceeded
from nonet.storage.local_folders import list_work_folders
from nonet.storage.locks import FILE_LOCKS, Locks
from nonet.storage.run_view import ObjectCache

_LOCK, _MAKE, _DRAFT = ".lock", ".make", ".draft-"
_POLL_S = 0.2  # between two looks at the lock of a maker
_ALIVE_POLL_S = 5.0  # between two signs of life of a maker
_MAKER_PATIENCE_S = 60.0  # A maker without a sign of life for so long is suspended, and not waited for.
_KEY = re.compile(r"[0-9a-f]{32}")
_KINDS = ("fetched", "artifacts")


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
        """Keep an entry, or one that is about to be made, until the process ends; return what ends this earlier.

        Raises:
            DeadlineExceeded: Another process, which may be suspended, deletes the entry and does not end.
        """
        make_folder(self.root)
        lock = self.root / f"{key}{_LOCK}"
        until = time.monotonic() + _MAKER_PATIENCE_S
        # Another process that deletes the entry holds the lock meanwhile.
        while (release := self._locks.take(lock, shared=True)) is None:
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"another process has locked {lock} for {_MAKER_PATIENCE_S:g} s; it may be suspended: find it with "
                    f"`fuser {lock}`"
                )
            time.sleep(_POLL_S)
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

    def add(self, key: str, write: Callable[[Path], None]) -> Path:
        """Make an entry, unless there is one, and return its folder; `make_room_for` comes before it.

        Args:
            key: The entry.
            write: Writes its files into a new folder.
        """
        folder = self.root / key
        if folder.is_dir():
            return folder
        make_folder(self.root)
        with self._hold_draft() as draft:
            draft.mkdir()
            write(draft)
            try:
                os.rename(draft, folder)
                sync(self.root)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
        return folder

    def make_room_for(self, size: int) -> bool:
        """Let what no process uses make room for a new entry of `size` bytes, and return whether it fits into the cache."""
        limit = read_cache_bytes() - size
        return make_room(locks=self._locks, root=self.root.parent, limit=limit) <= limit

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
        """Return the entries."""
        folders = [path for path in self.root.glob("*") if _KEY.fullmatch(path.name) and path.is_dir()]
        return [
            CacheEntry(
                self.root.name,
                path,
                count_bytes(path),
                _get_time(self.root / f"{path.name}{_LOCK}"),
                partial(self.remove, path.name),
            )
            for path in folders
        ]

    def delete_drafts(self) -> None:
        """Delete what killed processes were making or deleting."""
        for lock in self.root.glob(f"{_DRAFT}*{_LOCK}"):
            if (release := self._locks.take(lock)) is not None:
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink(missing_ok=True)
                release()


def list_cache_entries(root: Path | None = None, locks: Locks = FILE_LOCKS) -> list[CacheEntry]:
    """Return the entries of a cache, by default that of this node, those used longest ago first."""
    root = root or find_cache_root()
    entries = [*ObjectCache(root / "objects").list_entries(), *list_work_folders(root, locks)]
    for kind in _KINDS:
        entries += CachedFolders(root / kind, locks).list_entries()
    return sorted(entries, key=lambda entry: entry.used)


def make_room(
    kept: Path | None = None,
    locks: Locks = FILE_LOCKS,
    *,
    root: Path | None = None,
    limit: int | None = None,
) -> int:
    """Delete entries that no process uses, those used longest ago first, until all fit into the cache.

    Args:
        kept: The path of an entry that is about to be used.
        locks: How files are locked.
        root: The folder of the cache, by default that of this node.
        limit: The bytes that all may take together, by default $NONET_CACHE_BYTES.

    Returns:
        The bytes of the entries that are left.
    """
    root, limit = root or find_cache_root(), read_cache_bytes() if limit is None else limit
    entries = list_cache_entries(root, locks)
    total = sum(entry.size for entry in entries)
    for entry in entries:
        if total <= limit:
            break
        if entry.path != kept and entry.delete():
            total -= entry.size
    for kind in _KINDS:
        CachedFolders(root / kind, locks).delete_drafts()
    return total


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

"""The identity of the content of a file, by which a run finds that its data have changed.

It covers all bytes of a local file. These are read once on a node: the cache of the node remembers the hash for as long as
inode, size and times stay the same, and the hash is asked for within 90 days. The identity of an object in object storage is
the ETag that the store gives to its content. A filesystem without ETags has sizes and times of modification only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nonet.atomic import write_whole
from nonet.cache import find_cache_root
from nonet.errors import ConfigError, DataError

_KEPT_S = 90 * 86_400.0  # For how long the hash of a file is remembered that nothing asks for.
_HASHED_BYTES_PER_S = 1e8  # A process that hashes a file more slowly is not waited for.
_POLL_S = 0.1  # Seconds between attempts to lock a record.
_KINDS = {
    "blake2b": "the bytes of a file",
    "etag": "the ETag of an object",
    "time": "size and time of a file",
}
_HASH_ATTEMPTS = 3  # A file that is replaced each time while it is hashed has no identity.
_DIGEST_BYTES = 16
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")  # what records have
_OWN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK  # A record or lock is neither a link nor a pipe that waits.
_SETTLED_S = 2.0  # A later change may leave the times of a file that is younger as they are; its hash is not remembered.


def identify_content(system: Any, path: str) -> str:
    """Return the identity of the content of a file, such as "blake2b:..." or "etag:...".

    Args:
        system: Arrow's filesystem of the file.
        path: The path in it.

    Raises:
        OSError: The file cannot be read, or changes whenever it is read.
        DataError: A local path is not that of a regular file.
    """
    if system.type_name == "local":
        return f"blake2b:{_find_digest(path)}"
    with system.open_input_file(path) as source:
        metadata = {key.lower(): value for key, value in (source.metadata() or {}).items()}
    if etag := metadata.get("etag"):
        return f"etag:{etag.decode().strip(chr(34))}"
    info = system.get_file_info(path)
    return f"time:{info.size}:{info.mtime_ns}"


def describe_difference(old: str, new: str) -> str:
    """Describe why an identity of `identify_content` is not that of earlier data with the same size, and what to do."""
    old_kind, new_kind = (_KINDS.get(identity.partition(":")[0], "") for identity in (old, new))
    if old_kind != new_kind:
        return (
            f"its content was identified by {old_kind}, and is now by {new_kind}, so nothing shows that it is the same; if the "
            "data were moved, use them at their earlier address"
        )
    if old_kind == _KINDS["etag"]:
        return "another ETag at the same size: other content, or a copy that was uploaded in other parts"
    return "other content of the same size"


def _find_digest(path: str) -> str:
    """Return the hash of a local file, from the cache of the node if the file is the one that was hashed."""
    state = _read_state(path)
    folder = _find_folder()
    if folder is None or time.time_ns() - max(state[-2:]) < _SETTLED_S * 1e9:
        return _hash_unchanged(path)[0]
    record = folder / f"{state[0]:x}-{state[1]:x}.json"
    if (digest := _read_record(record, state)) is not None:
        return digest
    with _lock_record(record, _POLL_S + state[2] / _HASHED_BYTES_PER_S):
        if (digest := _read_record(record, state)) is not None:
            return digest  # Another process has hashed the file meanwhile.
        digest, hashed_state = _hash_unchanged(path)
        if hashed_state == state:
            with suppress(OSError):  # Without a cache, the file is hashed again.
                write_whole(record, json.dumps({"state": state, "digest": digest}).encode())
                _remove_old_records(record.parent)
        return digest


def _find_folder() -> Path | None:
    """Return the folder of the records; None for a user without a home, who has no cache."""
    try:
        return find_cache_root() / "contents"
    except ConfigError:
        return None


def _hash_unchanged(path: str) -> tuple[str, list[int]]:
    """Return the hash of a file and the state that it had before and after it was read.

    Raises:
        OSError: The file has changed during each of `_HASH_ATTEMPTS`.
    """
    state = _read_state(path)
    for _ in range(_HASH_ATTEMPTS):
        digest, before = _hash_file(path), state
        if (state := _read_state(path)) == before:
            return digest, state
    raise OSError(f"{path} changed each time while it was read; wait until nothing writes it")


def _read_state(path: str) -> list[int]:
    """Return the device, inode, size, and times of modification and change in nanoseconds of a file.

    Raises:
        DataError: It is no regular file.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"{path} is no regular file but a folder, pipe or device; name a file of which the content can be read again"
        )
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _hash_file(path: str) -> str:
    """Return the hash of all bytes of a file."""
    with open(path, "rb") as source:
        return hashlib.file_digest(source, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()


def _open_own(path: Path, flags: int) -> int:
    """Open a record or lock as a file descriptor. Raises OSError if it is a link, or anything else than a regular file."""
    opened = os.open(path, flags | _OWN_FILE, 0o600)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(f"{path} is no regular file")
    return opened


def _read_record(record: Path, state: list[int]) -> str | None:
    """Return the hash that was remembered for a file in this state; None if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        with open(_open_own(record, os.O_RDONLY), "rb") as source:
            remembered = json.load(source)
        if remembered["state"] == state and _DIGEST.fullmatch(remembered["digest"]):
            with suppress(OSError):
                os.utime(record)
            return remembered["digest"]
    return None


def _remove_old_records(folder: Path) -> None:
    """Remove the records and locks that have not been used for `_KEPT_S`."""
    oldest = time.time() - _KEPT_S
    for path in folder.iterdir():
        with suppress(OSError):  # Another process has removed it.
            if path.stat().st_mtime < oldest:
                path.unlink()


@contextmanager
def _lock_record(record: Path, max_wait_s: float) -> Iterator[None]:
    """Hold the lock of a record, so that processes of a node do not hash a file at the same time.

    Do nothing without a cache, on a filesystem without locks, or if another process has held the lock for `max_wait_s`.
    """
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        lock = _open_own(record.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + max_wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    continue
            except OSError:  # a filesystem without locks
                pass
            break
        yield
    finally:
        os.close(lock)

"""Shares decoded row groups between the trainers of one machine, so that each group is decoded once and not by every rank.

The first rank that needs a row group decodes it and writes it as uncompressed Arrow to a file of the machine; the others wait for
the file and map it. Only the newest groups are kept, because synchronous ranks read the same ones at about the same time; a rank
that is far behind decodes a group again. The last process that reads a stream removes its files.
"""

# Shapes: N rows of a group.

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from nonet.samples.streams.leaf import DecodedGroup

# Maximum number of row groups, and bytes of them, kept per stream and machine; ranks read about four groups ahead.
_MAX_GROUPS, _MAX_BYTES = 8, 2 << 30
# The folder of a stream is this and the digest of the stream's leaf.
_PREFIX = f"nonet-groups-{os.getuid()}-"
# Each process that uses the folder holds this file's lock, shared with the others.
_USERS_LOCK = "users.lock"


class NodeGroups:
    """The shared row groups of one stream on one machine.

    Args:
        digest: A hash of all that the decoded groups depend on (`StreamLeaf.digest`).

    Raises:
        OSError: If the temporary folder cannot be written.
    """

    def __init__(self, digest: str):
        self._folder = Path(tempfile.gettempdir()) / (_PREFIX + digest)
        for folder in self._folder.parent.glob(_PREFIX + "*"):
            if folder != self._folder:  # Processes that were killed have not removed theirs.
                _remove_if_unused(folder, held_lock=None)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.lstat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} belongs to another user")
        lock_file = os.open(self._folder / _USERS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock_file, fcntl.LOCK_SH)
        atexit.register(_remove_if_unused, self._folder, lock_file)

    def read(self, name: str, decode: Callable[[], DecodedGroup]) -> DecodedGroup:
        """Return a group: mapped from the file if another rank has decoded it, else decoded and written for the others.

        Args:
            name: Name of the group's files.
            decode: Function that decodes the group.
        """
        path = self._folder / f"{name}.arrow"
        with self._lock_group(name):
            with contextlib.suppress(OSError, pa.ArrowException):  # There is no file yet, or it is broken.
                return _map_group(path)
            group = decode()
            if group.rows is not None:
                # With a full disk, the others decode the group themselves.
                with contextlib.suppress(OSError):
                    _write_group(path, group)
                    self._remove_old()
            return group

    @contextlib.contextmanager
    def _lock_group(self, name: str) -> Iterator[None]:
        """Hold a group's lock, which the system releases when a process ends; without a lock if it cannot be written."""
        try:
            lock = (self._folder / f"{name}.lock").open("w")
        except OSError:
            yield
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove_old(self) -> None:
        """Remove the files of all but the newest groups; processes that have mapped one can still read it."""
        stats_and_paths = [(path.stat(), path) for path in self._folder.glob("*.arrow")]
        newest_first = sorted(stats_and_paths, key=lambda pair: pair[0].st_mtime_ns, reverse=True)
        total_bytes = 0
        for newer_count, (stat, path) in enumerate(newest_first):
            total_bytes += stat.st_size
            # The newest one always stays.
            if newer_count >= _MAX_GROUPS or (newer_count and total_bytes > _MAX_BYTES):
                path.unlink(missing_ok=True)


@functools.cache
def get_node_groups(digest: str) -> NodeGroups | None:
    """Return this process's `NodeGroups` of a stream; None if the temporary folder cannot be written."""
    try:
        return NodeGroups(digest)
    except OSError:
        return None


def _remove_if_unused(folder: Path, held_lock: int | None) -> None:
    """Remove the folder of a stream if no other process uses it.

    Args:
        folder: The folder.
        held_lock: File descriptor of the folder's lock if this process uses the folder; it is closed. None otherwise.
    """
    with contextlib.suppress(OSError):
        lock_file = os.open(folder / _USERS_LOCK, os.O_RDWR) if held_lock is None else held_lock
        try:
            # Raises OSError if another process uses the folder.
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock_file)


def _write_group(path: Path, group: DecodedGroup) -> None:
    """Write a decoded group atomically, with its masks in the schema's metadata."""
    assert group.rows is not None
    masks = {
        name: np.packbits(mask).tobytes()
        for name, mask in (("keep", group.keep), ("bad", group.bad))
        if mask is not None
    }
    rows = group.rows.replace_schema_metadata(masks)
    temporary_path = path.with_suffix(f".{os.getpid()}")
    try:
        with pa.OSFile(str(temporary_path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_batch(rows)
        os.replace(temporary_path, path)
    finally:
        temporary_path.unlink(missing_ok=True)


def _map_group(path: Path) -> DecodedGroup:
    """Map a group that `_write_group` wrote; its rows are a view of the file."""
    with pa.memory_map(str(path)) as source:
        rows = pa.ipc.open_file(source).get_batch(0)
    packed_masks = rows.schema.metadata or {}
    masks = {
        name: np.unpackbits(np.frombuffer(packed_masks[name.encode()], np.uint8), count=len(rows)).astype(
            bool
        )
        if name.encode() in packed_masks
        else None
        for name in ("keep", "bad")
    }
    return DecodedGroup(rows.replace_schema_metadata(None), masks["keep"], masks["bad"])

"""NodeGroups: decoded row groups that the trainers of one machine share, so that each is decoded once and not by every rank.

The first rank that needs a row group decodes it and writes it as uncompressed Arrow to a file of the machine; the others wait for
it and map the file. The newest groups stay, because synchronous ranks read the same ones at about the same time; a rank that is
far behind decodes a group again. The last process that reads a stream removes its files.
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

_KEPT, _KEPT_BYTES = (
    8,
    2 << 30,
)  # row groups and bytes kept per stream and machine; ranks read about four groups ahead
_PREFIX = f"nonet-groups-{os.getuid()}-"
_USERS = "users.lock"


class NodeGroups:
    """The shared row groups of one stream on one machine."""

    def __init__(self, digest: str):
        self._folder = Path(tempfile.gettempdir()) / (_PREFIX + digest)
        for folder in self._folder.parent.glob(_PREFIX + "*"):
            if folder != self._folder:  # left behind by processes that were killed
                _release(folder, None)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.lstat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} belongs to another user")
        handle = os.open(self._folder / _USERS, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        atexit.register(_release, self._folder, handle)

    def read(self, name: str, decode: Callable[[], DecodedGroup]) -> DecodedGroup:
        """Return a group by its name: mapped where another rank has decoded it, else decoded and written for the others."""
        path = self._folder / f"{name}.arrow"
        with self._lock_group(name):
            with contextlib.suppress(OSError, pa.ArrowException):
                return _map_group(path)
            group = decode()
            if group.rows is not None:
                with contextlib.suppress(OSError):  # a full disk costs time, not rows
                    _write_group(path, group)
                    self._remove_old()
            return group

    @contextlib.contextmanager
    def _lock_group(self, name: str) -> Iterator[None]:
        """Hold a group's lock, which the system releases when a process ends."""
        try:
            lock = (self._folder / f"{name}.lock").open("w")
        except OSError:
            yield
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove_old(self) -> None:
        """Remove the oldest groups; who has mapped one keeps it."""
        facts = [(path.stat(), path) for path in self._folder.glob("*.arrow")]
        newest_first = sorted(facts, key=lambda fact: fact[0].st_mtime_ns, reverse=True)
        total = 0
        for number, (stat, path) in enumerate(newest_first):
            total += stat.st_size
            if number >= _KEPT or (number and total > _KEPT_BYTES):
                path.unlink(missing_ok=True)


@functools.cache
def get_node_groups(digest: str) -> NodeGroups | None:
    """Return this process's access to the shared groups of a stream; None where the temporary folder cannot be written."""
    try:
        return NodeGroups(digest)
    except OSError:
        return None


def _release(folder: Path, handle: int | None) -> None:
    """Remove a folder that no other process uses."""
    with contextlib.suppress(OSError):
        own = os.open(folder / _USERS, os.O_RDWR) if handle is None else handle
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(own)


def _write_group(path: Path, group: DecodedGroup) -> None:
    """Write a decoded group atomically, with its masks in the schema's metadata."""
    assert group.rows is not None
    masks = {
        name: np.packbits(mask).tobytes()
        for name, mask in (("keep", group.keep), ("bad", group.bad))
        if mask is not None
    }
    rows = group.rows.replace_schema_metadata(masks)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_batch(rows)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _map_group(path: Path) -> DecodedGroup:
    """Map a group that `_write_group` wrote."""
    with pa.memory_map(str(path)) as source:
        rows = pa.ipc.open_file(source).get_batch(0)
    packed = rows.schema.metadata or {}
    masks = {
        name: np.unpackbits(np.frombuffer(packed[name.encode()], np.uint8), count=len(rows)).astype(bool)
        if name.encode() in packed
        else None
        for name in ("keep", "bad")
    }
    return DecodedGroup(rows.replace_schema_metadata(None), masks["keep"], masks["bad"])

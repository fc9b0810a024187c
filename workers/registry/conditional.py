"""Conditional writes at the address of a registry, by which publishers on several hosts notice each other.

- In S3, the store makes them (`nonet.storage`): an object is written if there is none, or if it is still what was read.
- On a filesystem of this machine or a mounted one, a lock of a file excludes other writers. It must be one whose locks other
  hosts see, such as NFS or Lustre; a bucket that is mounted as a folder has none.
- Elsewhere nothing excludes them. One host alone may write: the first one leaves a mark, by which others refuse to.
"""

from __future__ import annotations

import json
import secrets
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pyarrow.fs as pafs

from nonet.atomic import make_folder, read_content, write_whole
from nonet.errors import ConfigError, StorageConflict
from nonet.storage import ObjectStorage, Storage, hold_lock_within, is_storage_address, open_storage

_LOCK = ".lock"
_LOCK_WAIT_S = 60.0
_MARK = "writer.json"


class ConditionalFiles(Protocol):
    """Small files at an address, by names such as `versions/000001.json`."""

    def replace(self, name: str, content: bytes, old: bytes | None) -> None:
        """Write a file whose content is `old`, or that does not exist if that is None.

        Raises:
            StorageConflict: Another process was first.
            StorageError or OSError: The address does not answer.
        """
        ...


class ObjectFiles:
    """Files in a store with conditional writes."""

    def __init__(self, storage: Storage):
        self._storage = storage

    def replace(self, name: str, content: bytes, old: bytes | None) -> None:
        """Write a file if it has its old content; see `ConditionalFiles`."""
        if old is None:
            self._storage.put_if_absent(name, content)
            return
        stored = self._storage.get(name)
        if stored is None or stored.content != old:
            raise StorageConflict(f"{name} was written by another process")
        self._storage.replace_if(name, content, stored.etag)


class LockedFiles:
    """Files of a folder whose writers lock a file in it."""

    def __init__(self, root: Path):
        self._root = root

    def replace(self, name: str, content: bytes, old: bytes | None) -> None:
        """Write a file if it has its old content; see `ConditionalFiles`."""
        path = self._root / name
        make_folder(path.parent)
        with hold_lock_within(self._root / _LOCK, _LOCK_WAIT_S, f"changing the versions of {self._root}"):
            if (read_content(path) if path.exists() else None) != old:
                raise StorageConflict(f"{path} was written by another process")
            write_whole(path, content)


class MarkedFiles:
    """Files on a filesystem without conditional writes, which one host alone writes.

    Args:
        files: Reads and writes whole files.
        uri: The address, for messages.
        local_dir: The folder of this host, which keeps what the mark of this host is.
    """

    def __init__(self, files: FileAccess, uri: str, local_dir: Path):
        self._files, self._uri, self._token_file = files, uri, local_dir / ".writer"

    def replace(self, name: str, content: bytes, old: bytes | None) -> None:
        """Write a file if it has its old content; see `ConditionalFiles`. Raises ConfigError if another host is the writer."""
        self._check_mark()
        if self._files.read(name) != old:
            raise StorageConflict(f"{self._uri}/{name} was written by another process")
        self._files.write(name, content)
        self._check_mark()  # which another host may have left at the same moment

    def _check_mark(self) -> None:
        """Leave the mark of this host if there is none, and check that the mark is its own."""
        if not self._token_file.exists():
            write_whole(self._token_file, secrets.token_hex(8).encode())
        token = self._token_file.read_text(encoding="utf-8")
        if self._files.read(_MARK) is None:
            mark = {"writer": token, "host": socket.gethostname()}
            self._files.write(_MARK, json.dumps(mark).encode())
        try:
            stored = json.loads(self._files.read(_MARK) or b"{}")
            writer, host = str(stored["writer"]), str(stored["host"])
        except (ValueError, TypeError, KeyError):
            writer, host = "", "an unknown host"
        if (writer, host) != (token, socket.gethostname()):  # a copy of the folder has the same token
            raise ConfigError(
                f"registry: {self._uri} is written by {host[:80]}, and its filesystem has no conditional writes, so no other "
                "host may publish, promote, roll back or withdraw; do it there, or, once that host does it no more, remove "
                f"{self._uri}/{_MARK}"
            )


class FileAccess(Protocol):
    """Reads and writes whole files at an address."""

    def read(self, name: str, /) -> bytes | None:
        """Return the content of a file, None if it does not exist."""
        ...

    def write(self, name: str, content: bytes, /) -> None:
        """Write a file atomically."""
        ...


def open_conditional_files(
    uri: str, filesystem: pafs.FileSystem, path: str, files: FileAccess, local_dir: Path
) -> ConditionalFiles:
    """Return how small files at an address are written.

    Args:
        uri: The address.
        filesystem: Its filesystem.
        path: Its path on the filesystem.
        files: Reads and writes whole files.
        local_dir: The folder of this host.

    Raises:
        StorageError: The address cannot be written.
    """
    system: Any = filesystem
    if isinstance(system, pafs.SubTreeFileSystem):
        path, system = f"{system.base_path.rstrip('/')}/{path}", system.base_fs
    if system.type_name == "local":
        return LockedFiles(Path(path))
    storage = _open_conditional_storage(uri)
    return MarkedFiles(files, uri, local_dir) if storage is None else ObjectFiles(storage)


def _open_conditional_storage(uri: str) -> ObjectStorage | None:
    """Return the storage at an address; None if it has no conditional writes, or the address is not one of storages."""
    if not is_storage_address(uri) or find_spec("obstore") is None:
        return None
    try:
        storage = open_storage(uri)
        storage.check_conditions()
    except ConfigError:  # such as options of Arrow in the address
        return None
    return storage

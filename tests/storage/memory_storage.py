"""An object storage in memory with the semantics of S3: conditional writes, listings, and a clock of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from nonet.errors import StorageConflict, StorageError
from nonet.storage.objects import StoredObject


class MemoryStorage:
    """A `Storage` in memory, for one process.

    Attributes:
        objects: The objects by key.
        now: The time of the storage in seconds, which each write moves on by one.
    """

    address = "s3://memory"

    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.now = 1e9
        self._etags, self._lock = count(), threading.Lock()

    def get(self, key: str) -> StoredObject | None:
        return self.objects.get(key)

    def put(self, key: str, content: bytes) -> None:
        with self._lock:
            self._write(key, content)

    def put_if_absent(self, key: str, content: bytes) -> str:
        with self._lock:
            stored = self.objects.get(key)
            if stored is not None and stored.content != content:
                raise StorageConflict(f"{key} was written by another process")
            return self._write(key, content) if stored is None else stored.etag

    def replace_if(self, key: str, content: bytes, etag: str) -> str:
        with self._lock:
            stored = self.objects.get(key)
            if stored is not None and stored.etag == etag:
                return self._write(key, content)
            if stored is not None and stored.content == content:
                return stored.etag
            raise StorageConflict(f"{key} was written by another process")

    def _write(self, key: str, content: bytes) -> str:
        self.now += 1
        self.objects[key] = StoredObject(bytes(content), f'"{next(self._etags)}"', self.now)
        return self.objects[key].etag

    def download(self, key: str, path: Path, size: int) -> None:
        stored = self.objects.get(key)
        if stored is None:
            raise StorageError(f"cannot read {key}: there is no such object")
        if len(stored.content) > size:
            raise StorageError(f"{key} is longer than the {size} bytes of its entry")
        with path.open("ab") as file:
            file.write(stored.content)

    def list_objects(self, prefix: str) -> dict[str, float]:
        return {
            key: stored.modified
            for key, stored in sorted(self.objects.items())
            if not prefix or key.startswith(f"{prefix}/")
        }

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

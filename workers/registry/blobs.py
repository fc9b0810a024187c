"""Blobs: files by the sha256 of their content, in a folder. What two versions share is there once.

A blob is written aside, synced and renamed, so one that has its name is whole; what lies on the disk may still rot, so who
opens a blob checks it once a process.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from pathlib import Path

import numpy as np

from nonet.atomic import make_folder, replace_file
from nonet.errors import CheckpointError


class BlobStore:
    """A folder of them."""

    def __init__(self, root: Path):
        self.root = root
        self._checked: set[str] = set()
        make_folder(root)

    def put(self, content: bytes) -> tuple[str, int]:
        """The blob's name, and how many bytes were written: none where it was there."""
        name = hashlib.sha256(content).hexdigest()
        if (self.root / name).exists():
            return name, 0
        with replace_file(self.root / name) as draft:
            draft.write_bytes(content)
        return name, len(content)

    def put_array(self, array: np.ndarray) -> tuple[str, int]:
        """An array, as .npy."""
        file = io.BytesIO()
        np.save(file, np.ascontiguousarray(array))
        return self.put(file.getvalue())

    def put_file(self, path: Path) -> tuple[str, int]:
        """A copy of a file."""
        with path.open("rb") as source:
            name = hashlib.file_digest(source, "sha256").hexdigest()
        if (self.root / name).exists():
            return name, 0
        with replace_file(self.root / name) as draft:
            shutil.copyfile(path, draft)
        return name, (self.root / name).stat().st_size

    def locate(self, name: str, description: str = "a file") -> Path:
        """Where a whole blob is. Raises CheckpointError for one that is missing or has other bytes than its name says."""
        path = self.root / name
        if name in self._checked:
            return path
        try:
            with path.open("rb") as source:
                digest = hashlib.file_digest(source, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{description} of a published version is missing: {error}") from None
        if digest != name:
            raise CheckpointError(
                f"{path}: {description} of a published version is torn: its bytes hash to {digest[:12]}"
            )
        self._checked.add(name)
        return path

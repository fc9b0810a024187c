"""Blobs: files that are named by the SHA-256 of their content, so that what two versions share is stored once.

A blob is written to a temporary file, synced and renamed, so a file with the name of a blob is complete. A disk may
still corrupt it, so each process checks the content of a blob the first time that it locates it, and storing its content again
repairs it.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from pathlib import Path

import numpy as np

from nonet.atomic import make_folder, open_file, replace_file
from nonet.errors import CheckpointError, ConfigError


class BlobStore:
    """A folder of blobs."""

    def __init__(self, root: Path):
        self.root = root
        self._checked: set[str] = set()  # Names of the blobs whose content this process has checked.
        make_folder(root)

    def put(self, content: bytes) -> tuple[str, int]:
        """Store bytes. Returns the name of the blob and the bytes written, 0 if it was there and intact."""
        name = hashlib.sha256(content).hexdigest()
        if self._is_intact(name):
            return name, 0
        with replace_file(self.root / name) as draft:
            draft.write_bytes(content)
        return name, len(content)

    def put_array(self, array: np.ndarray) -> tuple[str, int]:
        """Store an array as .npy. Returns the name of the blob and the bytes written."""
        file = io.BytesIO()
        np.save(file, np.ascontiguousarray(array))
        return self.put(file.getvalue())

    def put_file(self, path: Path) -> tuple[str, int]:
        """Store a copy of a file. Returns the name of the blob and the bytes written."""
        with path.open("rb") as source:
            name = hashlib.file_digest(source, "sha256").hexdigest()
        if self._is_intact(name):
            return name, 0
        with replace_file(self.root / name) as draft:
            shutil.copyfile(path, draft)
        return name, (self.root / name).stat().st_size

    def locate(self, name: str, description: str = "a file") -> Path:
        """Return the path of a blob after checking its content.

        Args:
            name: Name of the blob.
            description: What the blob contains, for messages.

        Raises:
            CheckpointError: The blob is missing, or its content does not match its name.
        """
        path = self.root / name
        if name in self._checked:
            return path
        try:
            with open_file(path) as source:
                digest = hashlib.file_digest(source, "sha256").hexdigest()
        except (OSError, ConfigError) as error:
            raise CheckpointError(f"{description} of a published version is missing: {error}") from None
        if digest != name:
            raise CheckpointError(
                f"{path}: {description} of a published version is damaged: its bytes hash to {digest[:12]}"
            )
        self._checked.add(name)
        return path

    def _is_intact(self, name: str) -> bool:
        """Return whether a blob is there and its content matches its name now."""
        self._checked.discard(name)
        try:
            BlobStore.locate(self, name)
        except CheckpointError:
            return False
        return True

"""Durable file writes: a file is either complete or absent, and new names survive a power loss.

The name of a new file is durable only after its folder has been synced. The functions therefore sync the content first and
then the folder that contains the name.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on disk (`fsync`)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and wait until their names are on disk."""
    missing_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing_folders):
        sync(folder.parent)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Write to a draft file that replaces `path` when the block ends without an error.

    Args:
        path: The file to replace.

    Yields:
        The path of the draft, in the same folder. If the block raises, the draft is deleted and `path` is
            unchanged.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield draft
        sync(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_arrays(path: Path, **arrays: Any) -> None:
    """Write NumPy arrays by name into an .npz file atomically, and replace an existing file."""
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_whole(path, buffer.getvalue())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file with this content atomically, and replace an existing file."""
    with replace_file(path) as draft:
        draft.write_bytes(content)

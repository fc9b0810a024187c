"""Files that are there whole or not at all, and names that are there after the power went.

A name is safe once its folder is synced, so each function syncs the content first, then the folder that names it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """A folder and those above it; the names of new ones are on disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync(each.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside `path` to write to, which takes its name when the block ends; after an error nothing has changed."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield draft
        sync(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """A file of this content; it replaces the one before."""
    with replacing(path) as draft:
        draft.write_bytes(content)

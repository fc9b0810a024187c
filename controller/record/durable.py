"""What is on disk for good: files and names that are there after the power went.

A name is safe once its folder is synced, so each function syncs the content first, then the folder that names it.
"""

from __future__ import annotations

import os
import secrets
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


def write_whole(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all, also after a power failure; it replaces the one before."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    aside.write_bytes(content)
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)

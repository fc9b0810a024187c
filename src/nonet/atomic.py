"""Durable file writes: a file is either complete or absent, and new names survive a power loss. Safe reads of files of a run.

The name of a new file is durable only after its folder has been synced. The functions therefore sync the content first and
then the folder that contains the name.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from nonet.errors import ConfigError

_MAX_CONTENT_BYTES = 256 << 20  # far more than any file of a run that is read at once has
_SHOWN_CHARACTERS = 200  # of the cause of a damage
_DAMAGE = (
    TypeError,
    LookupError,
    ValueError,
    AttributeError,
    ArithmeticError,
    EOFError,
    RecursionError,
    BadZipFile,
)


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


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading, and never wait, as the opening of a pipe would.

    Raises:
        ConfigError: The path is a folder, a pipe, a socket or a device.
        FileNotFoundError: There is no such file.
    """
    message = f"{path} is no regular file; put the file back from a copy, or remove it"
    try:
        file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError:
        if path.is_dir() or path.is_socket():  # which cannot be opened
            raise ConfigError(message) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ConfigError(message)
    return BufferedReader(file)


def read_content(path: Path) -> bytes:
    """Return the content of a file that is read at once, such as one with settings.

    Raises:
        ConfigError: It is no regular file, or has more than 256 MiB.
        FileNotFoundError: There is no such file.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > _MAX_CONTENT_BYTES:
            raise ConfigError(
                f"{path} has more than {_MAX_CONTENT_BYTES >> 20} MiB; put it back from a copy, or remove it"
            )
        return file.read()


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises ConfigError if it is not JSON, and errors as `read_content`."""
    content = read_content(path)
    with refuse_damage(path):
        return json.loads(content.decode())


@contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """Raise ConfigError that a file is damaged if the block, which uses its content, fails over it.

    Args:
        path: The file, whose content may be a text in the place of a number, for example.
    """
    try:
        yield
    except _DAMAGE as error:
        cause = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {cause}); put it back from a copy, resume the run, or start a new one"
        ) from error

"""Which code of run folders and exports this user has approved.

A folder of a run or an export may come from somebody else, such as from a shared bucket. Opening it guards it: a file in a
guarded folder is imported only if all code of the folder equals, by its hash, what the user has approved. A run that this user
started on this machine is approved. `--trust` approves the folders that a command opens, and is remembered in
~/.config/nonet/trusted; NONET_TRUST approves hashes, separated by commas, on machines that remember nothing.

Workers of Ray guard nothing, because the driver that calls them has checked what they load.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nonet.errors import ConfigError

_CODE_ENDINGS = (".py", ".pyc", ".so")
_HASH_DIGITS = 32
_guarded_folders: list[Path] = []
_settings = {"approves": False, "imports": True}


def guard_folder(folder: Path) -> None:
    """Import files of a folder from now on only if the user has approved its code."""
    if folder.absolute() not in _guarded_folders and not _is_ray_worker():
        _guarded_folders.append(folder.absolute())


def approve_opened_folders() -> None:
    """Approve the code of all folders that this process opens, and remember it: the option --trust."""
    _settings["approves"] = True


@contextmanager
def import_no_code() -> Iterator[None]:
    """Import no file of a guarded folder while a block runs, whether or not it is approved."""
    _settings["imports"] = False
    try:
        yield
    finally:
        _settings["imports"] = True


def compute_code_hash(folder: Path) -> str:
    """Return a hash of the code of a folder: of all files below `sources`, and of Python and compiled files elsewhere."""
    digest = hashlib.sha256()
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        relative = Path(parent).relative_to(folder)
        for name in sorted(names):
            if relative.parts[:1] == ("sources",) or name.endswith(_CODE_ENDINGS):
                file = Path(parent) / name
                content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"
                digest.update(f"{(relative / name).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()[:_HASH_DIGITS]


def approve_code(folder: Path) -> None:
    """Remember that this user has approved the code of a folder, such as that of a run that it has started."""
    code_hash = compute_code_hash(folder)
    if code_hash in _read_approved():
        return
    file = _find_approvals()
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{code_hash}\n".encode())  # a short append, which no other process divides
    finally:
        os.close(descriptor)


def is_approved(folder: Path) -> bool:
    """Return whether this user has approved the code of a folder."""
    return compute_code_hash(folder) in _read_approved()


def check_import(file: Path, title: str) -> None:
    """Check that a file may be imported.

    Args:
        file: The file.
        title: The start of error messages.

    Raises:
        ConfigError: It is in a guarded folder whose code is not approved.
    """
    places = {file.absolute(), file.resolve()}
    for folder in _guarded_folders:
        if not any(place.is_relative_to(root) for place in places for root in (folder, folder.resolve())):
            continue
        if "__pycache__" in file.parts or "__pycache__" in file.resolve().parts:
            raise ConfigError(
                f"{title}: {file} is in a cache of compiled code, which is no place for code of a run"
            )
        if not _settings["imports"]:
            raise ConfigError(
                f"{title}: {file.name} is code of {folder.name}, which this command does not run"
            )
        if _settings["approves"]:
            approve_code(folder)
        elif not is_approved(folder):
            raise ConfigError(
                f"{title}: {folder.name} has code of its own ({file.name}) that you have neither started nor approved on this "
                f"machine; read it, then add --trust, or set NONET_TRUST={compute_code_hash(folder)}"
            )


def _is_ray_worker() -> bool:
    """Return whether this process is a worker of Ray."""
    ray: Any = sys.modules.get("ray")
    return (
        ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE
    )


def _find_approvals() -> Path:
    """Return the file of approved hashes, one per line."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "nonet" / "trusted"


def _read_approved() -> set[str]:
    """Return the approved hashes."""
    file = _find_approvals()
    remembered = file.read_text(encoding="utf-8").split() if file.is_file() else []
    return {*remembered, *filter(None, os.environ.get("NONET_TRUST", "").split(","))}

"""Where stored runs are on a node, below `$NONET_CACHE`, by default ~/.cache/nonet.

    <place>/<run>/          work folder: what the writer of a run and its workers write; the same path on all nodes
    <place>/<run>/serving/  what services of the run keep on this node only, such as posted events; never deleted
    views/<token>/<run>/    view: one state of a run, as one process reads it (`RunView`)
    objects/                contents of files by their SHA-256, from which views are made (`ObjectCache`)
    known/<place>/<run>/    what lists of runs show, and the address by which an id is found

`<place>` is derived from the address of the storage, so that runs of two storages never share a folder. A reader never uses or
changes a work folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from nonet.atomic import read_json, write_whole
from nonet.cache import CacheEntry, count_bytes, find_cache_root
from nonet.storage.locks import FILE_LOCKS, Locks

STATE_FILE = ".storage.json"
USED_LOCK = ".used"  # locked, shared, by every process that has the folder open
SERVING = "serving"
_VIEWS, _KNOWN = "views", "known"
_RESERVED = (_VIEWS, _KNOWN, "objects", "fetched", "artifacts")  # names in the cache that are no places


@dataclass(frozen=True, slots=True)
class FolderState:
    """What a work folder holds, in its file .storage.json.

    Attributes:
        address: The address of the run.
        epoch: The epoch of the run in which processes of this node use the folder.
        writers: The writers (`RunHead.writer`) whose files the folder may hold; empty where only workers use it.
        is_stored: Whether everything in it is stored, apart from `serving`.
    """

    address: str
    epoch: int = 0
    writers: tuple[str, ...] = ()
    is_stored: bool = True


def make_local_folder(storage_address: str, run_id: str, root: Path | None = None) -> Path:
    """Return the path of the work folder of a run, which is the same on all nodes.

    Args:
        storage_address: The address of the storage, without the id of the run.
        run_id: The id of the run.
        root: The folder of the cache, by default that of this node.
    """
    return (root or find_cache_root()) / _make_place(storage_address) / run_id


def make_known_folder(storage_address: str, run_id: str, root: Path | None = None) -> Path:
    """Return the path of the folder with what lists of runs show of a run that this node has read; see `make_local_folder`."""
    return (root or find_cache_root()) / _KNOWN / _make_place(storage_address) / run_id


def make_view_folder(run_id: str) -> Path:
    """Return the path of a new view, which no other process has."""
    return find_cache_root() / _VIEWS / secrets.token_hex(8) / run_id


def _make_place(storage_address: str) -> str:
    """Return the name of the folder of an address of object storage."""
    place = f"{os.environ.get('AWS_ENDPOINT_URL', '')}|{storage_address.rstrip('/')}"
    return hashlib.sha256(place.encode()).hexdigest()[:8]


def find_work_folders(root: Path | None = None) -> list[Path]:
    """Return the work folders below the folder of the cache, by default that of this node."""
    files = (root or find_cache_root()).glob(f"*/*/{STATE_FILE}")
    return sorted(file.parent for file in files if file.parts[-3] not in _RESERVED)


def find_local_runs() -> list[Path]:
    """Return a folder of each stored run that this node knows: its work folder if it has one with files, or what lists show."""
    work_folders = [folder for folder in find_work_folders() if (folder / "scenario.yaml").is_file()]
    names = {folder.parts[-2:] for folder in work_folders}
    known = sorted(file.parent for file in find_cache_root().glob(f"{_KNOWN}/*/*/{STATE_FILE}"))
    return [*work_folders, *(folder for folder in known if folder.parts[-2:] not in names)]


def write_folder_state(folder: Path, state: FolderState) -> None:
    """Write the state of a folder of a stored run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / STATE_FILE, json.dumps(asdict(state)).encode())


def create_folder_state(folder: Path, state: FolderState) -> None:
    """Write the state of a folder of a stored run, unless it has one, which another process may write at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{STATE_FILE}.{secrets.token_hex(4)}"
    draft.write_text(json.dumps(asdict(state)), encoding="utf-8")
    try:
        os.link(draft, folder / STATE_FILE)
    except FileExistsError:
        return
    except OSError:  # a filesystem without links
        if not (folder / STATE_FILE).exists():
            write_folder_state(folder, state)
    finally:
        draft.unlink(missing_ok=True)


def read_folder_state(folder: Path) -> FolderState | None:
    """Return the state of a folder of a stored run; None if it is no such folder."""
    file = folder / STATE_FILE
    if not file.is_file():
        return None
    fields = read_json(file)
    return FolderState(**fields | {"writers": tuple(fields.get("writers", ()))})


def read_address(folder: Path) -> str | None:
    """Return the address of the run of a folder of this node; None if the run is not stored."""
    state = read_folder_state(folder)
    return state and state.address


def lock_used(folder: Path, locks: Locks = FILE_LOCKS) -> Callable[[], None]:
    """Mark a folder as used until this process ends, so that it is not deleted to make room; return what ends it earlier."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if release := locks.take(folder / USED_LOCK, shared=True):
                os.utime(folder / USED_LOCK)
                return release
            with locks.hold(folder / USED_LOCK):  # wait until another process has deleted the files
                continue
        except FileNotFoundError:  # the other process has deleted the folder as well
            continue


def list_work_folders(root: Path, locks: Locks = FILE_LOCKS) -> list[CacheEntry]:
    """Return what the work folders below the folder of a cache hold that can be downloaded again.

    What exists on this node only stays: `serving`, and the files of a writer that ended before all were stored.
    """
    return [
        CacheEntry(
            "runs",
            folder,
            count_bytes(folder) - count_bytes(folder / SERVING),
            _get_used_time(folder),
            partial(_delete_unused, folder, locks),
        )
        for folder in find_work_folders(root)
    ]


def _get_used_time(folder: Path) -> float:
    """Return when a folder was used last, in unix seconds."""
    try:
        return (folder / USED_LOCK).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _delete_unused(folder: Path, locks: Locks) -> bool:
    """Delete what is stored of a work folder unless a process uses it, and return whether it was deleted."""
    try:
        release = locks.take(folder / USED_LOCK)
    except FileNotFoundError:  # somebody else has deleted the folder
        return False
    if release is None:
        return False
    try:
        state = read_folder_state(folder)
        if state is None or not state.is_stored:
            return False
        # Without its epoch the folder is made anew by the next process, should this one be killed in between.
        write_folder_state(folder, FolderState(state.address))
        for path in folder.iterdir():
            if path.name in (SERVING, STATE_FILE, USED_LOCK):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return True
    except FileNotFoundError:  # a user deletes the folder at the same time
        return False
    finally:
        release()


def delete_unused_views(locks: Locks = FILE_LOCKS) -> None:
    """Delete the views of processes that have ended."""
    for file in find_cache_root().glob(f"{_VIEWS}/*/{USED_LOCK}"):
        delete_view(file.parent, locks)


def delete_view(folder: Path, locks: Locks = FILE_LOCKS) -> None:
    """Delete the folder of a view with its lock, unless a process uses it."""
    release = locks.take(folder / USED_LOCK) if folder.is_dir() else None
    if release is not None:
        shutil.rmtree(folder, ignore_errors=True)
        release()

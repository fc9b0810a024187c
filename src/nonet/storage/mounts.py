"""The stored runs that this process has mounted.

A process mounts a run, that is, it registers a local folder of it: the work folder if it belongs to the run, and a view of its
own if it only reads. From then on `fetch` brings the files below a path into the folder, and `upload_written` and `put` store
files that the process has written. All do nothing for paths that belong to no mounted run, so callers need not know whether a
run is stored.
"""

from __future__ import annotations

import atexit
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from nonet.atomic import write_whole
from nonet.errors import ConfigError, StorageError
from nonet.storage.local_copy import MountedRun, RunCopy, StoredRun
from nonet.storage.local_folders import (
    FolderState,
    create_folder_state,
    delete_unused_views,
    delete_view,
    make_known_folder,
    make_local_folder,
    make_view_folder,
)
from nonet.storage.node_cache import make_room
from nonet.storage.objects import (
    OPENING_TIMEOUT_S,
    RETRY_TIMEOUT_S,
    Storage,
    StoredObject,
    open_storage,
    read_clock,
)
from nonet.storage.run_tree import COMMANDS, HEAD, RunHead
from nonet.storage.run_view import KnownRun, RunView

_SHOWN_RUNS = 8  # number of runs that an error lists
_MAX_DEPTH = 4  # of the folders of a run
_SLASHES_OF_BUCKET = 2  # in an address such as s3://bucket
_MAX_ITEMS = 256  # longer lists of arguments are not searched for paths
_ALIVE_S = 60.0  # without a commit, after which no machine seems to work on a run, which commits every 15 s or earlier
_LOOK_EVERY_S = 1.0  # between two looks at a head, where this process may not write to the storage

_sleep = time.sleep
_copies: dict[Path, StoredRun] = {}  # the runs that this process has mounted, by the local folder


def mount(mounted: MountedRun) -> StoredRun:
    """Mount a run as another process has described it, and fetch its small files.

    Raises:
        StorageError: The storage cannot be read.
        StorageConflict: Processes of a later epoch of the run use the folder.
    """
    run = _copies.get(Path(mounted.path))
    if run is None:
        run = register_work_folder(mounted) if mounted.epoch else _register_view(mounted)
        if isinstance(run, RunCopy):
            run.enter_epoch()
    if isinstance(run, RunCopy):
        run.fetch_small_files()
    else:
        run.fetch(run.path)
    return run


def mount_view(address: str, retry_timeout_s: float = RETRY_TIMEOUT_S) -> StoredRun:
    """Mount a view of the run at an address, which is the same one during the life of this process, in its newest state.

    Args:
        address: The address of the run.
        retry_timeout_s: Seconds from the first attempt to the last of the request that finds the run.

    Raises:
        StorageError: The storage cannot be read.
        ConfigError: There is no such run.
    """
    run = next((run for run in _copies.values() if isinstance(run, RunView) and run.address == address), None)
    if run is None:
        if not has_run(address, retry_timeout_s):
            place = address.rpartition("/")[0]
            names = open_storage(place).list_names()[-_SHOWN_RUNS:]
            raise ConfigError(
                f"there is no run at {address}; the runs in {place}: {', '.join(names) or 'none'}"
            )
        delete_unused_views()
        make_room()
        run = _register_view(MountedRun(address, str(make_view_folder(address.rpartition("/")[2]))))
    run.fetch(run.path)
    return run


def _register_view(mounted: MountedRun) -> RunView:
    """Register a view, whose folder is deleted when the last process that uses it ends."""
    view = RunView(mounted, open_storage(mounted.address))
    _copies[view.path] = view
    owner = os.getpid()

    def delete() -> None:
        if os.getpid() == owner:
            view.release()
            delete_view(view.path.parent)

    atexit.register(delete)
    return view


def has_run(address: str, retry_timeout_s: float = RETRY_TIMEOUT_S) -> bool:
    """Return whether a run is stored at an address. Raises StorageError if the storage cannot be read."""
    stored = open_storage(address, retry_timeout_s=retry_timeout_s).get(HEAD)
    return stored is not None and not RunHead.decode(stored.content).discarded


def register_work_folder(mounted: MountedRun) -> RunCopy:
    """Register the work folder of a run without reading anything, for a process that belongs to the run or creates it."""
    path = Path(mounted.path)
    copy = _copies.get(path)
    if copy is None:
        if not path.exists():
            make_room(path)
        create_folder_state(path, FolderState(mounted.address))
        storage = open_storage(mounted.address, retry_timeout_s=mounted.timeout_s)
        copy = _copies[path] = RunCopy(mounted, storage)
    assert isinstance(copy, RunCopy), path
    copy.epoch = max(copy.epoch, mounted.epoch)
    return copy


def open_work_folder(folder: Path) -> Path:
    """Return the folder in which processes of this node write the run of a folder: for a view, the work folder of its run."""
    run = find_copy(folder)
    if not isinstance(run, RunView):
        return folder
    return register_work_folder(MountedRun(run.address, str(find_work_folder(folder)))).path


def find_work_folder(folder: Path) -> Path:
    """Return what `open_work_folder` returns, without registering it; it may not exist."""
    return _find_instead_of_view(folder, make_local_folder)


def find_page_folder(folder: Path) -> Path:
    """Return the folder for pages about a run: its own, or for a view, which ends with this process, one that stays."""
    return _find_instead_of_view(folder, make_known_folder)


def _find_instead_of_view(folder: Path, make_folder_path: Callable[[str, str], Path]) -> Path:
    """Return another folder of a run, by its storage and its id, if a folder is that of a view; else the folder itself."""
    run = find_copy(folder)
    if not isinstance(run, RunView):
        return folder
    place, _, run_id = run.address.rpartition("/")
    return make_folder_path(place, run_id)


def fetch_known(address: str) -> Path | None:
    """Fetch only what lists of runs show of a run; return the folder of these files, or None if there is no such run."""
    if not has_run(address):
        return None
    place, _, run_id = address.rpartition("/")
    folder = make_known_folder(place, run_id)
    run = _copies.setdefault(folder, KnownRun(MountedRun(address, str(folder)), open_storage(address)))
    run.fetch(folder)
    return folder if run.get_tree().files else None


def is_written_now(folder: Path) -> bool:
    """Return whether a process, of any machine, works on the run of a folder, by the age of its head.

    The age is measured by the clock of the storage, to which an object is written. Without permission to write, the head is
    looked at until it changes, at most for a minute.

    Raises:
        StorageError: The storage cannot be read.
    """
    run = find_copy(folder)
    if run is None or (stored := run.storage.get(HEAD)) is None:
        return False
    try:
        return read_clock(run.storage) - stored.modified < _ALIVE_S
    except StorageError:
        end = time.monotonic() + _ALIVE_S
        return _wait_for_next_head(run.storage, stored, lambda: time.monotonic() < end) is not None


def _wait_for_next_head(
    storage: Storage, stored: StoredObject, goes_on: Callable[[], bool]
) -> StoredObject | None:
    """Look at the head, as long as `goes_on` says, until another one replaces a stored one; return that one, or None."""
    while goes_on():
        _sleep(_LOOK_EVERY_S)
        later = storage.get(HEAD)
        if later is None or later.etag != stored.etag:
            return later
    return None


def find_working_owner(address: str) -> str:
    """Return which process works on the run at an address, "" if none does or there is no run.

    A run whose head is young is looked at until the head changes, or is so old that its process seems to have ended.

    Raises:
        StorageError: The storage cannot be used.
    """
    storage = open_storage(address, retry_timeout_s=OPENING_TIMEOUT_S)
    first = storage.get(HEAD)
    if first is None or RunHead.decode(first.content).discarded:
        return ""
    later = _wait_for_next_head(storage, first, lambda: read_clock(storage) - first.modified < _ALIVE_S)
    return RunHead.decode(later.content).owner if later else ""


def list_mounts() -> tuple[MountedRun, ...]:
    """Return the runs that this process has mounted, for processes that it starts.

    The view of a run whose work folder is mounted as well is left out.
    """
    copies = [run for run in _copies.values() if isinstance(run, RunCopy)]
    written = {copy.address for copy in copies}
    views = [run for run in _copies.values() if isinstance(run, RunView) and run.address not in written]
    return (*(copy.describe_for_new_process() for copy in copies), *(view.describe() for view in views))


def find_copy(path: Path) -> StoredRun | None:
    """Return the mounted run in whose local folder a path is; None if it is in none."""
    if not _copies:
        return None
    absolute = path.absolute()
    return next((copy for folder in (absolute, *absolute.parents) if (copy := _copies.get(folder))), None)


def fetch(path: Path) -> None:
    """Bring the stored files at or below a path into the local folder; do nothing for a path in no mounted run."""
    if copy := find_copy(path):
        copy.fetch(path)


def fetch_stored(address: str) -> Path | None:
    """Fetch the newest checkpoint of a stored run, or what an address names in the run.

    Args:
        address: The address of a run, or of a folder or file in it, such as s3://bucket/runs/ID/checkpoints/step-000123.

    Returns:
        The path in a view of the run; None if the address belongs to no stored run.

    Raises:
        StorageError: The storage cannot be read.
    """
    root, parts = address.rstrip("/"), list[str]()
    for _ in range(_MAX_DEPTH):
        if root.count("/") <= _SLASHES_OF_BUCKET:
            return None
        if has_run(root, OPENING_TIMEOUT_S):
            break
        root, _, name = root.rpartition("/")
        parts.insert(0, name)
    else:
        return None
    run = mount_view(root)
    path = run.path.joinpath(*parts)
    checkpoints = [] if parts else sorted((run.path / "checkpoints").glob("step-*"))
    run.fetch(checkpoints[-1] if checkpoints else path)
    return path


def find_digest(path: Path) -> str | None:
    """Return the SHA-256 of a stored file that this node has not fetched; None if it has, or if there is no such file."""
    copy = None if path.exists() else find_copy(path)
    if copy is None:
        return None
    entry = copy.get_tree().files.get(path.absolute().relative_to(copy.path).as_posix())
    return entry and entry.sha256


def upload_written(folder: Path, written: Mapping[str, tuple[str, int]]) -> None:
    """Store files that this process has written into a folder of a mounted run; do nothing for other folders."""
    if isinstance(copy := find_copy(folder), RunCopy):
        copy.upload_written(folder, written)


def find_upload_timeout(folder: Path) -> float:
    """Return the seconds for which uploads from a folder are repeated; 0 for a folder in no mounted run."""
    copy = find_copy(folder)
    return copy.timeout_s if isinstance(copy, RunCopy) else 0.0


def put(path: Path) -> None:
    """Store a file, or the files of a folder, that a worker has made in a mounted run; do nothing for other paths."""
    if isinstance(copy := find_copy(path), RunCopy):
        copy.put(path)


def remove(path: Path, reason: str) -> None:
    """Delete a file or folder, of a stored run also from the run; nothing else ever deletes from a stored run.

    Args:
        path: The file or folder, which may be missing.
        reason: Why, for the record of the run.
    """
    copy = find_copy(path)
    writer = copy.writer if isinstance(copy, RunCopy) else None
    with writer.hold() if writer else nullcontext():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if writer:
            writer.add_deleted(path, reason)


def send_command(file: Path) -> None:
    """Store a command to a run, which the writer of the run downloads; do nothing for a run that is not stored."""
    if copy := find_copy(file):
        copy.storage.put_if_absent(f"{COMMANDS}/{file.name}", file.read_bytes())


def receive_command(file: Path) -> None:
    """Fetch the stored answer to a command, if there is one by now; do nothing for a run that is not stored.

    The writer of a run stores an answer after the commit that holds the record of the command.
    """
    copy = None if file.exists() else find_copy(file)
    if copy and (stored := copy.storage.get(f"{COMMANDS}/{file.name}")):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, stored.content)


def fetch_arguments(values: Iterable[Any]) -> None:
    """Fetch the files and folders of mounted runs that the arguments of a call name, also within collections."""
    if not _copies:
        return
    for path in dict.fromkeys(_iterate_paths(values, depth=4)):
        if (copy := find_copy(path)) and copy.path != path.absolute():
            copy.fetch(path)


def _iterate_paths(values: Iterable[Any], depth: int) -> Iterator[Path]:
    """Yield the absolute paths among values, and within dictionaries, short lists and dataclasses among them."""
    for value in values:
        if isinstance(value, Path) or (isinstance(value, str) and value.startswith("/")):
            yield Path(value)
        elif not depth:
            continue
        elif isinstance(value, Mapping):
            yield from _iterate_paths(cast("Mapping[Any, Any]", value).values(), depth - 1)
        elif isinstance(value, (list, tuple)) and len(cast("Sequence[Any]", value)) <= _MAX_ITEMS:
            yield from _iterate_paths(cast("Sequence[Any]", value), depth - 1)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from _iterate_paths((getattr(value, field.name) for field in fields(value)), depth - 1)

"""The stored runs that this process has mounted.

A process mounts a run, that is, it registers the folder of its local copy. From then on `fetch` brings the files below a path
into the copy, and `upload_written` stores files that the process has written. Both do nothing for paths that belong to no
mounted run, so callers need not know whether a run is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from nonet.atomic import write_whole
from nonet.errors import ConfigError
from nonet.storage.local_copy import MountedRun, RunCopy
from nonet.storage.local_folders import make_local_folder, make_room, write_address
from nonet.storage.objects import OPENING_TIMEOUT_S, RETRY_TIMEOUT_S, open_storage
from nonet.storage.run_tree import COMMANDS, HEAD

_SHOWN_RUNS = 8  # number of runs that an error lists
_MAX_DEPTH = 4  # of the folders of a run
_SLASHES_OF_BUCKET = 2  # in an address such as s3://bucket
_MAX_ITEMS = 256  # longer lists of arguments are not searched for paths

_copies: dict[Path, RunCopy] = {}  # the runs that this process has mounted, by the folder of the copy


def mount(
    mounted: MountedRun, *, replaces: bool | None = None, retry_timeout_s: float = RETRY_TIMEOUT_S
) -> RunCopy:
    """Mount a run in this process, and fetch its small files; a run that is mounted already is only refreshed.

    Args:
        mounted: The run.
        replaces: As for `RunCopy.fetch_small_files`.
        retry_timeout_s: Seconds from the first attempt to the last of the request that finds the run.

    Raises:
        StorageError: The storage cannot be read.
        ConfigError: There is no such run.
    """
    if Path(mounted.path) not in _copies and not has_run(mounted.address, retry_timeout_s):
        place = mounted.address.rpartition("/")[0]
        names = open_storage(place).list_names()[-_SHOWN_RUNS:]
        raise ConfigError(
            f"there is no run at {mounted.address}; the runs in {place}: {', '.join(names) or 'none'}"
        )
    copy = register(mounted)
    copy.fetch_small_files(replaces=replaces)
    return copy


def has_run(address: str, retry_timeout_s: float = RETRY_TIMEOUT_S) -> bool:
    """Return whether a run is stored at an address. Raises StorageError if the storage cannot be read."""
    return open_storage(address, retry_timeout_s=retry_timeout_s).get(HEAD) is not None


def register(mounted: MountedRun) -> RunCopy:
    """Mount a run in this process without reading anything, for a process that creates it."""
    path = Path(mounted.path)
    copy = _copies.get(path)
    if copy is None:
        if not path.exists():
            make_room(path)
        write_address(path, mounted.address)
        copy = _copies[path] = RunCopy(mounted, open_storage(mounted.address))
    copy.epoch = max(copy.epoch, mounted.epoch)
    return copy


def list_mounts() -> tuple[MountedRun, ...]:
    """Return the runs that this process has mounted, for processes that it starts."""
    return tuple(copy.describe() for copy in _copies.values())


def find_copy(path: Path) -> RunCopy | None:
    """Return the copy of a mounted run in which a path is; None if it is in none."""
    if not _copies:
        return None
    absolute = path.absolute()
    return next((copy for folder in (absolute, *absolute.parents) if (copy := _copies.get(folder))), None)


def fetch(path: Path) -> None:
    """Bring the stored files at or below a path into the local copy; do nothing for a path in no mounted run."""
    if copy := find_copy(path):
        copy.fetch(path)


def fetch_stored(address: str) -> Path | None:
    """Fetch the newest checkpoint of a stored run, or what an address names in the run.

    Args:
        address: The address of a run, or of a folder or file in it, such as s3://bucket/runs/ID/checkpoints/step-000123.

    Returns:
        The path in the local copy of the run; None if the address belongs to no stored run.

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
    place, _, run_id = root.rpartition("/")
    copy = mount(MountedRun(root, str(make_local_folder(place, run_id))))
    path = copy.path.joinpath(*parts)
    checkpoints = [] if parts else sorted((copy.path / "checkpoints").glob("step-*"))
    copy.fetch(checkpoints[-1] if checkpoints else path)
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
    if copy := find_copy(folder):
        copy.upload_written(folder, written)


def send_command(file: Path) -> None:
    """Store a command to a run, which the writer of the run downloads; do nothing for a run that is not stored."""
    if (copy := find_copy(file)) and not copy.has_open_writer():
        copy.storage.put_if_absent(f"{COMMANDS}/{file.name}", file.read_bytes())


def receive_command(file: Path) -> None:
    """Fetch the stored answer to a command, if there is one by now; do nothing for a run that is not stored."""
    copy = None if file.exists() else find_copy(file)
    if copy and not copy.has_open_writer() and (stored := copy.storage.get(f"{COMMANDS}/{file.name}")):
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

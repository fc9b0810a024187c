"""The local copy of a stored run on one node, from which the files are read and into which they are written.

A process mounts a run, that is, it registers the folder of the copy. From then on `fetch` brings the files below a path into
the copy, and `upload_written` stores files that the process has written. Both do nothing for paths that belong to no mounted
run, so callers need not know whether a run is stored.

Small files, such as results and the journal, are copied when a run is mounted. Checkpoints and artifacts are fetched when they
are needed, once per node. While a `RunWriter` is open in a copy, its files are newer than the stored ones and are not replaced.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import Any, cast

from nonet.atomic import write_whole
from nonet.errors import ConfigError, StorageError
from nonet.storage.local_folders import lock_used, make_room, write_address
from nonet.storage.objects import ObjectStorage, download_file, open_storage
from nonet.storage.run_tree import COMMANDS, HEAD, OBJECTS, TREES, FileEntry, FilePart, RunHead, RunTree

WRITER_LOCK = ".writing"  # in a local copy: locked by the process that has it open for writing
_FETCH_LOCK = ".fetching"  # locked by the process that fetches files
_STEP_FOLDERS = ("checkpoints", "controls")
_LARGE_FOLDERS = (*_STEP_FOLDERS, "artifacts")
_UNSTORED_FOLDERS = (COMMANDS, "serving")  # commands are objects of their own, and services keep their state
_MAX_ATTEMPTS = 5  # to read files that a writer replaces and deletes meanwhile
_MAX_ITEMS = 256  # longer lists of arguments are not searched for paths


@dataclass(frozen=True, slots=True)
class MountedRun:
    """What another process needs to mount the same run.

    Attributes:
        address: The address of the run, such as s3://bucket/runs/quickstart-20261127-101500-1a2b.
        path: The folder of the local copy, which is the same on all nodes.
        epoch: The epoch in whose name files are uploaded; 0 if the process only reads.
    """

    address: str
    path: str
    epoch: int = 0


class RunCopy:
    """The local copy of a stored run, on this node.

    Args:
        mounted: The run.
        storage: The storage below the address of the run.

    Attributes:
        address: The address of the run.
        path: The folder of the copy.
        epoch: The epoch in whose name this process uploads files.
        storage: The storage below the address of the run.
    """

    def __init__(self, mounted: MountedRun, storage: ObjectStorage):
        self.address, self.path, self.epoch = mounted.address, Path(mounted.path), mounted.epoch
        self.storage = storage
        self._tree_key, self._tree = "", RunTree()
        self._verified: dict[str, tuple[str, tuple[int, ...]]] = {}  # digest and state of a file, by its path
        self._uploaded_states: dict[str, tuple[int, ...]] = {}  # of the files that `upload_changed` has seen
        self._lock = RLock()
        self._used = lock_used(self.path)

    def describe(self) -> MountedRun:
        """Return what another process needs to mount the same run."""
        return MountedRun(self.address, str(self.path), self.epoch)

    def close(self) -> None:
        """Allow the copy to be deleted when room is needed."""
        if self._used >= 0:
            os.close(self._used)
        self._used = -1

    def read_head(self) -> tuple[RunHead, str] | None:
        """Return the head of the run and its ETag; None if there is no such run."""
        stored = self.storage.get(HEAD)
        return None if stored is None else (RunHead.decode(stored.content), stored.etag)

    def read_tree(self) -> RunTree:
        """Return the newest tree of the run, which is empty if there is none yet.

        Raises:
            StorageError: The storage cannot be read.
        """
        for _ in range(_MAX_ATTEMPTS):
            stored = self.read_head()
            if stored is None or not stored[0].tree:
                return RunTree()
            key = stored[0].tree
            with self._lock:
                if key == self._tree_key:
                    return self._tree
            if (content := self.storage.get(key)) is not None:
                self.set_tree(key, RunTree.decode(content.content))
                return self._tree
        raise StorageError(f"{self.address}: the tree of the run is replaced faster than it can be read")

    def set_tree(self, key: str, tree: RunTree) -> None:
        """Store the newest tree of the run and its key."""
        with self._lock:
            self._tree_key, self._tree = key, tree

    def get_tree(self) -> RunTree:
        """Return the tree that was read or written last."""
        with self._lock:
            return self._tree

    def fetch(self, path: Path) -> None:
        """Bring the stored files at or below a path into the copy; local files that are not stored stay.

        Args:
            path: A path below the folder of the copy.

        Raises:
            StorageError: The storage cannot be read.
        """
        relative = path.absolute().relative_to(self.path).as_posix()

        def fetch_selected(tree: RunTree) -> None:
            if not self.has_open_writer():
                self._delete_old_steps(tree)
            self._fetch_entries(tree.select("" if relative == "." else relative))

        self._apply_newest_tree(fetch_selected)

    def _apply_newest_tree(self, change: Callable[[RunTree], None]) -> None:
        """Change the copy by the newest tree, again with the next tree if a writer deletes objects that this one names."""
        for attempt in range(_MAX_ATTEMPTS):
            tree = self.read_tree()
            try:
                with self.lock_fetching():
                    change(tree)
                return
            except StorageError:
                if attempt + 1 == _MAX_ATTEMPTS or self.read_tree() is tree:
                    raise

    def fetch_small_files(self, *, exact: bool = True) -> None:
        """Fetch all files of the run except for the contents of checkpoints and artifacts.

        Args:
            exact: Whether to replace local files that differ and to delete those that are not stored. This is not done while
                a writer is open in the copy, whose files are newer.

        Raises:
            StorageError: The storage cannot be read.
        """

        def fetch_small(tree: RunTree) -> None:
            small = {name: entry for name, entry in tree.files.items() if not is_large(name)}
            if not exact:
                small = {name: entry for name, entry in small.items() if not (self.path / name).exists()}
            elif not self.has_open_writer():
                self._delete_unstored(tree)
            self._fetch_entries(small)
            for name in tree.files:
                if step_folder := find_step_folder(name):
                    (self.path / step_folder).mkdir(parents=True, exist_ok=True)

        self._apply_newest_tree(fetch_small)

    def _fetch_entries(self, entries: Mapping[str, FileEntry]) -> None:
        """Download the files that the copy lacks, or has with other contents while no writer is open in it."""
        keeps_local_files = self.has_open_writer()
        for name, entry in entries.items():
            file = self.path / name
            if file.exists() and (keeps_local_files or self.is_equal(name, entry)):
                continue
            if not self._link_own_draft(file, entry):
                self.download(name, entry)
            self._check_download(file, entry)

    def download(self, name: str, entry: FileEntry) -> None:
        """Replace a local file by a stored one."""
        download_file(self.storage, [part.key for part in entry.parts], self.path / name)
        os.utime(self.path / name, (entry.time, entry.time))

    def _link_own_draft(self, file: Path, entry: FileEntry) -> bool:
        """Link the file from the folder in which a process of this node wrote it; return whether that folder has it."""
        if len(entry.parts) != 1:
            return False
        draft = self.path.joinpath(*PurePosixPath(entry.parts[0].key).parts[2:])  # without objects/<epoch>
        if draft == file or not draft.is_file() or draft.stat().st_size != entry.size:
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        try:
            os.link(draft, file)
        except OSError:  # a filesystem without links
            return False
        return True

    def _check_download(self, file: Path, entry: FileEntry) -> None:
        """Raise StorageError if a file that was just fetched has other contents than its entry says."""
        if hash_parts(file, entry.parts) != [part.sha256 for part in entry.parts]:
            file.unlink(missing_ok=True)
            raise StorageError(
                f"{self.address}: the stored content of {file.relative_to(self.path)} is damaged"
            )
        self.mark_equal(file.relative_to(self.path).as_posix(), entry)

    def is_equal(self, name: str, entry: FileEntry) -> bool:
        """Return whether a local file has the content of an entry; its bytes are read once per state of the file."""
        file = self.path / name
        known = self._verified.get(name)
        if known == (_join_digests(entry), read_state(file)):
            return True
        if file.stat().st_size != entry.size:
            return False
        if hash_parts(file, entry.parts) != [part.sha256 for part in entry.parts]:
            return False
        self.mark_equal(name, entry)
        return True

    def mark_equal(self, name: str, entry: FileEntry) -> None:
        """Record that a local file has the content of an entry."""
        self._verified[name] = (_join_digests(entry), read_state(self.path / name))

    def _delete_unstored(self, tree: RunTree) -> None:
        """Delete the local files that a tree does not have."""
        for name in list(self.iterate_files()):
            if name not in tree.files:
                (self.path / name).unlink(missing_ok=True)
        self._delete_old_steps(tree)
        for draft in (self.path / "checkpoints").glob("tmp-*"):
            shutil.rmtree(draft, ignore_errors=True)

    def _delete_old_steps(self, tree: RunTree) -> None:
        """Delete the local folders of checkpoints that a tree does not have."""
        stored_folders = {find_step_folder(name) for name in tree.files}
        for top in _STEP_FOLDERS:
            for folder in [*(self.path / top).glob("step-*"), *(self.path / top).glob("*/step-*")]:
                if folder.relative_to(self.path).as_posix() not in stored_folders:
                    shutil.rmtree(folder, ignore_errors=True)

    def iterate_files(self) -> Iterator[str]:
        """Yield the paths of the local files that belong to the run, without drafts, locks and commands."""
        for folder, subfolders, names in os.walk(self.path):
            relative = Path(folder).relative_to(self.path)
            subfolders[:] = [
                name for name in subfolders if not _is_temporary(name) and name not in _UNSTORED_FOLDERS
            ]
            for name in names:
                if not _is_temporary(name):
                    yield (relative / name).as_posix()

    def delete_run(self) -> None:
        """Delete everything that is stored of the run."""
        for top in (OBJECTS, TREES, COMMANDS):
            self.storage.delete(self.storage.list_keys(top))
        self.storage.delete([HEAD])

    def upload_written(self, folder: Path, written: Mapping[str, tuple[str, int]]) -> None:
        """Store files that this process has written and that do not change any more.

        Args:
            folder: A folder of the copy whose path is used for one write only, such as that of a draft of a checkpoint.
            written: SHA-256 and size of each file, by its path below the folder.

        Raises:
            StorageError: A file cannot be stored.
        """
        place = folder.absolute().relative_to(self.path).as_posix()
        if not self.has_open_writer():  # which deletes old drafts itself
            for draft in folder.parent.glob("tmp-*"):
                if draft != folder:
                    shutil.rmtree(draft, ignore_errors=True)
        for name in written:
            self.storage.upload(self.make_key(f"{place}/{name}"), folder / name)

    def upload_changed(
        self, known: Mapping[str, str | None], excluded: Collection[str] = ()
    ) -> dict[str, FileEntry]:
        """Store the results and artifacts of this node that differ from the known ones.

        Args:
            known: SHA-256 of each known file, by its path.
            excluded: Names of folders of the run whose files are not complete yet.

        Returns:
            The entries of the stored files; empty if the writer of the run is open in this copy, since it finds them itself.
        """
        if self.has_open_writer():
            return {}
        entries: dict[str, FileEntry] = {}
        for name in list(self.iterate_files()):
            if name.partition("/")[0] not in {"results", "artifacts"} - set(excluded):
                continue
            state = read_state(self.path / name)
            if self._uploaded_states.get(name) == state:
                continue
            entry = self.make_entry(name)
            if known.get(name) != entry.sha256:
                self.storage.upload(entry.parts[0].key, self.path / name)
                entries[name] = entry
            self._uploaded_states[name] = state
        return entries

    def make_entry(self, name: str) -> FileEntry:
        """Return an entry of one part for the content that a local file has now."""
        file = self.path / name
        with file.open("rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
        stat = file.stat()
        return FileEntry(
            (FilePart(self.make_key(f"{name}@{digest[:16]}"), stat.st_size, digest),), stat.st_mtime
        )

    def make_key(self, name: str) -> str:
        """Return the key of an object that this process writes."""
        return f"{OBJECTS}/{self.epoch}/{name}"

    def has_open_writer(self) -> bool:
        """Return whether a process of this node has the run open for writing in this copy."""
        file = self.path / WRITER_LOCK
        if not file.exists():
            return False
        descriptor = os.open(file, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextmanager
    def lock_fetching(self) -> Iterator[None]:
        """Let one process of this node at a time change the files of the copy."""
        descriptor = os.open(self.path / _FETCH_LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


_copies: dict[Path, RunCopy] = {}  # the runs that this process has mounted, by the folder of the copy


def mount(mounted: MountedRun, *, exact: bool = True) -> RunCopy:
    """Mount a run in this process, and fetch its small files; a run that is mounted already is only refreshed.

    Args:
        mounted: The run.
        exact: As for `RunCopy.fetch_small_files`.

    Raises:
        StorageError: The storage cannot be read.
        ConfigError: There is no such run.
    """
    copy = register(mounted)
    if copy.read_head() is None:
        raise ConfigError(f"there is no run at {mounted.address}")
    copy.fetch_small_files(exact=exact)
    return copy


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


def unmount(copy: RunCopy) -> None:
    """Forget a run that this process has mounted."""
    _copies.pop(copy.path, None)
    copy.close()


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


def find_step_folder(name: str) -> str:
    """Return the folder of the checkpoint that a file of a run belongs to, "" if it belongs to none."""
    parts = PurePosixPath(name).parts
    if parts[0] not in _STEP_FOLDERS:
        return ""
    index = next((i for i, part in enumerate(parts[:-1]) if part.startswith("step-")), None)
    return "" if index is None else "/".join(parts[: index + 1])


def is_large(name: str) -> bool:
    """Return whether a file of a run is fetched only when it is needed."""
    return name.partition("/")[0] in _LARGE_FOLDERS and not (
        find_step_folder(name) and name.endswith("/manifest.json")
    )


def read_state(file: Path) -> tuple[int, int, int]:
    """Return inode, size and time of the last change of a file, which differ after it was replaced or written."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def hash_parts(file: Path, parts: Sequence[FilePart]) -> list[str]:
    """Return the SHA-256 of each part of a file; "" for parts beyond its end."""
    digests: list[str] = []
    with file.open("rb") as source:
        for part in parts:
            digest, remaining = hashlib.sha256(), part.size
            while remaining and (chunk := source.read(min(remaining, 1 << 20))):
                digest.update(chunk)
                remaining -= len(chunk)
            digests.append("" if remaining else digest.hexdigest())
    return digests


def _join_digests(entry: FileEntry) -> str:
    """Return the digests of all parts of a file as one text."""
    return ",".join(part.sha256 for part in entry.parts)


def _is_temporary(name: str) -> bool:
    """Return whether a file or folder is a draft, a lock or a replaced checkpoint, which are not stored."""
    return name.startswith((".", "tmp-")) or ".old-" in name or name in ("stop-request", "__pycache__")

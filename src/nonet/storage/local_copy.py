"""The work folder of a stored run on one node: what the writer of the run and its workers read and write.

The folder belongs to one epoch of the run. On the node of the writer, its files are newer than the stored ones, and the writer
stores what changes (`RunWriter`). On other nodes, files are fetched when they are needed, and workers store what they make:
parts of checkpoints by `upload_written`, results and artifacts by `put`. Only such an explicit call stores a file of another
node, so that what a node fetched, or kept from an earlier life of the run, never replaces newer results.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import Any

from nonet.atomic import write_whole
from nonet.errors import StorageConflict, StorageError
from nonet.storage.local_folders import (
    SERVING,
    FolderState,
    lock_used,
    read_folder_state,
    write_folder_state,
)
from nonet.storage.locks import FILE_LOCKS, Locks
from nonet.storage.objects import RETRY_TIMEOUT_S, Storage, download_file, upload_file
from nonet.storage.run_tree import (
    COMMANDS,
    HEAD,
    OBJECTS,
    FileEntry,
    FilePart,
    RunHead,
    RunTree,
    make_file_entry,
    split_file,
)

WRITER_LOCK = ".writing"  # in a work folder: locked by the process that has the run open for writing
_FETCH_LOCK = ".fetching"  # locked by the process that fetches files
_INDEX_FILE = ".fetched.json"  # the content and state of fetched files, and the generation of drafts
_STEP_FOLDERS = ("checkpoints", "controls")
_LARGE_FOLDERS = (*_STEP_FOLDERS, "artifacts")
_UNSTORED_FOLDERS = (COMMANDS, SERVING)  # commands are objects of their own, and services keep their state
_MAX_ATTEMPTS = 5  # to read files that a writer replaces and deletes meanwhile
_EPOCH_BITS = 20  # a generation is the epoch, followed by so many bits for a number that rises within it


@dataclass(frozen=True, slots=True)
class MountedRun:
    """What another process needs to mount the same run.

    Attributes:
        address: The address of the run, such as s3://bucket/runs/quickstart-20261127-101500-1a2b.
        path: The work folder, which is the same on all nodes, or the view of a process that only reads.
        epoch: The epoch in whose name files are uploaded; 0 for a view.
        generation: The generation of the files that the process makes (`FileEntry.generation`).
        timeout_s: Seconds for which requests of the process are repeated.
    """

    address: str
    path: str
    epoch: int = 0
    generation: int = 0
    timeout_s: float = RETRY_TIMEOUT_S


class StoredRun:
    """A stored run as one process sees it.

    Args:
        mounted: The run.
        storage: The storage below the address of the run.
        locks: How files are locked.

    Attributes:
        address: The address of the run.
        path: The local folder of the run.
        storage: The storage below the address of the run.
        locks: How files are locked.
    """

    def __init__(self, mounted: MountedRun, storage: Storage, locks: Locks = FILE_LOCKS):
        self.address, self.path = mounted.address, Path(mounted.path)
        self.storage, self.locks = storage, locks
        self._tree_key, self._tree = "", RunTree()
        self._lock = RLock()

    def describe(self) -> MountedRun:
        """Return what another process needs to mount the same run."""
        return MountedRun(self.address, str(self.path))

    def read_head(self) -> tuple[RunHead, str] | None:
        """Return the head of the run and its ETag; None if there is no such run and never was."""
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
                self.set_tree("", RunTree())
                return self._tree
            key = stored[0].tree
            with self._lock:
                if key == self._tree_key:
                    return self._tree
            if (content := self.storage.get(key)) is not None:
                self.set_tree(key, RunTree.decode(content.content))
                return self._tree
        raise StorageError(f"{self.address}: the tree of the run is replaced faster than it can be read")

    def set_tree(self, key: str, tree: RunTree) -> None:
        """Set the newest tree of the run and its key."""
        with self._lock:
            self._tree_key, self._tree = key, tree

    def get_tree(self) -> RunTree:
        """Return the tree that was read or written last."""
        with self._lock:
            return self._tree

    def fetch(self, path: Path) -> None:
        """Bring the stored files at or below a path into the local folder.

        Raises:
            StorageError: The storage cannot be read.
        """
        raise NotImplementedError

    def _apply_newest_tree(self, change: Callable[[RunTree], None]) -> None:
        """Change the folder by the newest tree, again with the next tree if a writer deletes objects that this one names."""
        for attempt in range(_MAX_ATTEMPTS):
            tree = self.read_tree()
            try:
                with self.lock_fetching():
                    change(tree)
                return
            except StorageError:
                if attempt + 1 == _MAX_ATTEMPTS or self.read_tree() is tree:
                    raise

    @contextmanager
    def lock_fetching(self) -> Iterator[None]:
        """Let one process of this node at a time change the files of the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.locks.hold(self.path / _FETCH_LOCK):
            yield

    def to_name(self, path: Path) -> str:
        """Return the path of a file or folder below the local folder, "" for the folder itself."""
        relative = path.absolute().relative_to(self.path).as_posix()
        return "" if relative == "." else relative


class RunCopy(StoredRun):
    """The work folder of a stored run on this node.

    Attributes:
        epoch: The epoch in whose name this process uploads files; 0 before a writer was opened.
        generation: The generation of the files that this process makes.
        timeout_s: Seconds for which requests of this process are repeated.
        writer: The open writer of this process (a `RunWriter`); None without one.
    """

    def __init__(self, mounted: MountedRun, storage: Storage, locks: Locks = FILE_LOCKS):
        super().__init__(mounted, storage, locks)
        self.writer: Any = None
        self.epoch, self.generation, self.timeout_s = mounted.epoch, mounted.generation, mounted.timeout_s
        # Whether the writer of this epoch uses the folder, in this process or another one.
        self._has_writer = False
        self._put: list[tuple[str, FileEntry]] = []
        self._key_token, self._n_keys = secrets.token_hex(4), 0
        self._release_used = lock_used(self.path, locks)

    def describe(self) -> MountedRun:
        """Return what another process needs to mount the same run as a worker of this epoch."""
        return MountedRun(self.address, str(self.path), self.epoch, self.generation, self.timeout_s)

    def describe_for_new_process(self) -> MountedRun:
        """Return what a process that is started now needs; its files replace those of processes that were started before."""
        if self.epoch:
            self.raise_generation()
        return self.describe()

    def raise_generation(self) -> int:
        """Return a generation for files that are made from now on, which replace those of before and outlive their deletion."""
        self.generation += 1
        return self.generation

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of a process that has opened the run for writing in this folder."""
        self.epoch, self.generation, self._has_writer = epoch, epoch << _EPOCH_BITS, True

    def release(self) -> None:
        """Let other processes delete the folder to make room."""
        self._release_used()

    def enter_epoch(self) -> None:
        """Prepare the folder for a worker: empty it of what an earlier life of the run has left on this node.

        Raises:
            StorageConflict: Workers of a later epoch use the folder already.
        """

        def enter(tree: RunTree) -> None:
            state = read_folder_state(self.path) or FolderState(self.address)
            if state.epoch > self.epoch:
                raise StorageConflict(
                    f"epoch {state.epoch} of {self.address} uses {self.path}, and this process belongs to epoch {self.epoch}"
                )
            self._has_writer = state.epoch == self.epoch and bool(state.writers)
            if state.epoch < self.epoch:
                self.empty(tree)
                write_folder_state(self.path, FolderState(self.address, self.epoch))

        self._apply_newest_tree(enter)

    def fetch(self, path: Path) -> None:
        """Bring the stored files at or below a path into the folder.

        Local files stay, unless they were fetched and are still as they were. On the node of the writer all small files are
        there, and one that is missing was deleted, so that large ones are fetched only.
        """
        name = self.to_name(path)

        def fetch_selected(tree: RunTree) -> None:
            if not self._has_writer:  # whose checkpoints are newer
                self._delete_old_steps(tree)
            self._fetch_entries(tree.select(name))

        self._apply_newest_tree(fetch_selected)

    def fetch_small_files(self) -> None:
        """Fetch all files of the run except for the contents of checkpoints and artifacts, on a node without the writer."""

        def fetch_small(tree: RunTree) -> None:
            if self._has_writer:
                return
            self._delete_old_files(tree)
            self._fetch_entries({name: entry for name, entry in tree.files.items() if not is_large(name)})
            self.make_step_folders(tree)

        self._apply_newest_tree(fetch_small)

    def match_results(self) -> None:
        """Make the results equal to the stored ones on a node without the writer, after some were deleted.

        What processes of this node have made before is among them. Processes must not make results meanwhile.
        """

        def match(tree: RunTree) -> None:
            if self._has_writer:
                return
            for name in [name for name in self.iterate_files() if name.startswith("results/")]:
                entry = tree.files.get(name)
                if entry is None or not is_content(self.path / name, entry):
                    (self.path / name).unlink(missing_ok=True)

        self._apply_newest_tree(match)
        self.fetch_small_files()

    def make_step_folders(self, tree: RunTree) -> None:
        """Make the folders of the checkpoints of a tree, whose files are fetched when they are needed."""
        for name in tree.files:
            if step_folder := find_step_folder(name):
                (self.path / step_folder).mkdir(parents=True, exist_ok=True)

    def _fetch_entries(self, entries: Mapping[str, FileEntry]) -> None:
        """Download the files that the folder lacks, and those that it has fetched with other contents."""
        index = self.read_index()
        for name, entry in entries.items():
            file = self.path / name
            if self._has_writer and not is_large(name):
                continue
            if file.exists() and (self._has_writer or not index.is_fetched(name, file, other_than=entry)):
                continue
            if self._link_own_draft(file, entry):
                self._check_content(name, entry)
            else:
                self.download(name, entry)
            index.add(name, file, entry)
        index.write()

    def download(self, name: str, entry: FileEntry) -> None:
        """Replace a local file by a stored one. Raises StorageError if the stored content is damaged."""
        file = self.path / name
        download_file(self.storage, entry.object_sizes, file)
        self._check_content(name, entry)
        os.utime(file, (entry.time, entry.time))

    def _check_content(self, name: str, entry: FileEntry) -> None:
        """Raise StorageError, and delete a local file, if it has not the content of its entry."""
        if not is_content(self.path / name, entry):
            (self.path / name).unlink(missing_ok=True)
            raise StorageError(f"{self.address}: the stored content of {name} is damaged")

    def _link_own_draft(self, file: Path, entry: FileEntry) -> bool:
        """Link the file from the folder in which a process of this node wrote it; return whether that folder has it."""
        if not entry.parts:
            return False
        key = entry.parts[0].key if len(entry.parts) == 1 else entry.parts[0].key.rpartition("@")[0]
        draft = self.path.joinpath(*PurePosixPath(key).parts[2:])  # without objects/<epoch>
        if draft == file or not draft.is_file() or draft.stat().st_size != entry.size:
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        try:
            os.link(draft, file)
        except OSError:  # a filesystem without links
            return False
        return True

    def empty(self, tree: RunTree) -> None:
        """Delete all files but those of a tree, whose contents are compared; the caller holds the lock of fetching.

        Commands go too: they are in the storage, and an answer that was not stored is to a command whose record was not.
        """
        shutil.rmtree(self.path / COMMANDS, ignore_errors=True)
        index = self.read_index()
        for name in list(self.iterate_files()):
            file, entry = self.path / name, tree.files.get(name)
            if entry is None or not (index.is_fetched(name, file, as_in=entry) or is_content(file, entry)):
                file.unlink(missing_ok=True)
            else:
                index.add(name, file, entry)
        for top in _STEP_FOLDERS:
            for draft in [*(self.path / top).rglob("tmp-*"), *(self.path / top).rglob("*.old-*")]:
                shutil.rmtree(draft, ignore_errors=True)
        index.drafts.clear()
        index.write()
        self._delete_old_steps(tree)

    def _delete_old_files(self, tree: RunTree) -> None:
        """Delete small files that were fetched, are as they were, and are no longer stored; a worker may write others."""
        index = self.read_index()
        for name in [name for name in index.files if name not in tree.files]:
            if index.is_fetched(name, self.path / name):
                (self.path / name).unlink(missing_ok=True)
            del index.files[name]
        index.write()
        self._delete_old_steps(tree)

    def _delete_old_steps(self, tree: RunTree) -> None:
        """Delete the folders of checkpoints that are not stored, or not any more."""
        stored_folders = {find_step_folder(name) for name in tree.files}
        for top in _STEP_FOLDERS:
            for folder in [*(self.path / top).glob("step-*"), *(self.path / top).glob("*/step-*")]:
                if self.to_name(folder) not in stored_folders:
                    shutil.rmtree(folder, ignore_errors=True)

    def iterate_files(self) -> Iterator[str]:
        """Yield the paths of the local files that belong to the run, without drafts, locks and commands."""
        for folder, subfolders, names in os.walk(self.path):
            relative = Path(folder).relative_to(self.path)
            top = relative.parts[0] if relative.parts else ""
            subfolders[:] = [
                name
                for name in subfolders
                if not _is_temporary(name, top) and (top or name not in _UNSTORED_FOLDERS)
            ]
            for name in names:
                if not _is_temporary(name, top):
                    yield (relative / name).as_posix()

    def upload_written(self, folder: Path, written: Mapping[str, tuple[str, int]]) -> None:
        """Store files that this process has written and that do not change any more.

        Args:
            folder: A folder of the copy whose path is used for one write only, such as that of a draft of a checkpoint.
            written: SHA-256 and size of each file, by its path below the folder.

        Raises:
            StorageError: A file cannot be stored.
        """
        place = self.to_name(folder)
        if not self._has_writer:  # which deletes old drafts itself
            self._delete_old_drafts(folder)
        for name, (_, size) in written.items():
            upload_file(self.storage, folder / name, split_file(self.make_key(f"{place}/{name}"), size))

    def _delete_old_drafts(self, folder: Path) -> None:
        """Delete the drafts beside a folder that processes of this or an older generation have made."""
        with self.lock_fetching():
            index = self.read_index()
            index.drafts[self.to_name(folder)] = max(
                index.drafts.get(self.to_name(folder), 0), self.generation
            )
            for draft in folder.parent.glob("tmp-*"):
                generation = index.drafts.get(self.to_name(draft), self.generation)
                if draft != folder and generation <= self.generation:
                    shutil.rmtree(draft, ignore_errors=True)
                    index.drafts.pop(self.to_name(draft), None)
            index.write()

    def put(self, path: Path) -> None:
        """Store a file that this process has made, or all files of a folder; the writer adds them to the run.

        On the node of the writer nothing is done, because the writer finds the files itself.

        Raises:
            StorageError: A file cannot be stored.
        """
        if self._has_writer:
            return
        place = PurePosixPath(self.to_name(path))
        for name in [name for name in self.iterate_files() if PurePosixPath(name).is_relative_to(place)]:
            entry = self.make_entry(name)
            upload_file(self.storage, self.path / name, entry.object_sizes)
            with self._lock:
                self._put.append((name, entry))

    def list_put(self, start: int) -> list[tuple[str, FileEntry]]:
        """Return the files that this process has stored by `put`, in order, from a position on."""
        with self._lock:
            return self._put[start:]

    def make_entry(self, name: str) -> FileEntry:
        """Return an entry for the content that a local file has now, which does not grow."""
        file = self.path / name
        with file.open("rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
        stat = file.stat()
        key = self.make_new_key(name)
        return make_file_entry(key, stat.st_size, digest, stat.st_mtime, self.generation)

    def make_key(self, name: str) -> str:
        """Return the key of an object that this process writes."""
        return f"{OBJECTS}/{self.epoch}/{name}"

    def make_new_key(self, name: str) -> str:
        """Return a key of an object for a version of a file that nobody has used or will use."""
        with self._lock:
            self._n_keys += 1
            return self.make_key(f"{name}@{self._key_token}-{self._n_keys}")

    def read_index(self) -> FetchIndex:
        """Read the index of fetched files; the caller holds the lock of fetching."""
        return FetchIndex.read(self.path / _INDEX_FILE)


class FetchIndex:
    """Which files of a work folder were fetched, and the generation of the process that made each draft.

    Attributes:
        files: Digest of the entry, and the state of the file right after it was fetched, by name.
        drafts: The generations, by the name of a folder.
    """

    def __init__(self, file: Path, files: dict[str, list[Any]], drafts: dict[str, int]):
        self._file, self.files, self.drafts = file, files, drafts

    @classmethod
    def read(cls, file: Path) -> FetchIndex:
        """Read an index, which is empty if there is none."""
        content = json.loads(file.read_bytes()) if file.exists() else {}
        return cls(file, content.get("files", {}), content.get("drafts", {}))

    def is_fetched(
        self,
        name: str,
        file: Path,
        *,
        as_in: FileEntry | None = None,
        other_than: FileEntry | None = None,
    ) -> bool:
        """Return whether a file was fetched and has not changed since.

        Args:
            name: The path of the file below the work folder.
            file: The file.
            as_in: The entry whose content it must have.
            other_than: An entry whose content it must not have.
        """
        digest, *state = self.files.get(name, [None])
        if digest is None or not file.exists() or state != list(read_state(file)):
            return False
        return (as_in is None or digest == as_in.digest) and (
            other_than is None or digest != other_than.digest
        )

    def add(self, name: str, file: Path, entry: FileEntry) -> None:
        """Add a file that has the content of an entry."""
        self.files[name] = [entry.digest, *read_state(file)]

    def write(self) -> None:
        """Replace the file of the index."""
        write_whole(self._file, json.dumps({"files": self.files, "drafts": self.drafts}).encode())


def mark_folder(copy: RunCopy, **changes: Any) -> None:
    """Change fields of the state of a work folder; the caller holds the lock of fetching."""
    state = read_folder_state(copy.path) or FolderState(copy.address)
    write_folder_state(copy.path, replace(state, **changes))


def find_step_folder(name: str) -> str:
    """Return the folder of the checkpoint that a file of a run belongs to, "" if it belongs to none."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] not in _STEP_FOLDERS:
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


def is_content(file: Path, entry: FileEntry) -> bool:
    """Return whether a file has the content of an entry; all its bytes are read."""
    if not file.is_file() or file.stat().st_size != entry.size:
        return False
    if entry.sha256 is None:
        return hash_parts(file, entry.parts) == [part.sha256 for part in entry.parts]
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest() == entry.sha256


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


def _is_temporary(name: str, top: str) -> bool:
    """Return whether a file or folder is a draft, a lock or a replaced checkpoint, which are not stored.

    Args:
        name: The name.
        top: The first folder of its path, "" for a file or folder of the run itself. Files of users keep any name.
    """
    if name == "__pycache__" or name.startswith("."):
        return True
    if top == "":
        return name == "stop-request"
    return top in _LARGE_FOLDERS and (name.startswith("tmp-") or ".old-" in name)

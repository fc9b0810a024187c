"""The local copy of a stored run on one node, from which the files are read and into which they are written.

Small files, such as results and the journal, are copied when a run is mounted. Checkpoints and artifacts are fetched when they
are needed, once per node. While a `RunWriter` is open in a copy, its files are newer than the stored ones and are not replaced.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import RLock

from nonet.errors import StorageError
from nonet.storage.local_folders import lock_used
from nonet.storage.objects import ObjectStorage, download_file
from nonet.storage.run_tree import COMMANDS, HEAD, OBJECTS, TREES, FileEntry, FilePart, RunHead, RunTree

WRITER_LOCK = ".writing"  # in a local copy: locked by the process that has it open for writing
_FETCH_LOCK = ".fetching"  # locked by the process that fetches files
_STEP_FOLDERS = ("checkpoints", "controls")
_LARGE_FOLDERS = (*_STEP_FOLDERS, "artifacts")
_UNSTORED_FOLDERS = (COMMANDS, "serving")  # commands are objects of their own, and services keep their state
_MAX_ATTEMPTS = 5  # to read files that a writer replaces and deletes meanwhile


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
        lock_used(self.path)

    def describe(self) -> MountedRun:
        """Return what another process needs to mount the same run."""
        return MountedRun(self.address, str(self.path), self.epoch)

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
            replaces = not self.has_open_writer()
            if replaces:
                self._delete_old_steps(tree)
            self._fetch_entries(tree.select("" if relative == "." else relative), replaces=replaces)

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

    def fetch_small_files(self, *, replaces: bool | None = None) -> None:
        """Fetch all files of the run except for the contents of checkpoints and artifacts.

        Args:
            replaces: Whether to replace local files that differ, and to delete those that are not stored; by default unless a
                writer is open in the copy, whose files are newer.

        Raises:
            StorageError: The storage cannot be read.
        """

        def fetch_small(tree: RunTree) -> None:
            is_exact = not self.has_open_writer() if replaces is None else replaces
            if is_exact:
                self._delete_unstored(tree)
            small = {name: entry for name, entry in tree.files.items() if not is_large(name)}
            self._fetch_entries(small, replaces=is_exact)
            for name in tree.files:
                if step_folder := find_step_folder(name):
                    (self.path / step_folder).mkdir(parents=True, exist_ok=True)

        self._apply_newest_tree(fetch_small)

    def _fetch_entries(self, entries: Mapping[str, FileEntry], *, replaces: bool) -> None:
        """Download the files that the copy lacks, and with `replaces` those that it has with other contents."""
        for name, entry in entries.items():
            file = self.path / name
            if file.exists() and (not replaces or self.is_equal(name, entry)):
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

"""RunWriter: the process that changes a stored run.

The files of the run are written into the local copy. A commit uploads what has changed since the last one, uploads a tree
that names all files, and moves the head to that tree. Files that grow, such as the journal, are uploaded in parts, and parts
are merged so that a file has a number of parts that is logarithmic in its size.

Opening a run for writing raises its epoch. The swap of the head by a writer with an older epoch fails, and the writer raises
`StorageConflict` from then on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

from nonet.errors import ConfigError, StorageConflict, StorageError
from nonet.storage.local_copy import (
    WRITER_LOCK,
    RunCopy,
    find_step_folder,
    hash_parts,
    is_large,
    read_state,
)
from nonet.storage.mounts import find_copy
from nonet.storage.objects import download_file
from nonet.storage.run_tree import COMMANDS, HEAD, OBJECTS, TREES, FileEntry, FilePart, RunHead, RunTree

COMMIT_S = 5.0  # between two commits in the background
_TAIL_BYTES = 4096  # of a growing file, compared before its new end is uploaded
_MAX_OPENINGS = 10  # attempts to raise the epoch while other processes do the same


class RunWriter:
    """The writer of a stored run, which holds a lock on the local copy until `close`.

    Args:
        copy: The local copy, mounted in this process.
        single_writer: Whether a new run has a storage without conditional writes. The head of the run keeps it.

    Attributes:
        epoch: The epoch of this writer.
        excluded: The names of folders of the run that commits leave out, because their files are not complete yet.
        collect: Returns the entries of files that workers on other nodes have uploaded since the last call; called by every
            commit.

    Raises:
        ConfigError: Another process of this node has the run open for writing in the same copy.
        StorageError: The storage cannot be used.
    """

    def __init__(self, copy: RunCopy, *, single_writer: bool = False):
        self._copy = copy
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: StorageError | None = None
        self.excluded: frozenset[str] = frozenset()
        self.collect: Callable[[], Mapping[str, FileEntry]] = dict
        self._undeleted_objects = self._failed_commits = 0
        self._last_error = ""
        self._trees_written = 0
        # The state of each local file whose content is in the tree, by its path.
        self._stored_states: dict[str, tuple[int, int, int]] = {}
        self._tails: dict[str, bytes] = {}  # the last bytes of what is stored of each growing file
        self._lock_descriptor = self._lock_copy()
        try:
            self._head, self._etag = self._raise_epoch(single_writer)
            self._committed = self._load_tree()
            self._files = dict(self._committed.files)
            self._delete_unused_objects()
        except BaseException:
            os.close(self._lock_descriptor)
            raise

    @property
    def epoch(self) -> int:
        """The epoch of this writer."""
        return self._head.epoch

    def _lock_copy(self) -> int:
        """Lock the local copy for writing, and return the descriptor of the lock."""
        descriptor = os.open(self._copy.path / WRITER_LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"{self._copy.address} is being run by another process of {socket.gethostname()}; wait for its end, or stop it "
                "first"
            ) from None
        return descriptor

    def _raise_epoch(self, single_writer: bool) -> tuple[RunHead, str]:
        """Create the head, or raise its epoch, and return the new head and its ETag."""
        run_id = self._copy.address.rpartition("/")[2]
        for _ in range(_MAX_OPENINGS):
            old, etag = self._copy.read_head() or (
                RunHead(run_id, 0, "", "", 0.0, "", single_writer),
                None,
            )
            head = replace(
                old,
                epoch=old.epoch + 1,
                owner=f"process {os.getpid()} of {socket.gethostname()}",
                opened=time.time(),
                commit=secrets.token_hex(8),
            )
            try:
                return head, self._write_head(head, etag)
            except StorageConflict:
                continue  # another process opened the run in the meantime: its epoch must be exceeded
        raise StorageError(f"{self._copy.address} is being opened by several other processes; try again")

    def _write_head(self, head: RunHead, etag: str | None) -> str:
        """Write the head if it still has an ETag, or if there is none yet (None), and return the new ETag."""
        if head.single_writer:
            self._copy.storage.put(HEAD, head.encode())
            return ""
        if etag is None:
            return self._copy.storage.put_if_absent(HEAD, head.encode())
        return self._copy.storage.replace_if(HEAD, head.encode(), etag)

    def _load_tree(self) -> RunTree:
        """Make the local copy equal to the stored run, and return the tree of the run."""
        copy = self._copy
        copy.epoch = self._head.epoch
        copy.fetch_small_files(replaces=True)
        tree = copy.get_tree()
        for name in list(copy.iterate_files()):
            entry = tree.files.get(name)
            if entry is None:
                continue
            if copy.is_equal(name, entry):
                self._stored_states[name] = read_state(copy.path / name)
            else:
                (copy.path / name).unlink()  # a damaged local file is fetched again when it is needed
        return tree

    def _delete_unused_objects(self) -> None:
        """Delete what older writers uploaded and no tree names."""
        used = {*RunTree(self._files).list_keys(), self._head.tree}
        storage = self._copy.storage
        self._delete([key for top in (OBJECTS, TREES) for key in storage.list_keys(top) if key not in used])

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep commits from happening while files are changed that belong together."""
        with self._lock:
            yield

    def add_written(self, draft: Path, folder: Path, written: Mapping[str, tuple[str, int]]) -> None:
        """Add files that workers have uploaded from a draft folder as those of another folder, to which it is renamed next.

        Args:
            draft: The folder that the workers wrote to.
            folder: The folder of the files from now on.
            written: SHA-256 and size of each file, by its path below the folder.
        """
        draft_name, name = self._to_name(draft), self._to_name(folder)
        with self._lock:
            for old_name in RunTree(self._files).select(name):
                self._files.pop(old_name)
                self._stored_states.pop(old_name, None)
            for file, (sha256, size) in written.items():
                key = self._copy.make_key(f"{draft_name}/{file}")
                self._files[f"{name}/{file}"] = FileEntry((FilePart(key, size, sha256),), time.time())
                if (draft / file).exists():
                    self._stored_states[f"{name}/{file}"] = read_state(draft / file)

    def _add_uploaded(self, entries: Mapping[str, FileEntry]) -> None:
        """Add files that workers on other nodes have uploaded, and fetch those that are small."""
        for name, entry in entries.items():
            self._files[name] = entry
            if not is_large(name):
                self._copy.download(name, entry)
                self._stored_states[name] = read_state(self._copy.path / name)

    def list_digests(self) -> dict[str, str | None]:
        """Return the SHA-256 of the files that are not part of a checkpoint, by path."""
        with self._lock:
            return {name: entry.sha256 for name, entry in self._files.items() if not find_step_folder(name)}

    def commit(self) -> None:
        """Make the local files the stored state of the run.

        Raises:
            StorageConflict: Another process has opened the run for writing.
            StorageError: The storage cannot be used.
        """
        collected = self.collect()  # before the lock is taken, because it waits for workers
        with self._lock:
            self.check()
            self._add_uploaded(collected)
            files = self._upload_changes()
            tree = RunTree(files)
            if tree == self._committed and self._head.tree:
                return
            dropped = self._committed.list_keys() - tree.list_keys()
            self._trees_written += 1
            key = f"{TREES}/{self.epoch}-{self._trees_written}.json"
            self._copy.storage.put(key, tree.encode())
            old_tree = self._head.tree
            head = replace(self._head, tree=key, commit=secrets.token_hex(8))
            try:
                self._etag = self._write_head(head, self._etag)
            except StorageConflict:
                self._failure = self._describe_conflict()
                raise self._failure from None
            self._head, self._files, self._committed = head, dict(files), tree
            self._copy.set_tree(key, tree)
            self._delete([*sorted(dropped), *([old_tree] if old_tree else [])])

    def check(self) -> None:
        """Raise the error that ended writing, such as that another process opened the run."""
        if self._failure is not None:
            raise self._failure

    def pop_warning(self) -> str:
        """Return a warning about commits in the background and deletions that failed since the last call, "" if none did."""
        failed, undeleted = self._failed_commits, self._undeleted_objects
        self._failed_commits = self._undeleted_objects = 0
        failures = [f"{failed} commits failed, and are tried again: {self._last_error}"] if failed else []
        failures += [f"{undeleted} unused objects could not be deleted"] if undeleted else []
        return f"warning: {self._copy.address}: {'; '.join(failures)}" if failures else ""

    def start_commits(self) -> None:
        """Commit every few seconds on a thread until `close`, and exchange commands with the storage."""
        self._thread = threading.Thread(target=self._commit_repeatedly, name="run-writer", daemon=True)
        self._thread.start()

    def close(self, *, commit: bool = True) -> None:
        """End writing.

        Args:
            commit: Whether to commit first.
        """
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if commit and self._lock_descriptor >= 0:
                self._commit_and_exchange()
        finally:
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _commit_and_exchange(self) -> None:
        """Commit, upload the answers to commands that the commit contains, and download new commands."""
        storage, folder = self._copy.storage, self._copy.path / COMMANDS
        local = {
            file.name for file in folder.glob("[!.]*.json")
        }  # read before the commit, which has their records
        self.commit()
        stored = {PurePosixPath(key).name for key in storage.list_keys(COMMANDS)}
        for name in sorted(local - stored):
            storage.put(f"{COMMANDS}/{name}", (folder / name).read_bytes())
        for name in sorted(stored - local):
            download_file(storage, [f"{COMMANDS}/{name}"], folder / name)

    def _commit_repeatedly(self) -> None:
        """Commit until `close` is called or writing has failed for good; an unreachable storage is tried again."""
        while not self._ended.wait(COMMIT_S):
            try:
                self._commit_and_exchange()
            except StorageConflict:
                return  # `check` raises it
            except StorageError as error:
                self._failed_commits += 1
                self._last_error = str(error)

    def _upload_changes(self) -> dict[str, FileEntry]:
        """Upload what has changed in the local copy, and return the entries of all files of the run."""
        files, local_names = dict(self._files), set[str]()
        for name in list(self._copy.iterate_files()):
            if name.partition("/")[0] in self.excluded:
                continue
            try:
                state = read_state(self._copy.path / name)
                local_names.add(name)
                if name not in files or self._stored_states.get(name) != state:
                    files[name] = self._upload_file(name, files.get(name), state)
            except FileNotFoundError:  # deleted in the meantime
                local_names.discard(name)
        for name in list(files):
            if name in local_names:
                continue
            step_folder = find_step_folder(name)
            was_local = self._stored_states.pop(name, None) is not None
            if was_local or (step_folder and not (self._copy.path / step_folder).is_dir()):
                del files[name]
        return files

    def _upload_file(self, name: str, old: FileEntry | None, state: tuple[int, int, int]) -> FileEntry:
        """Upload a new or changed local file, of a growing one the new end, and return its entry."""
        file = self._copy.path / name
        if not _grows(name):
            entry = self._copy.make_entry(name)
            if old is None or entry.sha256 != old.sha256:
                self._copy.storage.upload(entry.parts[0].key, file)
            else:
                entry = old
            self._stored_states[name] = state
            return entry
        size = _find_whole_lines(file, state[1]) if name.endswith(".jsonl") else state[1]
        parts = list(old.parts) if old else []
        if not self._continues(name, parts, size):
            parts = []
        start = sum(part.size for part in parts)
        while parts and start < size and parts[-1].size <= size - start:
            start -= parts.pop().size
        if start < size:
            content = _read_range(file, start, size)
            digest = hashlib.sha256(content).hexdigest()
            key = self._copy.make_key(f"{name}@{start}-{size}-{digest[:16]}")
            self._copy.storage.put(key, content)
            parts.append(FilePart(key, size - start, digest))
        self._tails[name] = _read_range(file, max(0, size - _TAIL_BYTES), size)
        # A file that ends in the middle of a line is looked at again.
        self._stored_states[name] = state if size == state[1] else (state[0], size, 0)
        return FileEntry(tuple(parts), file.stat().st_mtime)

    def _continues(self, name: str, parts: Sequence[FilePart], size: int) -> bool:
        """Return whether a growing local file begins with the stored parts.

        This writer compares the end of what it has stored, and all bytes when it sees the file for the first time.
        """
        file, stored_size = self._copy.path / name, sum(part.size for part in parts)
        if size < stored_size:
            return False
        if (tail := self._tails.get(name)) is not None:
            return _read_range(file, stored_size - len(tail), stored_size) == tail
        return hash_parts(file, parts) == [part.sha256 for part in parts]

    def _describe_conflict(self) -> StorageConflict:
        """Return the error that says which process opened the run."""
        stored = self._copy.read_head()
        owner = f"{stored[0].owner} opened it (epoch {stored[0].epoch})" if stored else "it was deleted"
        return StorageConflict(
            f"{self._copy.address}: {owner} after this process had (epoch {self.epoch}); this process stops, and nothing that it "
            "writes counts"
        )

    def _delete(self, keys: list[str]) -> None:
        """Delete objects that are no longer used; objects that cannot be deleted are counted and left."""
        try:
            if keys:
                self._copy.storage.delete(keys)
        except StorageError:
            self._undeleted_objects += len(keys)

    def _to_name(self, path: Path) -> str:
        """Return the path of a file or folder below the run's folder."""
        return path.absolute().relative_to(self._copy.path).as_posix()


def open_writer(folder: Path, *, single_writer: bool = False) -> RunWriter | None:
    """Open the run of a folder for writing; return None if the folder is not that of a mounted run."""
    copy = find_copy(folder)
    return copy and RunWriter(copy, single_writer=single_writer)


@contextmanager
def change_run(folder: Path, *, single_writer: bool = False) -> Iterator[None]:
    """Commit the changes that a block makes to the files of a run, if the run is stored; other folders are not affected."""
    writer = open_writer(folder, single_writer=single_writer)
    try:
        yield
    except BaseException:
        if writer:
            writer.close(commit=False)
        raise
    if writer:
        writer.close()


def _grows(name: str) -> bool:
    """Return whether a file is only appended to while a run works."""
    return name.endswith(".jsonl") or name == "trace.json" or name.startswith("tensorboard/")


def _read_range(file: Path, start: int, stop: int) -> bytes:
    """Return the bytes of a file from `start` to before `stop`."""
    with file.open("rb") as source:
        source.seek(start)
        return source.read(stop - start)


def _find_whole_lines(file: Path, size: int) -> int:
    """Return the number of bytes up to the last end of a line within the first `size` bytes of a file."""
    step = 1 << 16
    for stop in range(size, 0, -step):
        start = max(0, stop - step)
        position = _read_range(file, start, stop).rfind(b"\n")
        if position >= 0:
            return start + position + 1
    return 0

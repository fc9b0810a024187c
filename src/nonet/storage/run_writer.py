"""RunWriter: the process that changes a stored run.

The files of the run are written into the work folder. A commit uploads what is new or changed since the last one, uploads a tree
that names all files, and moves the head to that tree. A file leaves the run only by `add_deleted`: nothing is concluded from a
file that is missing in the folder.

Opening a run for writing raises its epoch. The swap of the head by a writer with an older epoch fails, and the writer raises
`StorageConflict` from then on. A swap whose answer was lost may have been applied: the head then names this writer, which goes
on from it.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from os import getpid
from pathlib import Path, PurePosixPath
from typing import Any

from nonet.atomic import write_whole
from nonet.deadlines import DEFAULTS
from nonet.errors import ConfigError, NonetError, StorageConflict, StorageError
from nonet.storage.growing_files import GrowingFiles, is_growing
from nonet.storage.local_copy import (
    WRITER_LOCK,
    RunCopy,
    find_step_folder,
    is_content,
    is_large,
    mark_folder,
    read_state,
)
from nonet.storage.local_folders import FolderState, read_folder_state
from nonet.storage.mounts import find_copy
from nonet.storage.objects import upload_file
from nonet.storage.run_tree import (
    COMMANDS,
    HEAD,
    OBJECTS,
    TREES,
    FileEntry,
    RunHead,
    RunTree,
    make_file_entry,
)

COMMIT_EVERY_S = 5.0  # between two commits in the background
READ_GRACE_S = 60.0  # for which a reader may need objects that a commit has replaced
GARBAGE_GRACE_S = 900.0  # the same for objects of older writers, by the clock of the storage
_MAX_OPENINGS = 10  # attempts to raise the epoch while other processes do the same
_RETRY_PAUSE_S = 1.0  # between two attempts of the last commit


class RunWriter:
    """The writer of a stored run, which holds a lock on the work folder until `close`.

    Args:
        copy: The work folder, mounted in this process.
        single_writer: Whether a new run has a storage without conditional writes. The head of the run keeps it.
        timeout_s: Seconds for which the storage may fail before `check` raises.
        read_grace_s: Seconds for which readers may need objects that a commit has replaced.
        garbage_grace_s: The same for objects of older writers, by the clock of the storage.
        make_lock: Makes a lock between the threads of this process, which a thread may enter again.
        after_epoch: The epoch that the run must have, because this process goes on with what that writer has prepared.

    Attributes:
        epoch: The epoch of this writer.
        excluded: The names of folders of the run that commits leave out, because their files are not complete yet.

    Raises:
        ConfigError: Another process of this node has the run open for writing in the same folder.
        StorageConflict: The run has another epoch than `after_epoch`.
        StorageError: The storage cannot be used.
    """

    def __init__(
        self,
        copy: RunCopy,
        *,
        single_writer: bool = False,
        timeout_s: float = DEFAULTS.storage,
        read_grace_s: float = READ_GRACE_S,
        garbage_grace_s: float = GARBAGE_GRACE_S,
        make_lock: Callable[[], AbstractContextManager[Any]] = threading.RLock,
        after_epoch: int | None = None,
    ):
        self._copy, self._timeout_s = copy, timeout_s
        self._read_grace_s, self._garbage_grace_s = read_grace_s, garbage_grace_s
        self._lock = make_lock()  # excludes commits while files are changed that belong together
        self._collecting_lock = make_lock()  # because workers tell only what is new since the last call
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: StorageError | None = None
        self.excluded: frozenset[str] = frozenset()
        self._collect: Callable[[], Iterable[tuple[str, FileEntry]]] = tuple
        self._collected: list[tuple[str, FileEntry]] = []  # not added to the files yet
        self._undeleted_objects = self._failed_commits = 0
        self._last_error = ""
        self._failing_since: float | None = None  # monotonic seconds
        self._trees_written = 0
        self._deleted: dict[str, str] = {}  # why files were deleted since the last commit, by name
        # The newest generation at the deletion of a file or folder, by its name.
        self._deleted_generations: dict[str, int] = {}
        # The state of each local file whose content is in `_files`, by its path.
        self._stored_states: dict[str, tuple[int, int, int]] = {}
        self._growing_files = GrowingFiles(copy, self._make_own_key)
        # The objects that this writer stored or that its trees have named, until they are dropped.
        self._own_keys = set[str]()
        # The objects to delete, and when they were dropped, in monotonic seconds.
        self._dropped: dict[str, float] = {}
        self._release = self._lock_folder()
        try:
            self._head, self._etag, is_continued = self._raise_epoch(single_writer, after_epoch)
            self._committed = self._load_tree(is_continued)
            self._files = dict(self._committed.files)
            self._own_keys = {*self._committed.list_keys(), *([self._head.tree] if self._head.tree else [])}
            self.delete_garbage()
        except BaseException:
            self._release()
            raise
        copy.writer = self

    @property
    def epoch(self) -> int:
        """The epoch of this writer."""
        return self._head.epoch

    def _lock_folder(self) -> Callable[[], None]:
        """Lock the work folder for writing, and return what releases the lock."""
        release = self._copy.locks.take(self._copy.path / WRITER_LOCK)
        if release is None:
            raise ConfigError(
                f"{self._copy.address} is being run by another process of {socket.gethostname()}; wait for its end, or stop it "
                "first"
            )
        return release

    def _raise_epoch(self, single_writer: bool, after_epoch: int | None) -> tuple[RunHead, str, bool]:
        """Create the head, or raise its epoch, of a given one alone unless that is None.

        Returns:
            The new head, its ETag, and whether the work folder continues the state of the head: what it has on top is newer.
        """
        copy, writer = self._copy, secrets.token_hex(8)
        run_id = copy.address.rpartition("/")[2]
        own_writers = (read_folder_state(copy.path) or FolderState(copy.address)).writers
        for _ in range(_MAX_OPENINGS):
            old, etag = copy.read_head() or (RunHead(run_id, 0, "", "", 0.0, "", single_writer), None)
            if after_epoch not in (None, old.epoch):
                raise StorageConflict(
                    f"{copy.address} was opened by {old.owner} while this start of it waited, and is left to that process"
                )
            is_continued = bool(old.writer) and old.writer in own_writers
            # Before the swap, in case that this process ends, or has no answer, right after it.
            with copy.lock_fetching():
                mark_folder(copy, writers=(*own_writers, writer) if is_continued else ())
            head = replace(
                old,
                epoch=old.epoch + 1,
                owner=f"process {getpid()} of {socket.gethostname()}",
                opened=time.time(),
                commit=secrets.token_hex(8),
                writer=writer,
                discarded=False,
            )
            try:
                return head, self._write_head(head, etag), is_continued
            except StorageConflict:
                continue  # another process opened the run in the meantime: its epoch must be exceeded
        raise StorageError(f"{copy.address} is being opened by several other processes; try again")

    def _write_head(self, head: RunHead, etag: str | None) -> str:
        """Write the head if it still has an ETag, or if there is none yet (None), and return the new ETag."""
        if head.single_writer:
            self._copy.storage.put(HEAD, head.encode())
            return ""
        if etag is None:
            return self._copy.storage.put_if_absent(HEAD, head.encode())
        return self._copy.storage.replace_if(HEAD, head.encode(), etag)

    def _load_tree(self, is_continued: bool) -> RunTree:
        """Return the tree of the run, after making the work folder that of this writer.

        Args:
            is_continued: Whether the folder has the stored state, or what its last writer could not store any more.
        """
        copy, head = self._copy, self._head
        copy.begin_epoch(head.epoch)
        content = copy.storage.get(head.tree) if head.tree else None
        if head.tree and content is None:
            raise StorageError(f"{copy.address}: the head names {head.tree}, and there is no such object")
        tree = RunTree.decode(content.content) if content else RunTree()
        copy.set_tree(head.tree, tree)
        with copy.lock_fetching():
            if not is_continued:
                copy.empty(tree)
            for name, entry in tree.files.items():
                file = copy.path / name
                if not file.exists() and not is_large(name):
                    copy.download(name, entry)
                if file.exists() and (not is_continued or is_content(file, entry)):
                    self._stored_states[name] = read_state(file)
            copy.make_step_folders(tree)
            mark_folder(copy, epoch=head.epoch, writers=(head.writer,), is_stored=False)
        return tree

    def delete_garbage(self) -> None:
        """Delete what writers of lower epochs stored and the tree does not name, once no reader needs it any more.

        The epochs make this safe: a newer writer names objects of lower epochs only if this writer's tree does, and objects
        with its own epoch are left alone. What is young by the clock of the storage is left for a later call.
        """
        storage = self._copy.storage
        try:
            listed = {
                key: modified
                for top in (OBJECTS, TREES)
                for key, modified in storage.list_objects(top).items()
                if _parse_epoch(key) < self.epoch and key not in self._own_keys
            }
            stored = storage.get(HEAD) if listed else None  # which this writer has replaced a moment ago
            if stored is None or RunHead.decode(stored.content).writer != self._head.writer:
                return
            oldest = stored.modified - self._garbage_grace_s
            self._delete(sorted(key for key, modified in listed.items() if modified <= oldest))
        except StorageError:
            self._undeleted_objects += 1

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep commits from happening while files are changed that belong together."""
        with self._lock:
            yield

    def add_written(self, draft: Path, folder: Path, written: Mapping[str, tuple[str, int]]) -> None:
        """Add files that workers have uploaded from a draft folder as those of another folder, to which it is renamed next.

        Args:
            draft: The folder that the workers wrote to.
            folder: The folder of the files from now on; the files that it had are replaced.
            written: SHA-256 and size of each file, by its path below the folder.
        """
        copy = self._copy
        draft_name, name = copy.to_name(draft), copy.to_name(folder)
        with self._lock:
            self.add_deleted(folder, "replaced")
            for file, (sha256, size) in written.items():
                key = copy.make_key(f"{draft_name}/{file}")
                self._files[f"{name}/{file}"] = make_file_entry(
                    key, size, sha256, time.time(), copy.generation
                )
                if (draft / file).exists():
                    self._stored_states[f"{name}/{file}"] = read_state(draft / file)

    def add_deleted(self, path: Path, reason: str) -> None:
        """Remove the files at or below a path from the run; the next commit records why.

        The caller deletes the local files while it holds the lock (`hold`). Workers that live on must be told a new generation
        (`RunCopy.raise_generation`) before they make these files again.
        """
        with self._lock:
            place = self._copy.to_name(path)
            if not find_step_folder(f"{place}/"):  # of whose files workers tell by `add_written` alone
                self._deleted_generations[place] = self._copy.generation
            for name in RunTree(self._files).select(place):
                del self._files[name]
                self._stored_states.pop(name, None)
                self._growing_files.forget(name)
                if name in self._committed.files:
                    self._deleted[name] = reason

    def _add_collected(self) -> None:
        """Add files that workers on other nodes have stored, and fetch small ones.

        A file is left out if there is one of a later generation, or if it was deleted after its generation had begun.
        """
        while self._collected:
            name, entry = self._collected[0]
            old = self._files.get(name)
            is_newest = old is None or entry.generation >= old.generation
            if is_newest and entry.generation > self._find_deleted_generation(name):
                if not is_large(name):
                    self._copy.download(name, entry)
                    self._stored_states[name] = read_state(self._copy.path / name)
                self._files[name] = entry
            self._collected.pop(0)

    def has_file(self, path: Path) -> bool:
        """Return whether the run has a file or folder: locally, or stored by a worker of whose answer this writer knows."""
        return path.exists() or bool(self._select_known(path))

    def list_files(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder of the run that are stored."""
        name = self._copy.to_name(folder)
        return [str(PurePosixPath(file).relative_to(name)) for file in self._select_known(folder)]

    def _select_known(self, path: Path) -> dict[str, FileEntry]:
        """Return the stored file at a path, or the stored files below it, by name."""
        with self._lock:
            known = RunTree({**self._files, **dict(self._collected)})
        return known.select(self._copy.to_name(path))

    def _find_deleted_generation(self, name: str) -> int:
        """Return the newest generation when a file, or a folder above it, was deleted; -1 if none was."""
        path = PurePosixPath(name)
        return max(
            (self._deleted_generations.get(str(place), -1) for place in (path, *path.parents)), default=-1
        )

    def collect_from(self, collect: Callable[[], Iterable[tuple[str, FileEntry]]]) -> None:
        """Let each commit add the files whose entries `collect` returns: those that workers on other nodes have stored since."""
        self._collect = collect

    def commit(self) -> None:
        """Make the local files the stored state of the run.

        Raises:
            StorageConflict: Another process has opened the run for writing.
            StorageError: The storage cannot be used, or the work folder was deleted.
        """
        with self._collecting_lock:  # not the other lock, because this waits for workers
            self._collected += self._collect()
        with self._lock:
            self.check()
            self._check_folder()
            self._add_collected()
            self._upload_changes()
            self._check_folder()  # again: what was deleted in the meantime was not uploaded
            files = dict(self._files)
            if files == self._committed.files and self._head.tree:
                self._check_head()
            else:
                self._store_tree(RunTree(files, dict(self._deleted)))
            self._delete_dropped()

    def _store_tree(self, tree: RunTree) -> None:
        """Write a tree, and move the head to it."""
        self._trees_written += 1
        key = f"{TREES}/{self.epoch}-{self._trees_written}.json"
        self._own_keys |= {key, *tree.list_keys()}
        self._copy.storage.put(key, tree.encode())
        self._swap_head(replace(self._head, tree=key, commit=secrets.token_hex(8)))
        self._committed = tree
        self._deleted = {}
        self._copy.set_tree(key, tree)
        kept = {key, *tree.list_keys()}
        self._dropped |= dict.fromkeys(self._own_keys - kept, time.monotonic())
        self._own_keys = kept

    def _swap_head(self, head: RunHead) -> None:
        """Replace the head of this writer, also if the answer to an earlier swap was lost.

        Raises:
            StorageConflict: Another process has opened the run.
        """
        try:
            self._etag = self._write_head(head, self._etag)
        except StorageConflict:
            self._check_head()  # the head is this writer's own: an earlier swap was applied
            try:
                self._etag = self._write_head(head, self._etag)
            except StorageConflict:
                self._failure = self._describe_conflict()
                raise self._failure from None
        self._head = head

    def _check_head(self) -> None:
        """Check that the head is one that this writer wrote, and remember its ETag. Raises StorageConflict if it is not."""
        stored = self._copy.read_head()
        if stored is None or stored[0].writer != self._head.writer:
            self._failure = self._describe_conflict()
            raise self._failure
        self._etag = stored[1] if not self._head.single_writer else ""

    def _check_folder(self) -> None:
        """Check that the work folder is whole. Raises StorageError, also later, if somebody has deleted it."""
        copy, state = self._copy, read_folder_state(self._copy.path)
        has_scenario = "scenario.yaml" not in self._files or (copy.path / "scenario.yaml").exists()
        is_own = state is not None and self._head.writer in state.writers
        if not is_own or not has_scenario or not (copy.path / WRITER_LOCK).exists():
            self._failure = StorageError(
                f"{copy.path} was deleted or emptied by another program while {copy.address} was written from it; the stored run "
                f"stays as it was at the last commit: continue it with: nonet resume {copy.address}"
            )
            raise self._failure

    def commit_or_wait(self) -> None:
        """Commit; if the storage fails, leave the local files to the next commit, as the background does.

        Raises:
            StorageConflict: Another process has opened the run for writing.
            StorageError: The storage has failed for longer than its deadline, or the work folder was deleted.
        """
        try:
            self.commit()
            self._failing_since = None
        except Exception as error:
            self._note_failure(error)
            self.check()

    def _note_failure(self, error: Exception) -> None:
        """Record a failed commit, which is tried again until the deadline of the storage."""
        self._failed_commits += 1
        self._last_error = str(error) if isinstance(error, NonetError) else f"{type(error).__name__}: {error}"
        if self._failure is None:
            # A fenced writer may fail because a newer one has deleted what it needs.
            with suppress(StorageError):
                self._check_head()
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        if self._failure is None and now - self._failing_since > self._timeout_s:
            self._failure = StorageError(
                f"{self._copy.address}: nothing could be stored for {self._timeout_s:g} s: {self._last_error}; the run ends, "
                f"and its files are in {self._copy.path}. Continue it on this node with: nonet resume {self._copy.address}; "
                "raise deadlines.storage if outages last longer"
            )

    def check(self) -> None:
        """Raise the error that ended writing, such as that another process opened the run."""
        if self._failure is not None:
            raise self._failure

    def describe_outage(self) -> str:
        """Describe in a clause that commits fail now, "" if they do not."""
        since = self._failing_since
        if since is None:
            return ""
        return f"nothing could be stored for {time.monotonic() - since:.0f} s, and is tried again: {self._last_error}"

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

    def stop_commits(self) -> None:
        """End the commits in the background."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def close(self, *, commit: bool = True) -> None:
        """End writing.

        Args:
            commit: Whether to commit first, which is tried again until the deadline of the storage.
        """
        self.stop_commits()
        try:
            if commit and self._copy.writer is self:
                self._commit_to_the_end()
        finally:
            if self._copy.writer is self:
                self._copy.writer = None
                self._release()

    def _commit_to_the_end(self) -> None:
        """Commit, again while the storage fails; then delete what no reader can need any more."""
        while True:
            try:
                self._commit_and_exchange()
                break
            except StorageConflict:
                raise
            except (StorageError, OSError) as error:
                self._note_failure(error)
                self.check()
                time.sleep(_RETRY_PAUSE_S)
        self._delete_dropped(at_once=True)
        with self._copy.lock_fetching():
            mark_folder(self._copy, is_stored=True)

    def discard(self) -> bool:
        """Delete a run whose start has failed, if this writer has its epoch and it has no checkpoint.

        The head stays, marked as discarded, because a process that opens the run meanwhile raises its epoch and goes on.

        Returns:
            Whether the run was deleted.

        Raises:
            StorageError: The storage cannot be used.
        """
        storage = self._copy.storage
        listed = [key for top in (OBJECTS, TREES, COMMANDS) for key in storage.list_objects(top)]
        with self._lock:
            if any(find_step_folder(name) for name in self._committed.files):
                return False
            try:
                self._swap_head(replace(self._head, tree="", discarded=True, commit=secrets.token_hex(8)))
            except StorageConflict:
                return False
        self._delete(listed)
        return True

    def _commit_and_exchange(self) -> None:
        """Commit, upload the answers to commands that the commit contains, and download new commands."""
        storage, folder = self._copy.storage, self._copy.path / COMMANDS
        # Read before the commit, which has the records of the answers.
        local = {file.name for file in folder.glob("[!.]*.json")}
        self.commit()
        self._failing_since = None
        stored = {PurePosixPath(key).name: key for key in storage.list_objects(COMMANDS)}
        for name in sorted(local - stored.keys()):
            storage.put(f"{COMMANDS}/{name}", (folder / name).read_bytes())
        for name in sorted(stored.keys() - local):
            if command := storage.get(stored[name]):
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / name, command.content)

    def _commit_repeatedly(self) -> None:
        """Commit until `close` is called or writing has failed for good; whatever else fails is tried again."""
        garbage_due = time.monotonic() + self._garbage_grace_s
        while not self._ended.wait(COMMIT_EVERY_S) and self.commit_in_background():
            if time.monotonic() > garbage_due:
                self.delete_garbage()
                garbage_due = time.monotonic() + self._garbage_grace_s

    def commit_in_background(self) -> bool:
        """Commit and exchange commands with the storage, and return whether to go on; a failure is noted, not raised."""
        try:
            self._commit_and_exchange()
        except Exception as error:
            self._note_failure(error)
        return self._failure is None

    def _upload_changes(self) -> None:
        """Upload the local files that are new or have changed, and add them to the files of the run."""
        for name in list(self._copy.iterate_files()):
            if name.partition("/")[0] in self.excluded:
                continue
            try:
                state = read_state(self._copy.path / name)
                if name not in self._files or self._stored_states.get(name) != state:
                    self._files[name] = self._upload_file(name, self._files.get(name), state)
            except FileNotFoundError:  # deleted in the meantime
                continue

    def _upload_file(self, name: str, old: FileEntry | None, state: tuple[int, int, int]) -> FileEntry:
        """Upload a new or changed local file, of a growing one the new end, and return its entry."""
        file = self._copy.path / name
        if not is_growing(name):
            entry = self._copy.make_entry(name)
            if old is None or entry.sha256 != old.sha256:
                self._own_keys |= {part.key for part in entry.parts}
                upload_file(self._copy.storage, file, entry.object_sizes)
            else:
                entry = old
            self._stored_states[name] = state
            return entry
        entry = self._growing_files.upload(name, old, state[1])
        # A file that ends in the middle of a line is looked at again.
        self._stored_states[name] = state if entry.size == state[1] else (state[0], entry.size, 0)
        return entry

    def _make_own_key(self, name: str) -> str:
        """Return a new key for a version or a part of a file, which this writer deletes once no tree needs it."""
        key = self._copy.make_new_key(name)
        self._own_keys.add(key)
        return key

    def _describe_conflict(self) -> StorageConflict:
        """Return the error that says which process opened the run."""
        stored = self._copy.read_head()
        owner = f"{stored[0].owner} opened it (epoch {stored[0].epoch})" if stored else "it was deleted"
        return StorageConflict(
            f"{self._copy.address}: {owner} after this process had (epoch {self.epoch}); this process stops, and nothing that it "
            "writes counts"
        )

    def _delete_dropped(self, *, at_once: bool = False) -> None:
        """Delete objects that earlier trees of this writer named, once no reader needs them any more."""
        oldest = time.monotonic() - (0.0 if at_once else self._read_grace_s)
        due = [key for key, dropped_at in self._dropped.items() if dropped_at <= oldest]
        for key in due:
            del self._dropped[key]
        self._delete(sorted(due))

    def _delete(self, keys: list[str]) -> None:
        """Delete objects that are no longer used; objects that cannot be deleted are counted and left."""
        try:
            if keys:
                self._copy.storage.delete(keys)
        except StorageError:
            self._undeleted_objects += len(keys)


def open_writer(
    folder: Path,
    *,
    single_writer: bool = False,
    timeout_s: float = DEFAULTS.storage,
    after_epoch: int | None = None,
) -> RunWriter | None:
    """Open the run of a work folder for writing, see `RunWriter`; return None if the folder is not one of a mounted run."""
    copy = find_copy(folder)
    if not isinstance(copy, RunCopy):
        return None
    copy.timeout_s = timeout_s  # for the workers of the run
    return RunWriter(copy, single_writer=single_writer, timeout_s=timeout_s, after_epoch=after_epoch)


@contextmanager
def change_run(folder: Path, *, single_writer: bool = False) -> Iterator[RunWriter | None]:
    """Commit the changes that a block makes to the files of a run, if the run is stored; other folders are not affected.

    Args:
        folder: The folder of the run; of a stored run its work folder (`open_work_folder`).
        single_writer: As for `RunWriter`.

    Yields:
        The writer, which can still discard the run after the block; None if the run is not stored.
    """
    writer = open_writer(folder, single_writer=single_writer)
    try:
        yield writer
    except BaseException:
        if writer:
            writer.close(commit=False)
        raise
    if writer:
        writer.close()


def _parse_epoch(key: str) -> int:
    """Return the epoch in the key of an object or a tree; a key of another form is that of no writer."""
    text = PurePosixPath(key).parts[1].partition("-")[0]
    return int(text) if text.isdecimal() else sys.maxsize

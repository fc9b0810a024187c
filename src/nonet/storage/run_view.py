"""A view of a stored run: one of its states in a folder of this node, for processes that only read.

A view belongs to the process that made it, and to workers that this process starts. It never shares a folder with the writer
of the run or its workers. It changes only when the process calls `fetch`, from one state of the run to a newer one: what is
needed of the newer state is downloaded first. Downloads are kept by their SHA-256 in the cache of this node, from which the
views of all processes take them.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from nonet.atomic import replace_file, write_whole
from nonet.cache import CacheEntry, find_cache_root
from nonet.errors import StorageError
from nonet.storage.local_copy import MountedRun, StoredRun, is_content, is_large
from nonet.storage.local_folders import (
    SERVING,
    FolderState,
    create_folder_state,
    lock_used,
    make_known_folder,
    make_local_folder,
    write_folder_state,
)
from nonet.storage.locks import FILE_LOCKS, Locks
from nonet.storage.objects import Storage, download_file
from nonet.storage.run_tree import FileEntry, FilePart, RunTree

_STATE_FILE = ".view.json"  # in a view: the tree, and the digest of each file that the view has
_DESCRIPTION = ("scenario.yaml", "status.json", "report.json")  # what lists of runs show
_MAX_INSTALLS = 3  # attempts to take files out of the cache while another process evicts them


class ObjectCache:
    """Contents of files by their SHA-256, for all processes of a node.

    A content is complete and never changes. Those used longest ago make room in the cache of the node.

    Args:
        root: The folder of the contents.
    """

    def __init__(self, root: Path):
        self._root = root

    def bring(self, storage: Storage, entry: FileEntry, subject: str) -> list[Path]:
        """Return the files whose contents make up a file of a run, after downloading those that the cache lacks.

        Args:
            storage: The storage of the run.
            entry: The file.
            subject: What an error calls the file.

        Raises:
            StorageError: The storage cannot be read, or the stored content is damaged.
        """
        if entry.sha256 is not None:
            return [self._bring_content(storage, entry.parts, entry.sha256, subject)]
        return [self._bring_content(storage, (part,), part.sha256, subject) for part in entry.parts]

    def _bring_content(
        self, storage: Storage, parts: tuple[FilePart, ...], sha256: str, subject: str
    ) -> Path:
        """Return the file of a content, after downloading it if needed."""
        file = self._root / sha256[:2] / sha256
        expected = FileEntry(parts, sha256=sha256)
        try:
            if file.stat().st_size == expected.size:
                os.utime(file, (time.time(), file.stat().st_mtime))  # for the order of eviction
                return file
        except FileNotFoundError:
            pass
        file.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(file) as draft:
            download_file(storage, expected.object_sizes, draft)
            if not is_content(draft, expected):
                raise StorageError(f"{subject} is damaged in the storage")
        return file

    def list_entries(self) -> list[CacheEntry]:
        """Return the contents; views keep those that are deleted."""
        entries = []
        for file in self._root.glob("*/*"):
            with suppress(FileNotFoundError):
                status = file.stat()
                if stat.S_ISREG(status.st_mode):
                    entries.append(
                        CacheEntry("downloads", file, status.st_size, status.st_atime, partial(_delete, file))
                    )
        return entries


def _delete(file: Path) -> bool:
    """Delete a file, and return whether it is gone."""
    file.unlink(missing_ok=True)
    return True


class RunView(StoredRun):
    """A view of a stored run.

    Args:
        mounted: The run, with the folder of the view.
        storage: The storage below the address of the run.
        locks: How files are locked.
        root: The folder of the cache, by default that of this node.

    Attributes:
        is_owner: Whether this process made the folder; others stay with the state that it has.
    """

    def __init__(
        self,
        mounted: MountedRun,
        storage: Storage,
        locks: Locks = FILE_LOCKS,
        root: Path | None = None,
    ):
        super().__init__(mounted, storage, locks)
        self._root = root or find_cache_root()
        self._cache = ObjectCache(self._root / "objects")
        self.is_owner = not self.path.exists()
        self._release_used = lock_used(self.path.parent, locks)
        self._place, _, self._run_id = mounted.address.rpartition("/")
        if self.is_owner:
            self.path.mkdir(parents=True, exist_ok=True)
            write_folder_state(self.path, FolderState(mounted.address))
            self._link_serving()

    def _link_serving(self) -> None:
        """Let RUN/serving be the folder of this node that stays when views and work folders are deleted."""
        serving = make_local_folder(self._place, self._run_id, self._root) / SERVING
        serving.mkdir(parents=True, exist_ok=True)
        create_folder_state(serving.parent, FolderState(self.address))
        (self.path / SERVING).symlink_to(serving, target_is_directory=True)

    def release(self) -> None:
        """Let this or another process delete the view."""
        self._release_used()

    def fetch(self, path: Path) -> None:
        """Bring the view to the newest state of the run, with the files at or below a path.

        Small files are there in any case; checkpoints and artifacts, once they were fetched. A process that does not own the
        view stays with its state.

        Raises:
            StorageError: The storage cannot be read. The view is as before then.
        """
        name = self.to_name(path)

        def install(tree: RunTree) -> None:
            self._install(tree, self._read_state()[0], tree.select(name) if name else {})

        current = None if self.is_owner else self._read_state()[1]
        if current is None:
            self._apply_newest_tree(install)
            return
        self.set_tree("", current)
        with self.lock_fetching():
            install(current)

    def _read_state(self) -> tuple[dict[str, str], RunTree | None]:
        """Return the digest of each file that the view has, and its tree; None if it has none yet."""
        file = self.path / _STATE_FILE
        if not file.exists():
            return {}, None
        state = json.loads(file.read_bytes())
        return state["installed"], RunTree.decode(state["tree"].encode())

    def _install(self, tree: RunTree, installed: dict[str, str], selected: Mapping[str, FileEntry]) -> None:
        """Change the view to the state of a tree, with its small files, those that it has, and selected ones."""
        wanted = {
            name: entry
            for name, entry in tree.files.items()
            if not is_large(name) or name in installed or name in selected
        }
        changed = {name: entry for name, entry in wanted.items() if installed.get(name) != entry.digest}
        contents = {
            name: self._cache.bring(self.storage, entry, f"{self.address}: the content of {name}")
            for name, entry in changed.items()
        }
        for name in installed.keys() - wanted.keys():
            (self.path / name).unlink(missing_ok=True)
        for name, entry in changed.items():
            self._install_file(name, entry, contents[name])
        for folder in {Path(name).parent for name in tree.files}:
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        if changed or installed.keys() != wanted.keys() or tree != self._read_state()[1]:
            digests = {name: entry.digest for name, entry in wanted.items()}
            state = {"installed": digests, "tree": tree.encode().decode()}
            write_whole(self.path / _STATE_FILE, json.dumps(state).encode())
            self._write_known(tree)

    def _install_file(self, name: str, entry: FileEntry, contents: list[Path]) -> None:
        """Put a file into the view: a link to the content of a large one, which nothing changes, or a copy."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(_MAX_INSTALLS):
            try:
                if is_large(name) and len(contents) == 1:
                    _replace_by_link(contents[0], file)
                    return
                with replace_file(file) as draft:
                    _join_files(contents, draft)
                os.utime(file, (entry.time, entry.time))
                return
            except FileNotFoundError:  # another process has evicted it
                if attempt + 1 == _MAX_INSTALLS:
                    raise
                contents = self._cache.bring(self.storage, entry, name)

    def _write_known(self, tree: RunTree) -> None:
        """Write what lists of runs show of the state of this view."""
        known = make_known_folder(self._place, self._run_id, self._root)
        write_folder_state(known, FolderState(self.address))
        for name in _DESCRIPTION:
            if name in tree.files:
                write_whole(known / name, (self.path / name).read_bytes())
            else:
                (known / name).unlink(missing_ok=True)


class KnownRun(StoredRun):
    """What lists of runs show of a stored run, in a folder that stays, without its other files."""

    def fetch(self, path: Path) -> None:
        """Bring the files to the newest state of the run.

        Raises:
            StorageError: The storage cannot be read.
        """

        def download(tree: RunTree) -> None:
            write_folder_state(self.path, FolderState(self.address))
            for name in _DESCRIPTION:
                if entry := tree.files.get(name):
                    download_file(self.storage, entry.object_sizes, self.path / name)
                else:
                    (self.path / name).unlink(missing_ok=True)

        self._apply_newest_tree(download)


def _replace_by_link(source: Path, file: Path) -> None:
    """Replace a file by a link to another one, or by a copy on a filesystem without links."""
    with replace_file(file) as draft:
        try:
            os.link(source, draft)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(source, draft)


def _join_files(sources: list[Path], target: Path) -> None:
    """Write a file with the contents of others, one after another."""
    with target.open("wb") as out:
        for source in sources:
            with source.open("rb") as content:
                shutil.copyfileobj(content, out, 1 << 20)

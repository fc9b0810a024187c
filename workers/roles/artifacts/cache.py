"""Artifacts that runs share: each is made once for the same inputs, and its files are linked into the folders of runs.

    <cache>/artifacts/<key>/entry.json   what the entry is: kind, inputs, run, and the sizes and hashes of its files
    <cache>/artifacts/<key>/files/       the files as they are in RUN/artifacts

The key is a hash of everything that the content follows from: the content of the tables, options, versions of libraries, and the
number of the kind in `NUMBERS`. A run has its own names for the files (hard links, else copies), so it stays complete when it is
moved or the cache is deleted. Files are compared with their hashes whenever they are taken. A cache that cannot be read
or written, or has a damaged entry, costs time only: the run makes its artifacts itself and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nonet.atomic import write_whole
from nonet.cache import read_cache_bytes
from nonet.errors import NonetError
from nonet.storage import CachedFolders
from nonet.suggest import make_printable
from nonet.workers.roles.artifacts.folders import PREPARING, hash_file, make_draft

NUMBERS = {"sequences": 1, "sids": 1, "transitions": 1}
"""The number of each kind of artifact that is shared. It is raised when the same inputs give other content."""
_ENTRY, _FILES = "entry.json", "files"
_LIBRARIES = (
    "numpy",
    "pyarrow",
    "scipy",
    "torch",
    "transformers",
)  # of which the bits of artifacts may depend
_HASHING_THREADS = 4
_MAX_ENTRY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class MadeArtifacts:
    """Artifacts in the folder of a run that are made together.

    Attributes:
        artifacts: Kind, path and SHA-256 of each, as from `store_artifact`.
        facts: Facts about them for the report of the run, as JSON.
        others: Names of further files and folders of RUN/artifacts that belong to them.
    """

    artifacts: tuple[dict[str, Any], ...]
    facts: dict[str, Any]
    others: tuple[str, ...] = ()


class ArtifactCache:
    """The artifacts that runs share.

    Args:
        folder: The folder of the cache; None for none.
        root: RUN/artifacts.

    Attributes:
        keys: The keys of the artifacts that the run has taken or made, by kind; what is made of others has none.
        taken: The run that made each artifact that was taken from the cache, by kind.
        problems: Sentences about what did not work.
    """

    def __init__(self, folder: Path | None, root: Path):
        self._folders = None if folder is None else CachedFolders(folder / "artifacts")
        self._root = root
        self.keys: dict[str, str] = {}
        self.taken: dict[str, str] = {}
        self.problems: list[str] = []

    def get_or_make(
        self, kind: str, describe: Callable[[], Mapping[str, Any] | None], make: Callable[[], MadeArtifacts]
    ) -> MadeArtifacts:
        """Return artifacts from the cache, or make them and put them into the cache.

        Args:
            kind: Their kind, a key of `NUMBERS`.
            describe: Returns what their content follows from, as JSON; None if that is not known, so that they are made.
            make: Makes them in the folder of the run.
        """
        if self._folders is None or (inputs := describe()) is None:
            return make()
        key = self.keys[kind] = make_key(kind, inputs)
        with ExitStack() as stack:
            try:
                if (found := self._take(key, kind)) is not None:
                    return found
                stack.enter_context(self._folders.make(key, self._report_waiting))
                (self._root / PREPARING).unlink(missing_ok=True)
                if (found := self._take(key, kind)) is not None:  # Another process has made them meanwhile.
                    return found
            except OSError as error:
                self._add_problem(error)
                return make()
            made = make()
            if not _is_unchanged(describe, inputs):
                del self.keys[kind]
                return made
            try:
                self._store(key, kind, inputs, made)
            except OSError as error:
                self._add_problem(error)
            return made

    def get_or_make_from(
        self,
        source: str,
        kind: str,
        describe: Callable[[], Mapping[str, Any] | None],
        make: Callable[[], MadeArtifacts],
    ) -> MadeArtifacts:
        """Do the same as `get_or_make` for artifacts that follow from one that the run has, of the kind `source`, and more."""

        def describe_both() -> dict[str, Any] | None:
            if (key := self.keys.get(source)) is None or (more := describe()) is None:
                return None
            return {source: key, **more}

        return self.get_or_make(kind, describe_both, make)

    def describe(self) -> dict[str, Any]:
        """Return {"cache": {"taken": the runs by kind, "problems": sentences}}; empty if everything was made."""
        found = {"taken": self.taken, "problems": self.problems}
        return {"cache": found} if self.taken or self.problems else {}

    def _add_problem(self, error: OSError) -> None:
        """Note that the cache cannot be used, and do without it from now on."""
        assert self._folders is not None
        self.problems.append(f"{self._folders.root} is not used: {error}")
        self._folders = None

    def _report_waiting(self) -> None:
        """Show in the file of the progress that this run waits, so that it does not miss the deadline of the stage."""
        text = "another run prepares the same data; this one waits for it"
        write_whole(self._root / PREPARING, json.dumps({"text": text, "rows": time.time_ns()}).encode())

    def _take(self, key: str, kind: str) -> MadeArtifacts | None:
        """Link the files of an entry into the folder of the run; None if there is no entry, or a damaged one."""
        assert self._folders is not None
        with self._folders.read(key) as folder:
            if folder is None:
                return None
            try:
                made, run = _link_entry(folder, self._root, kind)
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                problem = error
            else:
                self.taken[kind] = run
                return made
        self.problems.append(f"{self._folders.root / key} is damaged ({problem}), and is made again")
        self._folders.remove(key)
        return None

    def _store(self, key: str, kind: str, inputs: Mapping[str, Any], made: MadeArtifacts) -> None:
        """Put artifacts of the run into the cache, unless they are larger than the cache."""
        assert self._folders is not None
        names = [*(Path(artifact["path"]).name for artifact in made.artifacts), *made.others]
        files = _list_files(self._root, names)
        size = sum((self._root / name).stat().st_size for name in files)
        if size > (limit := read_cache_bytes()):
            self.problems.append(
                f"{kind} has {size / 1e9:.3g} GB, and the cache takes {limit / 1e9:.3g} GB; raise NONET_CACHE_BYTES"
            )
            return

        def write(draft: Path) -> None:
            hashes = _link_files(self._root, draft / _FILES, files)
            entry = {
                "kind": kind,
                "run": self._root.parent.name,
                "inputs": inputs,
                "artifacts": [
                    {**artifact, "path": Path(artifact["path"]).name} for artifact in made.artifacts
                ],
                "others": made.others,
                "facts": made.facts,
                "files": hashes,
            }
            write_whole(draft / _ENTRY, json.dumps(entry).encode())

        self._folders.add(key, size, write)


def _is_unchanged(describe: Callable[[], Mapping[str, Any] | None], inputs: Mapping[str, Any]) -> bool:
    """Return whether the inputs are those from before the artifacts were made."""
    try:
        return describe() == inputs
    except NonetError:  # Files have been deleted.
        return False


def make_key(kind: str, inputs: Mapping[str, Any]) -> str:
    """Return the key of an artifact in the cache."""
    whole = [kind, NUMBERS[kind], _get_versions(), inputs]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _get_versions() -> dict[str, str]:
    """Return the versions of the libraries that artifacts are made with."""
    versions: dict[str, str] = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def read_entry(folder: Path) -> dict[str, Any]:
    """Return what entry.json says of an entry.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no entry.
    """
    with (folder / _ENTRY).open("rb") as file:
        entry = json.loads(file.read(_MAX_ENTRY_BYTES))
    if not isinstance(entry, dict):
        raise ValueError(f"{_ENTRY} is no map")
    return entry


def describe_entry(folder: Path) -> str:
    """Return what an entry holds, such as "sequences of interactions.parquet, made by run feed-1".

    Raises:
        OSError, ValueError, LookupError, TypeError: The entry is damaged.
    """
    entry = read_entry(folder)
    tables = entry["inputs"].get("tables", {}).get("interactions", [])
    source = (
        f" of {tables[0][0]}{f' and {len(tables) - 1} more' if len(tables) > 1 else ''}" if tables else ""
    )
    return make_printable(f"{entry['kind']}{source}, made by run {entry['run']}")


def _link_entry(folder: Path, root: Path, kind: str) -> tuple[MadeArtifacts, str]:
    """Link the files of an entry into RUN/artifacts; return the artifacts and the run that made them.

    Raises:
        OSError, ValueError, LookupError, TypeError: The entry is damaged.
    """
    entry = read_entry(folder)
    others = tuple(map(str, entry["others"]))
    names = [*(str(artifact["path"]) for artifact in entry["artifacts"]), *others]
    files = _list_files(folder / _FILES, names)
    if entry["kind"] != kind or files != sorted(entry["files"]):
        raise ValueError("its files are not those that it lists")
    with make_draft(root, kind) as draft:
        hashes = _link_files(folder / _FILES, draft, files)
        if changed := [name for name in files if hashes[name] != entry["files"][name]]:
            raise ValueError(f"{changed[0]} has other content than it had")
        for name in names:
            target = root / name
            if not (
                (draft / name).is_dir() and target.is_dir()
            ):  # Folders of equal names have equal content.
                os.replace(draft / name, target)
    artifacts = tuple({**artifact, "path": str(root / artifact["path"])} for artifact in entry["artifacts"])
    return MadeArtifacts(artifacts, dict(entry["facts"]), others), str(entry["run"])


def _list_files(root: Path, names: Sequence[str]) -> list[str]:
    """Return the paths of the regular files at or below some names of a folder, relative to it, sorted.

    Raises:
        ValueError: A name is no name, or something is neither a file nor a folder.
    """
    found: list[str] = []
    for name in names:
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{name!r} is no name of a file")
        paths = [root / name, *(root / name).rglob("*")]
        for path in paths:
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ValueError(f"{path} is no regular file")
        found += [str(path.relative_to(root)) for path in paths if path.is_file()]
    return sorted(found)


def _link_files(source: Path, target: Path, files: list[str]) -> dict[str, str]:
    """Link files of a folder, or copy them, into another one; return their SHA-256 by their relative paths."""
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:  # another filesystem, or one without links
            shutil.copyfile(source / name, target / name)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return dict(zip(files, pool.map(lambda name: hash_file(target / name), files), strict=True))

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
from typing import Annotated, Any

from pydantic import Field

from nonet.atomic import read_content, write_whole
from nonet.cache import read_cache_bytes
from nonet.errors import ConfigError, DeadlineExceeded, NonetError
from nonet.options import StrictModel
from nonet.storage import CachedFolders
from nonet.suggest import make_printable
from nonet.workers.roles.artifacts.folders import PREPARING, hash_file, make_draft

NUMBERS = {"sequences": 1, "sids": 1, "transitions": 1}
"""The number of each kind of artifact that is shared. It is raised when the same inputs give other content."""
_PARTS = {"sequences": ("sequences",), "sids": ("sids", "catalogue"), "transitions": ("transitions",)}
"""The kinds of the artifacts of an entry, by its kind."""
_OTHER_NAMES = r"^(repeats-[0-9a-f]{8}|compressed\.json|unknown_items\.json|labels\.json)$"
_ENTRY, _FILES = "entry.json", "files"
_LIBRARIES = (
    "numpy",
    "pyarrow",
    "scipy",
    "torch",
    "transformers",
)  # The content of artifacts may depend on them.
_HASHING_THREADS = 4


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
        problem: Why there is no cache; "" if there need not be one.

    Attributes:
        keys: The keys of the artifacts that the run has taken or made, by kind; what is made of others has none.
        taken: The run that made each artifact that was taken from the cache, by kind.
        problems: Sentences about what did not work.
    """

    def __init__(self, folder: Path | None, root: Path, problem: str = ""):
        self._folders = None if folder is None else CachedFolders(folder / "artifacts")
        self._root = root
        self.keys: dict[str, str] = {}
        self.taken: dict[str, str] = {}
        self.problems = [problem] if problem else []

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
            except (OSError, DeadlineExceeded) as error:
                self._add_problem(error)
                return make()
            made = make()
            if not _is_unchanged(describe, key, kind):
                del self.keys[kind]
                return made
            try:
                self._store(key, kind, inputs, made)
            except (OSError, DeadlineExceeded) as error:
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

    def _add_problem(self, error: Exception) -> None:
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
            except (FileNotFoundError, ValueError, RecursionError) as error:
                problem = error
            else:
                self.taken[kind] = run
                return made
        text = make_printable(str(problem)).splitlines()[0]
        self.problems.append(f"{self._folders.root / key} is damaged ({text}), and is made again")
        self._folders.remove(key)
        return None

    def _store(self, key: str, kind: str, inputs: Mapping[str, Any], made: MadeArtifacts) -> None:
        """Put artifacts of the run into the cache, unless they are larger than the cache."""
        assert self._folders is not None
        names = [*(Path(artifact["path"]).name for artifact in made.artifacts), *made.others]
        files = _list_files(self._root, names)
        size = sum((self._root / name).stat().st_size for name in files)
        if not self._folders.make_room_for(size):
            self.problems.append(
                f"{kind} of {size / 1e9:.3g} GB has no room in the cache, which takes {read_cache_bytes() / 1e9:.3g} GB with "
                "what processes use; raise NONET_CACHE_BYTES"
            )
            return

        def write(draft: Path) -> None:
            hashes = _link_files(self._root, draft / _FILES, files)
            entry = {
                "kind": kind,
                "run": self._root.parent.name,
                "source": _describe_source(inputs),
                "artifacts": [
                    {**artifact, "path": Path(artifact["path"]).name} for artifact in made.artifacts
                ],
                "others": list(made.others),
                "facts": made.facts,
                "files": hashes,
            }
            write_whole(draft / _ENTRY, json.dumps({**entry, "digest": _compute_digest(entry)}).encode())

        self._folders.add(key, write)


def _is_unchanged(describe: Callable[[], Mapping[str, Any] | None], key: str, kind: str) -> bool:
    """Return whether the inputs are those from before the artifacts were made."""
    try:
        inputs = describe()
    except NonetError:  # Files have been deleted.
        return False
    return inputs is not None and make_key(kind, inputs) == key


def make_key(kind: str, inputs: Mapping[str, Any]) -> str:
    """Return the key of an artifact in the cache."""
    # The order of maps counts: columns and targets have it.
    whole = [kind, NUMBERS[kind], _list_versions(), inputs]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:32]


@cache
def _list_versions() -> dict[str, str]:
    """Return the version of each library that artifacts are made with and that is installed, by its name."""
    versions: dict[str, str] = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


class _Artifact(StrictModel):
    """An artifact of an entry, as `store_artifact` describes it, with the name of its folder as the path."""

    kind: str
    path: Annotated[str, Field(pattern=r"^[a-z]+-[0-9a-f]{8}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    files: list[str] | None = None


class _Entry(StrictModel):
    """The content of entry.json; `digest` is the hash of all others."""

    kind: str
    run: str
    source: str
    artifacts: list[_Artifact]
    others: list[Annotated[str, Field(pattern=_OTHER_NAMES)]]
    facts: dict[str, Any]
    files: dict[str, str]
    digest: str


def _compute_digest(entry: Mapping[str, Any]) -> str:
    """Return the hash of all fields of an entry but `digest`."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _describe_source(inputs: Mapping[str, Any]) -> str:
    """Return the interactions that artifacts follow from, such as "day-1.parquet and 29 more"; "" for other inputs."""
    files = inputs.get("tables", {}).get("interactions", [])
    return f"{files[0][0]}{f' and {len(files) - 1} more' if len(files) > 1 else ''}" if files else ""


def read_entry(folder: Path) -> _Entry:
    """Return what entry.json says of an entry.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no entry.
    """
    for path in (folder, folder / _FILES, folder / _ENTRY):
        if path.is_symlink():
            raise ValueError(f"{path} is a link")
    try:
        content = read_content(folder / _ENTRY)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    document = json.loads(content)
    entry = _Entry.model_validate(document)
    if entry.digest != _compute_digest({name: value for name, value in document.items() if name != "digest"}):
        raise ValueError(f"{_ENTRY} has other content than it had")
    if entry.kind not in _PARTS or tuple(artifact.kind for artifact in entry.artifacts) != _PARTS[entry.kind]:
        raise ValueError(f"{_ENTRY} does not name the artifacts of its kind")
    return entry


def describe_entry(folder: Path) -> str:
    """Return what an entry holds, such as "sequences of interactions.parquet, made by run feed-1"; "damaged" for no entry."""
    try:
        entry = read_entry(folder)
    except (OSError, ValueError, RecursionError):
        return "damaged"
    source = f" of {entry.source}" if entry.source else ""
    return make_printable(f"{entry.kind}{source}, made by run {entry.run}")


def _link_entry(folder: Path, root: Path, kind: str) -> tuple[MadeArtifacts, str]:
    """Link the files of an entry into RUN/artifacts; return the artifacts and the run that made them.

    Raises:
        FileNotFoundError, ValueError: The entry is damaged.
        OSError: The files cannot be linked or read.
    """
    entry = read_entry(folder)
    names = [*(artifact.path for artifact in entry.artifacts), *entry.others]
    files = _list_files(folder / _FILES, names)
    if entry.kind != kind or files != sorted(entry.files):
        raise ValueError("its files are not those that it lists")
    with make_draft(root, kind) as draft:
        hashes = _link_files(folder / _FILES, draft, files)
        if changed := [name for name in files if hashes[name] != entry.files[name]]:
            raise ValueError(f"{changed[0]} has other content than it had")
        for name in names:
            if (root / name).is_dir():  # What an earlier attempt has left may be damaged.
                shutil.rmtree(root / name)
            os.replace(draft / name, root / name)
    artifacts: list[dict[str, Any]] = []
    for artifact in entry.artifacts:
        described = {"kind": artifact.kind, "path": str(root / artifact.path), "sha256": artifact.sha256}
        first = f"{artifact.path}/"
        own = [name.removeprefix(first) for name in files if name.startswith(first)]
        artifacts.append(described if artifact.files is None else {**described, "files": own})
    return MadeArtifacts(tuple(artifacts), entry.facts, tuple(entry.others)), make_printable(entry.run)


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

"""The stored form of a run: a head, a tree of files, and the objects that hold the content of the files.

    <storage>/<run>/head.json               {epoch, tree, ...}: the only object that is replaced, by compare-and-swap
    <storage>/<run>/trees/<epoch>-<n>.json  which objects make up each file of the run
    <storage>/<run>/objects/<epoch>/...     content; never replaced
    <storage>/<run>/commands/...            commands to the run and their answers; never replaced

Whoever opens a run for writing raises the epoch in the head. A state of the run exists when the head names its tree, so a
writer that was killed leaves the state before, and a swap of a writer with an older epoch fails. Names of objects contain the
epoch of their writer, so that late writes of an older writer replace nothing. docs/explanation/guarantees.md states who may
create, replace and delete each key.

What is read from a storage may have been written by anybody: documents are checked before they are used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from nonet.errors import CheckpointError

FORMAT = 2  # of heads and trees
_OLDEST_FORMAT = (
    1  # without the writer of a head, and without digests of whole files, generations and deletions in a tree
)
HEAD, TREES, OBJECTS, COMMANDS = "head.json", "trees", "objects", "commands"
PART_BYTES = 64 << 20  # of an object; a larger file consists of several
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Decoded = TypeVar("_Decoded")


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file, which is the whole content of one object.

    Attributes:
        key: The key of the object, below the run.
        size: The number of bytes.
        sha256: The SHA-256 of the bytes; "" if only that of the whole file is known.
    """

    key: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a run.

    Attributes:
        parts: The parts of its content.
        time: When the file was changed last, in unix seconds.
        sha256: The SHA-256 of the whole file; None for a file that grows, whose parts have digests.
        generation: Rises with every process that the run starts, with every cut of its results, and from epoch to epoch. Of two
            versions of a file that processes made, the one of the higher generation counts.
    """

    parts: tuple[FilePart, ...]
    time: float = 0.0
    sha256: str | None = None
    generation: int = 0

    @property
    def size(self) -> int:
        """The number of bytes of the file."""
        return sum(part.size for part in self.parts)

    @property
    def object_sizes(self) -> list[tuple[str, int]]:
        """The key and the number of bytes of each object of the file, in order."""
        return [(part.key, part.size) for part in self.parts]

    @property
    def digest(self) -> str:
        """A digest of the content: the SHA-256 of the file, or one of the digests of its parts."""
        digests = ",".join(part.sha256 for part in self.parts)
        return self.sha256 or hashlib.sha256(digests.encode()).hexdigest()


def split_file(key: str, size: int) -> list[tuple[str, int]]:
    """Return key and size of each object that holds a file: of the key itself, or of numbered keys for a large file."""
    if size <= PART_BYTES:
        return [(key, size)]
    starts = range(0, size, PART_BYTES)
    return [(f"{key}@{number}", min(PART_BYTES, size - start)) for number, start in enumerate(starts)]


def make_file_entry(key: str, size: int, sha256: str, time: float, generation: int) -> FileEntry:
    """Return the entry of a file that does not grow, whose objects `split_file` names."""
    sizes = split_file(key, size)
    parts = tuple(FilePart(name, part, sha256 if len(sizes) == 1 else "") for name, part in sizes)
    return FileEntry(parts, time, sha256, generation)


@dataclass(frozen=True, slots=True)
class RunTree:
    """The files of a run at one moment.

    Attributes:
        files: The files by their path relative to the run's folder.
        deleted: Why each file was deleted that the tree before had, by path.
    """

    files: Mapping[str, FileEntry] = field(default_factory=dict)
    deleted: Mapping[str, str] = field(default_factory=dict)

    def list_keys(self) -> set[str]:
        """Return the keys of all objects of the files."""
        return {part.key for entry in self.files.values() for part in entry.parts}

    def select(self, path: str) -> dict[str, FileEntry]:
        """Return the file at a path, or all files below it; "" selects all files."""
        if path in self.files:
            return {path: self.files[path]}
        parents = PurePosixPath(path).parts
        return {
            name: entry
            for name, entry in self.files.items()
            if PurePosixPath(name).parts[: len(parents)] == parents
        }

    def encode(self) -> bytes:
        """Return the tree as JSON."""
        files = {
            path: [
                entry.time,
                [[part.key, part.size, part.sha256] for part in entry.parts],
                entry.sha256,
                entry.generation,
            ]
            for path, entry in sorted(self.files.items())
        }
        document = {"format": FORMAT, "files": files, "deleted": dict(sorted(self.deleted.items()))}
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> RunTree:
        """Return the tree that `encode` encoded, of this format or an older one.

        Raises:
            CheckpointError: It has another format, or a name in it is not one of a file below the run's folder.
        """

        def decode(document: Mapping[str, Any]) -> RunTree:
            files = {_check_name(path): _decode_entry(*entry) for path, entry in document["files"].items()}
            deleted = {str(path): str(reason) for path, reason in document.get("deleted", {}).items()}
            return cls(files, deleted)

        return _decode(content, "the tree of a run", decode)


@dataclass(frozen=True, slots=True)
class RunHead:
    """The head of a run: the object that names its current state.

    Attributes:
        run: The id of the run.
        epoch: How many times the run has been opened for writing.
        tree: The key of the tree, below the run; "" before the first one.
        owner: The host and the process that opened the run last.
        opened: When they did, in unix seconds of their clock, for messages.
        commit: A random text that differs between all heads.
        single_writer: Whether the head is replaced without a condition, because the storage has none.
        writer: A random text of the process that opened the run last; "" in a head of format 1.
        discarded: Whether there is no run any more: its start failed, and the head stays so that epochs go on.
        format: The format of the head.
    """

    run: str
    epoch: int
    tree: str
    owner: str
    opened: float
    commit: str
    single_writer: bool = False
    writer: str = ""
    discarded: bool = False
    format: int = FORMAT

    def encode(self) -> bytes:
        """Return the head as JSON, in the current format."""
        return json.dumps(asdict(self) | {"format": FORMAT}, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes) -> RunHead:
        """Return the head that `encode` encoded, of this format or an older one.

        Raises:
            CheckpointError: It has another format, or is not a head.
        """

        def decode(document: Mapping[str, Any]) -> RunHead:
            head = cls(**document)
            if head.tree:
                _check_path(head.tree)
            if not isinstance(head.epoch, int) or head.epoch < 0 or not isinstance(head.tree, str):
                raise ValueError(f"epoch {head.epoch!r}, tree {head.tree!r}")
            return head

        return _decode(content, "the head of a run", decode)


def _decode(content: bytes, subject: str, decode: Callable[[Mapping[str, Any]], _Decoded]) -> _Decoded:
    """Decode a JSON document. Raises CheckpointError if it is not one of a format that this version reads."""
    try:
        document: dict[str, Any] = json.loads(content)
        number = document.get("format")
    except (ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"{subject} in object storage is not a JSON object") from None
    if not isinstance(number, int) or not _OLDEST_FORMAT <= number <= FORMAT:
        raise CheckpointError(
            f"{subject} has format {number} in object storage; this version reads {_OLDEST_FORMAT} to {FORMAT}"
        )
    try:
        return decode(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{subject} in object storage is damaged, or somebody else wrote it: {type(error).__name__}: {error}"
        ) from None


def _decode_entry(time: Any, parts: Any, sha256: Any = "", generation: Any = 0) -> FileEntry:
    """Return the entry of a file after checking its values; an entry of format 1 has neither digest nor generation."""
    decoded = tuple(_decode_part(*part) for part in parts)
    if sha256 == "":
        sha256 = decoded[0].sha256 if len(decoded) == 1 else None
    if sha256 is None and not all(part.sha256 for part in decoded):
        raise ValueError("a file without a digest")
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise ValueError(f"the digest {sha256!r}")
    return FileEntry(decoded, float(time), sha256, int(generation))


def _decode_part(key: Any, size: Any, sha256: Any) -> FilePart:
    """Return a part of a file after checking its values."""
    if not isinstance(size, int) or size < 0 or not (sha256 == "" or _SHA256.fullmatch(sha256)):
        raise ValueError(f"a part of {size!r} bytes with the digest {sha256!r}")
    return FilePart(_check_path(key), size, sha256)


def _check_name(name: Any) -> str:
    """Return the path of a file of a run if a writer stores such files: no hidden ones, caches, commands or posts.

    Raises:
        ValueError: It is not.
    """
    parts = PurePosixPath(_check_path(name)).parts
    is_reserved = parts[0] in (COMMANDS, "serving", "stop-request")
    if is_reserved or any(part.startswith(".") or part == "__pycache__" for part in parts):
        raise ValueError(f"the path {name!r}")
    return name


def _check_path(path: Any) -> str:
    """Return a path if it is relative, normalised and names something below its root.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(path, str) or "\0" in path or str(PurePosixPath(path)) != path:
        raise ValueError(f"the path {path!r}")
    if path.startswith("/") or ".." in PurePosixPath(path).parts or path == ".":
        raise ValueError(f"the path {path!r}")
    return path

"""The stored form of a run: a head, a tree of files, and the objects that hold the content of the files.

    <storage>/<run>/head.json               {epoch, tree, ...}: the only object that is replaced, by compare-and-swap
    <storage>/<run>/trees/<epoch>-<n>.json  which objects make up each file of the run
    <storage>/<run>/objects/<epoch>/...     content; never replaced
    <storage>/<run>/commands/...            commands to the run and their answers; never replaced

Whoever opens a run for writing raises the epoch in the head. A state of the run exists when the head names its tree, so a
writer that was killed leaves the state before, and a swap of a writer with an older epoch fails. Names of objects contain the
epoch of their writer, so that late writes of an older writer replace nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from nonet.errors import CheckpointError

FORMAT = 1  # of heads and trees
HEAD, TREES, OBJECTS, COMMANDS = "head.json", "trees", "objects", "commands"


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file, which is the whole content of one object.

    Attributes:
        key: The key of the object, below the run.
        size: The number of bytes.
        sha256: The SHA-256 of the bytes.
    """

    key: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a run.

    Attributes:
        parts: The parts of its content: one, unless the file grows while the run works.
        time: When the file was changed last, in unix seconds.
    """

    parts: tuple[FilePart, ...]
    time: float = 0.0

    @property
    def size(self) -> int:
        """The number of bytes of the file."""
        return sum(part.size for part in self.parts)

    @property
    def sha256(self) -> str | None:
        """The SHA-256 of a file of one part; None if it has several."""
        return self.parts[0].sha256 if len(self.parts) == 1 else None


@dataclass(frozen=True, slots=True)
class RunTree:
    """The files of a run at one moment, by path relative to the run's folder."""

    files: Mapping[str, FileEntry] = field(default_factory=dict)

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
            path: [entry.time, [[part.key, part.size, part.sha256] for part in entry.parts]]
            for path, entry in sorted(self.files.items())
        }
        return json.dumps({"format": FORMAT, "files": files}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> RunTree:
        """Return the tree that `encode` encoded.

        Raises:
            CheckpointError: It has another format.
        """
        document: dict[str, Any] = json.loads(content)
        _check_format(document, "the tree of a run")
        return cls(
            {
                path: FileEntry(tuple(FilePart(*part) for part in parts), time)
                for path, (time, parts) in document["files"].items()
            }
        )


@dataclass(frozen=True, slots=True)
class RunHead:
    """The head of a run: the object that names its current state.

    Attributes:
        run: The id of the run.
        epoch: How many times the run has been opened for writing.
        tree: The key of the tree, below the run; "" before the first one.
        owner: The host and the process that opened the run last.
        opened: When they did, in unix seconds.
        commit: A random text that differs between all heads.
        single_writer: Whether the head is replaced without a condition, because the storage has none.
        format: The format of the head.
    """

    run: str
    epoch: int
    tree: str
    owner: str
    opened: float
    commit: str
    single_writer: bool = False
    format: int = FORMAT

    def encode(self) -> bytes:
        """Return the head as JSON."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def decode(cls, content: bytes) -> RunHead:
        """Return the head that `encode` encoded.

        Raises:
            CheckpointError: It has another format.
        """
        document: dict[str, Any] = json.loads(content)
        _check_format(document, "the head of a run")
        return cls(**document)


def _check_format(document: Mapping[str, Any], subject: str) -> None:
    """Raise CheckpointError if a document has another format than this version reads."""
    if document.get("format") != FORMAT:
        raise CheckpointError(
            f"{subject} has format {document.get('format')} in object storage; this version reads {FORMAT}"
        )

"""DataManifest: the sizes, row groups and fingerprints of the data files at the time when they were listed.

The id of a row has 64 bits, `file << 40 | row`: the index of the file in the manifest, and the index of the row in the file
before any filter. Paths are not part of the manifest's digest, so data can be moved. A file that is listed twice counts as two
files.
"""

# Shapes: G row groups over all files, N rows.

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from nonet.contents import describe_difference
from nonet.types import RowRange

FILE_BITS = 40  # up to 2^40 rows per file and 2^23 files, so that ids stay positive


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a manifest.

    Attributes:
        path: Path of the file.
        bytes: Size of the file in bytes.
        groups: Number of rows of each row group of the file.
        fingerprint: Hash of a small part of the file, such as the footer, by which a reader checks that an open file is this one.
        marks: For text, the byte offset of each group and the end of the last one; empty for other formats.
        content: Identity of the content (`nonet.contents`); "" in manifests of earlier versions, and for virtual files.
    """

    path: str
    bytes: int
    groups: tuple[int, ...]
    fingerprint: str
    marks: tuple[int, ...] = ()
    content: str = ""

    @property
    def rows(self) -> int:
        """The number of rows of the file."""
        return sum(self.groups)


@dataclass(frozen=True)
class DataManifest:
    """An immutable list of files, whose order defines the ids of their rows.

    Equal digests of files with `content` imply equal rows.
    """

    files: tuple[DataFile, ...]

    @classmethod
    def from_rows(cls, name: str, rows: int, fingerprint: str = "") -> DataManifest:
        """Create a manifest of one virtual file, for rows in memory or in an artifact that `name` identifies."""
        return cls((DataFile(name, 0, (rows,), fingerprint),))

    @classmethod
    def from_json(cls, manifest_json: Mapping[str, Any]) -> DataManifest:
        """Create a manifest from plain data as `as_json` returns it."""
        fields = (
            {**file, "groups": tuple(file["groups"]), "marks": tuple(file["marks"])}
            for file in manifest_json["files"]
        )
        return cls(tuple(DataFile(**file) for file in fields))

    def as_json(self) -> dict[str, Any]:
        """Return the manifest as plain data."""
        files = [asdict(file) for file in self.files]
        for file in files:
            if not file["content"]:
                del file["content"]  # Earlier versions read such a manifest.
        return {"digest": self.digest, "files": files}

    @property
    def has_content(self) -> bool:
        """Whether the identity of the content of a file is known."""
        return any(file.content for file in self.files)

    @cached_property
    def digest(self) -> str:
        """A hash of the size, row groups, fingerprint and content of each file, in order."""
        content = [
            [file.bytes, list(file.groups), file.fingerprint, *([file.content] if file.content else [])]
            for file in self.files
        ]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    @cached_property
    def rows(self) -> int:
        """The number of rows of all files."""
        return sum(file.rows for file in self.files)

    @cached_property
    def group_rows(self) -> np.ndarray:
        """The number of rows of each row group [G] int64."""
        return np.array([rows for file in self.files for rows in file.groups], np.int64)

    @cached_property
    def group_file(self) -> np.ndarray:
        """The index of each row group's file [G]."""
        return np.repeat(np.arange(len(self.files)), [len(file.groups) for file in self.files])

    @cached_property
    def group_first(self) -> np.ndarray:
        """The index of each row group's first row within its file [G]."""
        firsts = [np.cumsum([0, *file.groups[:-1]]) for file in self.files if file.groups]
        return np.concatenate(firsts).astype(np.int64) if firsts else np.zeros(0, np.int64)

    def get_group_in_file(self, group: int) -> int:
        """Return a row group's index within its file."""
        return group - int(np.searchsorted(self.group_file, self.group_file[group]))

    def compute_row_ids(self, group: int, rows_N: np.ndarray) -> np.ndarray:
        """Return the ids [N] int64 of rows of a row group."""
        return (int(self.group_file[group]) << FILE_BITS) + int(self.group_first[group]) + rows_N

    def get_row_range(self, group: int, start: int, stop: int, epoch: int) -> RowRange:
        """Convert rows [start, stop) of a row group to a range of rows of its file."""
        first = int(self.group_first[group])
        return RowRange(epoch, int(self.group_file[group]), first + start, first + stop)

    def describe_row(self, row_id: int) -> str:
        """Describe a row by file, row group and row."""
        file, row = row_id >> FILE_BITS, row_id & ((1 << FILE_BITS) - 1)
        ends = np.cumsum(self.files[file].groups)
        return f"{self.files[file].path}, row group {int(np.searchsorted(ends, row, 'right'))}, row {row}"

    def describe_changes(self, current: DataManifest) -> str:
        """Describe in one line how a current manifest differs from this one; "" if it does not.

        Files whose content this manifest of an earlier version does not identify are compared by their fingerprints.
        """
        if not self.has_content:
            current = DataManifest(tuple(replace(file, content="") for file in current.files))
        if current.digest == self.digest:
            return ""
        if len(current.files) != len(self.files):
            examples = _describe_missing_and_new(self.files, current.files)
            return f"{len(self.files)} files then, {len(current.files)} now{examples}"
        for number, (old_file, new_file) in enumerate(zip(self.files, current.files, strict=True)):
            for field in ("bytes", "rows", "groups", "fingerprint", "content"):
                old, new = getattr(old_file, field), getattr(new_file, field)
                if old != new:
                    return f"file {number}, {new_file.path}: {_describe_difference(field, old, new)}"
        return "the digests differ, but no property that is compared"


def _describe_difference(field: str, old: Any, new: Any) -> str:
    """Describe how a field of DataFile differs."""
    if field == "groups":
        return f"other row groups ({len(old)} then, {len(new)} now)"
    if field == "content":
        return describe_difference(old, new)
    if field == "fingerprint":
        return "other content of the same size"
    return f"{old} {field} then, {new} now"


def _describe_missing_and_new(old_files: Sequence[DataFile], new_files: Sequence[DataFile]) -> str:
    """Return the first missing file and the first new file in brackets, by content; "" if there are none."""
    old_contents = {(file.fingerprint, file.content) for file in old_files}
    new_contents = {(file.fingerprint, file.content) for file in new_files}
    missing = [file.path for file in old_files if (file.fingerprint, file.content) not in new_contents]
    new = [file.path for file in new_files if (file.fingerprint, file.content) not in old_contents]
    phrases = [f"missing {missing[0]}"] if missing else []
    phrases += [f"new {new[0]}"] if new else []
    return f" ({', '.join(phrases)})" if phrases else ""

"""Version: the manifest of one published version, which names the files of its dense weights, transition counts and rows.

The files are blobs, named by the SHA-256 of their content. A full version has all rows; a delta has those that changed
since its base. A checksum covers the whole manifest, so a truncated one is rejected. It says nothing about who wrote the
manifest, whose names become paths: all of it is checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from nonet.atomic import read_content, write_whole
from nonet.errors import CheckpointError, ConfigError
from nonet.options import describe_invalid

FORMAT = 1
FULL, DELTA = "full", "delta"
_YEAR_10000_S = 253_402_300_800  # unix seconds, of which a later one is no date
MAX_NUMBER = 10**18 - 1  # has as many digits as the name of a manifest may have
VersionNumber = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
_SOURCE_TYPES: dict[str, type | tuple[type, ...]] = {
    "run": str,
    "stage": str,
    "step": int,
    "commit": str,
    "published": (int, float),
}  # of the entries of `Version.source` that Nonet reads


def _check_name(name: str) -> str:
    """Return a name that becomes that of a file. Raises ValueError if it is no plain name."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise ValueError(f"{name!r} is not the plain name of a file")
    return name


def _check_source(source: dict[str, Any]) -> dict[str, Any]:
    """Return the origin of a version. Raises ValueError if an entry has another type than Nonet writes."""
    for name, types in _SOURCE_TYPES.items():
        value = source.get(name)
        if value is not None and (not isinstance(value, types) or isinstance(value, bool)):
            raise ValueError(f"{name} is {value!r}")
    if not 0 <= (source.get("published") or 0) < _YEAR_10000_S:
        raise ValueError(f"published is {source['published']}")
    return source


BlobName = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, AfterValidator(_check_name)]
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Version:
    """The manifest of a version.

    Attributes:
        number: Number of the version.
        base: The version that it was made from, None for the first.
        kind: "full" or "delta": whether `rows` are all rows or those that changed since `base`.
        source: Where it came from: run, stage, step, commit, and when it was published (unix seconds).
        catalogue: Version of the trie that its semantic ids belong to.
        dense: Blob of the safetensors file with the dense weights.
        counts: Blobs of the transition counts by array, and `meta`; empty without a memory.
        rows: For each table, the blobs of its `RowLayer` by array.
        written: Bytes that this version added to the registry.
        touched: For each table, the number of rows in `rows`.
        format: Number of the format.
    """

    number: VersionNumber
    base: VersionNumber | None
    kind: Literal["full", "delta"]
    source: Annotated[dict[str, Any], AfterValidator(_check_source)]
    catalogue: str
    dense: BlobName
    counts: dict[_Name, BlobName] = field(default_factory=dict)
    rows: dict[_Name, dict[_Name, BlobName]] = field(default_factory=dict)
    written: _Count = 0
    touched: dict[_Name, _Count] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def blobs(self) -> set[str]:
        """The names of all blobs of the version."""
        return {
            self.dense,
            *self.counts.values(),
            *(blob for files in self.rows.values() for blob in files.values()),
        }

    def encode(self) -> bytes:
        """Return the content of the manifest's file."""
        body = asdict(self)
        return json.dumps(body | {"sha256": _digest(body)}, indent=1).encode()

    def write(self, path: Path) -> None:
        """Write the manifest to a file atomically."""
        write_whole(path, self.encode())

    @classmethod
    def read(cls, path: Path) -> Version:
        """Read a manifest, which is named by the number of its version.

        Raises:
            CheckpointError: The manifest is missing, damaged or of another format.
        """
        try:
            content = read_content(path)
        except (OSError, ConfigError) as error:
            raise CheckpointError(
                f"{path} is not a complete version: {type(error).__name__}: {error}"
            ) from None
        return cls.parse(content, str(path), int(path.stem))

    @classmethod
    def parse(cls, content: bytes, title: str, number: int) -> Version:
        """Parse the content of a manifest's file.

        Args:
            content: The content.
            title: Name of the file, for messages.
            number: The number that the version must have.

        Raises:
            CheckpointError: The content is damaged or of another format.
        """
        try:
            body: dict[str, Any] = json.loads(content)
            digest = body.pop("sha256")
            if (written_format := body.get("format")) != FORMAT:
                raise CheckpointError(f"{title} has format {written_format}, this version reads {FORMAT}")
            if unknown := body.keys() - cls.__dataclass_fields__.keys():
                raise TypeError(f"unknown key {min(unknown)!r}")
            if digest != _digest(body):
                raise CheckpointError(f"{title} is not a complete version: its checksum does not match")
            version = _SCHEMA.validate_json(json.dumps(body), strict=True)
        except ValidationError as error:
            raise CheckpointError(f"{title} is not a complete version: {describe_invalid(error)}") from None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise CheckpointError(
                f"{title} is not a complete version: {type(error).__name__}: {error}"
            ) from None
        if version.number != number:
            raise CheckpointError(f"{title} is not a complete version: it has the number {version.number}")
        if (version.base is None and version.kind == DELTA) or (version.base or 0) >= number:
            raise CheckpointError(
                f"{title} is not a complete version: its base is {version.base}, and must be an earlier version"
            )
        return version


_SCHEMA = TypeAdapter(Version)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

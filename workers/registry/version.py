"""Version: the manifest of one published version, which names the files of its dense weights, transition counts and rows.

The files are blobs, named by the SHA-256 of their content. A full version has all rows; a delta has those that changed
since its base. A checksum covers the whole manifest, so a truncated one is rejected.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nonet.atomic import write_whole
from nonet.errors import CheckpointError

FORMAT = 1
FULL, DELTA = "full", "delta"


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

    number: int
    base: int | None
    kind: str
    source: dict[str, Any]
    catalogue: str
    dense: str
    counts: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    written: int = 0
    touched: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def blobs(self) -> set[str]:
        """The names of all blobs of the version."""
        return {
            self.dense,
            *self.counts.values(),
            *(blob for files in self.rows.values() for blob in files.values()),
        }

    def write(self, path: Path) -> None:
        """Write the manifest to a file atomically."""
        body = asdict(self)
        write_whole(path, json.dumps(body | {"sha256": _digest(body)}, indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Version:
        """Read a manifest.

        Raises:
            CheckpointError: The manifest is missing, damaged or of another format.
        """
        try:
            body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            digest = body.pop("sha256")
            version = cls(**body)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path} is not a complete version: {type(error).__name__}: {error}"
            ) from None
        if digest != _digest(body):
            raise CheckpointError(f"{path} is not a complete version: its checksum does not match")
        if version.format != FORMAT:
            raise CheckpointError(f"{path} has format {version.format}, this version reads {FORMAT}")
        return version


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

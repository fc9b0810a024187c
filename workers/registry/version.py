"""Version: what was published at once: dense weights, counts of the memory, rows; each by checksum.

A full version has all rows; a delta has those that changed since its base. Its own checksum covers all of it, so half a
manifest is none.
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
    """number, and the one it was made from (None for the first).

    kind     full or delta: whether `rows` are all rows or what changed since `base`
    source   where it came from: run, stage, step, commit, and when it was published (unix seconds)
    catalogue  version of the trie that its semantic ids are of
    dense    blob of the safetensors file
    counts   blobs of the memory's counts by array, and `meta`; empty without a memory
    rows     table -> blobs of its layer by array
    written  bytes that this version added to the registry
    touched  rows that it has, by table
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
        """The files that it names."""
        return {
            self.dense,
            *self.counts.values(),
            *(blob for files in self.rows.values() for blob in files.values()),
        }

    def write(self, path: Path) -> None:
        """As a manifest."""
        body = asdict(self)
        write_whole(path, json.dumps(body | {"sha256": _digest(body)}, indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Version:
        """Raises CheckpointError for a manifest that is missing, torn or of another format."""
        try:
            body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            digest = body.pop("sha256")
            version = cls(**body)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path} is no whole version: {type(error).__name__}: {error}") from None
        if digest != _digest(body):
            raise CheckpointError(f"{path} is no whole version: it does not hash to what it says")
        if version.format != FORMAT:
            raise CheckpointError(f"{path} has format {version.format}, this version reads {FORMAT}")
        return version


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

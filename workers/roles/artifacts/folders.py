"""Folders of artifacts, each named after the hash of its files, so that a resumed run finds a complete one or none."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.samples.sequences import (
    Sequences,
)

PREPARING = "preparing.json"
"""The file in the folder of the artifacts with the progress of the tokenise stage."""
_DRAFT = re.compile(r"tmp-[a-z]+-[0-9a-f]{8}")


def write_sequences(folder: Path, seq: Sequences, items: pa.Table) -> None:
    """Write the sequences and their items to a folder."""
    seq.save(folder)
    pq.write_table(items, folder / "items.parquet")


def write_sids(folder: Path, sids: np.ndarray) -> None:
    """Write the semantic ids [I, L] of all items, in their order."""
    levels = {f"l{level}": pa.array(sids[:, level].astype(np.int32)) for level in range(sids.shape[1])}
    pq.write_table(
        pa.table({"item": pa.array(np.arange(len(sids), dtype=np.int64)), **levels}), folder / "sids.parquet"
    )


def store_artifact(root: Path, kind: str, write: Callable[[Path], Any]) -> dict[str, Any]:
    """Write an artifact to a temporary folder and rename it to <kind>-<first 8 digits of its SHA-256>.

    Equal contents share a folder: if one with that name exists, it is complete, and the temporary folder is removed. Only one
    process may write artifacts of a kind at a time; temporary folders that killed ones have left are deleted.

    Args:
        root: Folder of the artifacts.
        kind: Kind of the artifact.
        write: Writes the files into a folder.

    Returns:
        Kind, path and SHA-256 of the artifact, and the names of its files.
    """
    with make_draft(root, kind) as draft:
        write(draft)
        hash_by_file = {
            str(path.relative_to(draft)): hash_file(path)
            for path in sorted(draft.rglob("*"))
            if path.is_file()
        }
        digest = hashlib.sha256(json.dumps(hash_by_file, sort_keys=True).encode()).hexdigest()
        final = root / f"{kind}-{digest[:8]}"
        if not final.exists():
            os.replace(draft, final)
    return {"kind": kind, "path": str(final), "sha256": digest, "files": list(hash_by_file)}


@contextmanager
def make_draft(root: Path, kind: str) -> Iterator[Path]:
    """Yield a new temporary folder below root, which is deleted in the end, as those that killed processes have left."""
    delete_drafts(root, kind)
    draft = root / f"tmp-{kind}-{uuid.uuid4().hex[:8]}"
    draft.mkdir(parents=True)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def delete_drafts(root: Path, kind: str) -> None:
    """Delete the temporary folders of artifacts of a kind, or of all kinds for "*"."""
    for draft in root.glob(f"tmp-{kind}-*") if not root.is_symlink() else ():
        if _DRAFT.fullmatch(draft.name):
            shutil.rmtree(draft)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()

"""Checkpoints: one commit for everything, whole or not there.

A commit is written aside in `tmp-<step>-<nonce>/`, its files fsynced and hashed, then renamed to `step-000123/`, and its
`manifest.json` is put in last by `os.replace`. A folder without a manifest, or whose files do not match it, is no commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nonet.errors import CheckpointError

FORMAT = 1
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a commit holds.

    step        global; stage and stage_step where in the pipeline; last: whether it ends its stage
    scenario, artifacts   hashes of what it was trained from
    participants   role -> number of ranks that wrote
    journal     records of the journal that it includes
    files       relative path -> sha256
    """

    run_id: str
    step: int
    stage: str
    stage_step: int
    last: bool
    version: int
    scenario: str
    artifacts: dict[str, str]
    participants: dict[str, int]
    journal: int
    files: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


class Checkpoints:
    """The commits of a run."""

    def __init__(self, root: Path):
        self.root = root

    def aside(self, step: int) -> Path:
        """A fresh folder for the participants to write in."""
        path = self.root / f"tmp-{step}-{secrets.token_hex(4)}"
        path.mkdir(parents=True)
        return path

    def commit(self, aside: Path, manifest: Manifest) -> Path:
        """Hash, fsync, rename, and make it count by its manifest; a commit of the same step is replaced."""
        files = {
            str(path.relative_to(aside)): _sync(path) for path in sorted(aside.rglob("*")) if path.is_file()
        }
        final = self.root / f"step-{manifest.step:06d}"
        if final.exists():
            shutil.rmtree(final)
        os.replace(aside, final)
        text = json.dumps(asdict(manifest) | {"files": files}, indent=1)
        partial = final / ".manifest.json"
        partial.write_text(text, encoding="utf-8")
        _sync(partial)
        os.replace(partial, final / "manifest.json")
        _sync_folder(final)
        _sync_folder(self.root)
        return final

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest whole commit; torn ones are passed over."""
        for path in sorted(self._folders(), reverse=True):
            manifest = self._whole(path)
            if manifest is not None:
                return path, manifest
        return None

    def prune(self, last: int) -> None:
        """Drop leftovers and all but the `last` newest commits; a commit that ends a stage stays."""
        for path in self.root.glob("tmp-*"):
            shutil.rmtree(path, ignore_errors=True)
        whole = [
            (path, read_manifest(path))
            for path in sorted(self._folders())
            if (path / "manifest.json").exists()
        ]
        passing = [path for path, manifest in whole if not manifest.last]
        for path in passing[:-last]:
            shutil.rmtree(path, ignore_errors=True)

    def drop_after(self, step: int) -> None:
        """Remove what lies after a step: torn commits, or a history that a resume does not continue."""
        for path in self._folders():
            if int(_STEP.fullmatch(path.name).group(1)) > step:  # type: ignore[union-attr]
                shutil.rmtree(path, ignore_errors=True)

    def end_of(self, stage: str) -> Path:
        """The commit that ends a stage. Raises CheckpointError."""
        for path in sorted(self._folders(), reverse=True):
            manifest = self._whole(path)
            if manifest is not None and manifest.stage == stage and manifest.last:
                return path
        raise CheckpointError(
            f"{self.root} has no commit that ends the stage {stage!r}; the run did not get that far"
        )

    def _folders(self) -> list[Path]:
        return (
            [path for path in self.root.glob("step-*") if _STEP.fullmatch(path.name)]
            if self.root.exists()
            else []
        )

    def _whole(self, path: Path) -> Manifest | None:
        try:
            manifest = read_manifest(path)
            right = all(_digest(path / name) == digest for name, digest in manifest.files.items())
        except (OSError, CheckpointError):
            return None
        return manifest if right else None


def read_manifest(path: Path) -> Manifest:
    """The manifest of a commit's folder. Raises CheckpointError when it is missing or of another format."""
    try:
        body: dict[str, Any] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        manifest = Manifest(**body)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is no whole commit: {type(error).__name__}: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {manifest.format}, this version reads {FORMAT}")
    return manifest


def _digest(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _sync(path: Path) -> str:
    with path.open("rb") as source:
        os.fsync(source.fileno())
    return _digest(path)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

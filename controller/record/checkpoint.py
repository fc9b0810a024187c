"""Checkpoints: one commit for everything, whole or not there.

A commit is written aside in `tmp-<step>-<nonce>/`. Its participants sync and hash the files that they write, and say which.
Then its folders are synced, it is renamed to `step-000123/`, and its `manifest.json` is put in last by `os.replace`. A folder
without a manifest, or whose files do not match it, is no commit. A commit of a step that has one already puts it aside as
`step-000123.old-<nonce>`, where it counts until the new one is whole: killed at any point, a run has one of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, sync, write_whole
from nonet.background import Written
from nonet.errors import CheckpointError, ConfigError

FORMAT = 1
_SETTLED_S = 2.0  # a file this young may change and keep its times: clocks of filesystems tick coarsely
_STEP = re.compile(r"step-(\d{6,})(\.old-[0-9a-f]{8})?")


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
        make_folder(path)
        return path

    def commit(self, aside: Path, manifest: Manifest, written: Written) -> Path:
        """Rename, and make it count by its manifest; a commit of the same step is replaced, and never missing.

        `written`: what the participants wrote and synced. Raises CheckpointError where the folder holds anything else.
        """
        _check_written(aside, written)
        files = {name: sha256 for name, (sha256, _) in sorted(written.items())}
        _sync_folders(aside)
        final = self.root / f"step-{manifest.step:06d}"
        if final.exists():
            os.replace(final, final.with_name(f"{final.name}.old-{secrets.token_hex(4)}"))
            sync(self.root)  # the new one must not take the name before the old one has another
        os.replace(aside, final)
        write_whole(
            final / "manifest.json", json.dumps(asdict(manifest) | {"files": files}, indent=1).encode()
        )
        sync(self.root)
        for old in self.root.glob(f"{final.name}.old-*"):
            shutil.rmtree(old, ignore_errors=True)
        return final

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest whole commit; torn ones are passed over."""
        for path in reversed(self._folders()):
            manifest = self._whole(path)
            if manifest is not None:
                return path, manifest
        return None

    def newest_selected(self) -> tuple[Path, Manifest] | None:
        """Return the newest whole checkpoint that a stage ended with, None where no stage has ended."""
        for path in reversed(self._folders()):
            try:
                ends = read_manifest(path).last
            except CheckpointError:
                continue
            if ends and (manifest := self._whole(path)) is not None:
                return path, manifest
        return None

    def of(self, step: int) -> tuple[Path, Manifest]:
        """The whole commit after a step. Raises ConfigError where there is none, and names those that there are."""
        for path in self._folders():
            if _step(path) == step and (manifest := self._whole(path)) is not None:
                return path, manifest
        there = ", ".join(str(_step(path)) for path in self._folders()) or "none"
        raise ConfigError(f"there is no whole commit after step {step}; there are: {there}")

    def mark_last(self, step: int) -> tuple[Path, Manifest]:
        """Make the commit of a step the one that ends its stage. Raises CheckpointError where there is no such commit."""
        path = self.root / f"step-{step:06d}"
        manifest = replace(read_manifest(path), last=True)
        write_whole(path / "manifest.json", json.dumps(asdict(manifest), indent=1).encode())
        return path, manifest

    def prune(self, last: int, spared: Collection[int] = ()) -> None:
        """Drop leftovers and all but the `last` newest commits; a commit that ends a stage stays, and those of steps `spared`.

        One that was put aside is a leftover where its step has a commit in place.
        """
        there = {_step(path): path for path in self._folders() if (path / "manifest.json").exists()}
        put_aside = set(self.root.glob("step-*.old-*")) - set(there.values())
        for path in (*self.root.glob("tmp-*"), *put_aside):
            shutil.rmtree(path, ignore_errors=True)
        whole = [(path, read_manifest(path)) for _, path in sorted(there.items())]
        passing = [path for path, manifest in whole if not manifest.last]
        for path in passing[:-last]:
            if _step(path) in spared:
                continue
            shutil.rmtree(path, ignore_errors=True)

    def drop_after(self, step: int) -> None:
        """Remove what lies after a step: torn and half-written commits, or a history that a resume does not continue."""
        later = [path for path in self._folders() if _step(path) > step]
        for path in (*later, *self.root.glob("tmp-*")):
            shutil.rmtree(path, ignore_errors=True)

    def end_of(self, stage: str) -> Path:
        """The commit that ends a stage. Raises CheckpointError."""
        for path in reversed(self._folders()):
            manifest = self._whole(path)
            if manifest is not None and manifest.stage == stage and manifest.last:
                return path
        raise CheckpointError(
            f"{self.root} has no commit that ends the stage {stage!r}; the run did not get that far"
        )

    def _folders(self) -> list[Path]:
        """By step; of one step, what was put aside comes before what is in its place."""
        folders = [path for path in self.root.glob("step-*") if _STEP.fullmatch(path.name)]
        return sorted(folders, key=lambda path: (_step(path), "." not in path.name))

    def _whole(self, path: Path) -> Manifest | None:
        try:
            manifest = read_manifest(path)
            right = all(_digest_of(path / name) == digest for name, digest in manifest.files.items())
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


def _digest_of(path: Path) -> str:
    """sha256 of a file. A process reads a file once while its inode, size and times stay: a resume asks several times."""
    stat = path.stat()
    if time.time() - max(stat.st_mtime, stat.st_ctime) < _SETTLED_S:
        return _digest(path)
    return _remembered(path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=4096)
def _remembered(path: Path, *_signature: int) -> str:
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").split(".")[0])


def _check_written(folder: Path, written: Written) -> None:
    """Raise CheckpointError where a folder does not hold exactly the files that were written into it, in their sizes."""
    there = {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    said = {name: size for name, (_, size) in written.items()}
    for name in sorted(there.keys() | said.keys()):
        if there.get(name) != said.get(name):
            raise CheckpointError(
                f"{folder / name}: {_bytes(there.get(name))}, but its writer says {_bytes(said.get(name))}; "
                "does every node see the same run folder, and does nothing else write there?"
            )


def _bytes(size: int | None) -> str:
    return "no such file" if size is None else f"{size} bytes"


def _sync_folders(top: Path) -> None:
    """The names of all files below, and of their folders."""
    for folder in (*(path for path in top.rglob("*") if path.is_dir()), top):
        sync(folder)

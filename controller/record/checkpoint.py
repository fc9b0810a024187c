"""Checkpoints of a run, each of which is written completely or not at all.

A checkpoint is written to a staging directory `tmp-<step>-<nonce>/`. The participants sync and hash the files
that they write, and report the hashes. Then the directories are synced, the staging directory is renamed to
`step-000123/`, and `manifest.json` is put in last by `os.replace`. A directory without a manifest, or whose files do not
match it, is not a checkpoint. If the step already has a checkpoint, that one is first renamed to
`step-000123.old-<nonce>` and stays valid until the new one is complete. A run that is killed at any point has one of the
two.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from nonet.atomic import make_folder, open_file, read_json, sync, write_whole
from nonet.background import Written
from nonet.errors import CheckpointError, ConfigError
from nonet.storage import fetch, find_copy, find_digest, remove

FORMAT = 2  # The format of manifests. Checkpoints of format 1 have no slices of tensors.
_OLDEST_FORMAT = 1
# Filesystem clocks are coarse: a file that was modified less than this ago can change again without a change of its times.
_SETTLED_S = 2.0
_FOLDER_NAME = re.compile(r"step-(\d{6,})(\.old-[0-9a-f]{8})?")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint: where it stands in the run, and the hashes of its files.

    Attributes:
        run_id: The id of the run.
        step: The global step: the number of steps applied in all stages, and before a warm start.
        stage: The name of the stage that the step belongs to.
        stage_step: The number of steps of the stage that have been applied.
        last: Whether the checkpoint ends its stage.
        version: The number of the newest published version of the weights.
        scenario: The sha256 of the scenario's file.
        artifacts: The sha256 of each artifact that the model was trained from, by kind.
        participants: The number of ranks that wrote files, by role.
        journal: The number of journal records before the checkpoint; a resume keeps only these.
        files: The sha256 of each file, by relative path.
        format: The format of the manifest, `FORMAT`.
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
    """The directory that holds a run's checkpoints.

    Args:
        root: The path of the directory.
        fetches: Whether the files of a checkpoint that is found are fetched to this node, if the run is in object storage.

    Attributes:
        root: The path of the directory.
    """

    def __init__(self, root: Path, *, fetches: bool = True):
        self.root, self._fetches = root, fetches

    def make_path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step, which may not exist."""
        return self.root / f"step-{step:06d}"

    def create_staging_dir(self, step: int) -> Path:
        """Create an empty staging directory for the checkpoint of a step."""
        path = self.root / f"tmp-{step}-{secrets.token_hex(4)}"
        make_folder(path)
        return path

    def complete(self, staging_dir: Path, manifest: Manifest, written: Written) -> Path:
        """Rename a staging directory to its final name and write its manifest.

        A checkpoint of the same step is replaced. The step has a complete checkpoint at all times.

        Args:
            staging_dir: The staging directory.
            manifest: The manifest without `files`, which are taken from `written`.
            written: The files that the participants wrote and synced, with hashes and sizes.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: The files in the directory are not those that the participants reported.
        """
        _check_written(staging_dir, written)
        files = {name: sha256 for name, (sha256, _) in sorted(written.items())}
        _sync_folders(staging_dir)
        final = self.make_path(manifest.step)
        if final.exists():
            os.replace(final, final.with_name(f"{final.name}.old-{secrets.token_hex(4)}"))
            # The old directory must have its new name on disk before the new directory gets this name.
            sync(self.root)
        os.replace(staging_dir, final)
        write_whole(
            final / "manifest.json", json.dumps(asdict(manifest) | {"files": files}, indent=1).encode()
        )
        sync(self.root)
        for old in self.root.glob(f"{final.name}.old-*"):
            remove(old, "replaced")
        return final

    def find_newest(self) -> tuple[Path, Manifest] | None:
        """Return the directory and the manifest of the newest complete checkpoint, or None if there is none."""
        for path in reversed(self._list_folders()):
            manifest = self._read_if_complete(path)
            if manifest is not None:
                return path, manifest
        return None

    def find_newest_unchecked(self) -> Path | None:
        """Return the directory of the newest checkpoint without reading its files, for polls; None if there is none."""
        complete = (path for path in reversed(self._list_folders()) if (path / "manifest.json").exists())
        return next(complete, None)

    def find_newest_stage_end(self) -> tuple[Path, Manifest] | None:
        """Return the directory and the manifest of the newest complete checkpoint that ends a stage; None without one."""
        for path in reversed(self._list_folders()):
            try:
                ends_stage = read_manifest(path).last
            except CheckpointError:
                continue
            if ends_stage and (manifest := self._read_if_complete(path)) is not None:
                return path, manifest
        return None

    def find_at_step(self, step: int) -> tuple[Path, Manifest]:
        """Return the directory and the manifest of the complete checkpoint of a global step.

        Raises:
            ConfigError: The step has no complete checkpoint; the message lists the steps that have one.
        """
        folders = self._list_folders()
        for path in reversed(folders):
            if _parse_step(path) == step and (manifest := self._read_if_complete(path)) is not None:
                return path, manifest
        # A dict keeps the order and drops the second of two directories of one step.
        complete_steps = {
            _parse_step(path): None for path in folders if self._read_if_complete(path) is not None
        }
        steps_text = ", ".join(map(str, complete_steps)) or "none"
        raise ConfigError(f"there is no complete checkpoint after step {step}; there are: {steps_text}")

    def mark_stage_end(self, step: int) -> tuple[Path, Manifest]:
        """Mark the checkpoint of a global step as the one that ends its stage, and return its directory and new manifest.

        Raises:
            CheckpointError: The step has no valid manifest.
        """
        path = self.make_path(step)
        manifest = replace(read_manifest(path), last=True)
        write_whole(path / "manifest.json", json.dumps(asdict(manifest), indent=1).encode())
        return path, manifest

    def prune(self, keep_last: int, kept_steps: Collection[int] = ()) -> None:
        """Delete staging directories and old checkpoints.

        Checkpoints that end a stage are kept. A checkpoint that was renamed to `step-*.old-*` is deleted if its step has a
        new checkpoint.

        Args:
            keep_last: The number of newest checkpoints to keep in addition, at least 1.
            kept_steps: The global steps whose checkpoints are kept in any case.
        """
        # A directory that replaces a renamed one comes after it in the list, and so wins here.
        complete_paths = {
            _parse_step(path): path for path in self._list_folders() if (path / "manifest.json").exists()
        }
        replaced_paths = set(self.root.glob("step-*.old-*")) - set(complete_paths.values())
        for path in (*self.root.glob("tmp-*"), *replaced_paths):
            remove(path, "unfinished or replaced")
        manifests = [(path, read_manifest(path)) for _, path in sorted(complete_paths.items())]
        other_paths = [path for path, manifest in manifests if not manifest.last]
        for path in other_paths[:-keep_last]:
            if _parse_step(path) in kept_steps:
                continue
            remove(path, "pruned")

    def delete_after(self, step: int) -> None:
        """Delete all checkpoints after a global step, and all staging directories."""
        later = [path for path in self._list_folders() if _parse_step(path) > step]
        for path in (*later, *self.root.glob("tmp-*")):
            remove(path, f"after step {step}, to which the run was cut")

    def find_stage_end(self, stage: str) -> Path:
        """Return the directory of the checkpoint that ends a stage.

        Raises:
            CheckpointError: No complete checkpoint ends this stage.
        """
        for path in reversed(self._list_folders()):
            manifest = self._read_if_complete(path)
            if manifest is not None and manifest.stage == stage and manifest.last:
                return path
        raise CheckpointError(
            f"{self.root} has no checkpoint that ends the stage {stage!r}; the run did not get that far"
        )

    def _list_folders(self) -> list[Path]:
        """List the checkpoint directories by step; a renamed directory comes before the directory that replaces it."""
        folders = [path for path in self.root.glob("step-*") if _FOLDER_NAME.fullmatch(path.name)]
        return sorted(folders, key=lambda path: (_parse_step(path), "." not in path.name))

    def _read_if_complete(self, path: Path) -> Manifest | None:
        """Return the manifest of a directory, or None if the directory is not a complete checkpoint."""
        try:
            manifest = read_manifest(path)
            if self._fetches:
                fetch(path)
            is_intact = all(_find_digest(path / name) == digest for name, digest in manifest.files.items())
        except (OSError, CheckpointError):
            return None
        return manifest if is_intact else None


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint directory.

    Raises:
        CheckpointError: The manifest is missing, damaged or of another format.
    """
    try:
        manifest = Manifest(**read_json(path / "manifest.json"))
    except (OSError, ConfigError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {type(error).__name__}: {error}"
        ) from None
    if not _OLDEST_FORMAT <= manifest.format <= FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {manifest.format}; this version reads {_OLDEST_FORMAT} to {FORMAT}"
        )
    return manifest


def _find_digest(path: Path) -> str:
    """Return the sha256 of a file, also of a stored file that this node has not fetched.

    A resume needs the hash several times, so it is cached while the inode, size and times of the file stay the same.
    """
    if (stored_digest := find_digest(path)) is not None:
        return stored_digest
    stat = path.stat()
    if time.time() - max(stat.st_mtime, stat.st_ctime) < _SETTLED_S:
        return _compute_digest(path)
    return _get_cached_digest(path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=4096)
def _get_cached_digest(path: Path, *_file_state: int) -> str:
    """Return the sha256 of a file, computed once for each state (inode, size and times) of the file."""
    return _compute_digest(path)


def _compute_digest(path: Path) -> str:
    with open_file(path) as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _parse_step(path: Path) -> int:
    """Return the global step in the name of a checkpoint directory."""
    return int(path.name.removeprefix("step-").split(".")[0])


def _check_written(folder: Path, written: Written) -> None:
    """Raise CheckpointError if a directory does not hold exactly the reported files with the reported sizes.

    In a stored run, workers on other nodes have uploaded their files, so that only those of this node are in the directory.
    """
    actual_sizes = {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    reported_sizes = {name: size for name, (_, size) in written.items()}
    if find_copy(folder) is not None:
        reported_sizes = {name: size for name, size in reported_sizes.items() if name in actual_sizes}
    for name in sorted(actual_sizes.keys() | reported_sizes.keys()):
        if actual_sizes.get(name) != reported_sizes.get(name):
            raise CheckpointError(
                f"{folder / name}: {_format_size(actual_sizes.get(name))}, but its writer says "
                f"{_format_size(reported_sizes.get(name))}; "
                "does every node see the same run folder, and does nothing else write there?"
            )


def _format_size(size: int | None) -> str:
    return "no such file" if size is None else f"{size} bytes"


def _sync_folders(top: Path) -> None:
    """Sync a directory and all directories below it, so that the names of their files are on disk."""
    for folder in (*(path for path in top.rglob("*") if path.is_dir()), top):
        sync(folder)

"""What tests do with a stored run."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from nonet.storage import RunCopy, RunView, RunWriter

CopyMaker = Callable[..., RunCopy]


ViewMaker = Callable[..., RunView]


def write(copy: RunCopy, name: str, content: str) -> Path:
    file = copy.path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def save_checkpoint(copy: RunCopy, writer: RunWriter, step: int, content: str) -> Path:
    """Write a checkpoint as ranks and controller do."""
    draft = copy.path / f"checkpoints/tmp-{step}-abcd"
    (draft / "dense").mkdir(parents=True)
    (draft / "dense/model.bin").write_text(content)
    written = {"dense/model.bin": (hashlib.sha256(content.encode()).hexdigest(), len(content))}
    copy.upload_written(draft, written)
    folder = copy.path / f"checkpoints/step-{step:06d}"
    with writer.hold():
        writer.add_written(draft, folder, written)
        draft.rename(folder)
        (folder / "manifest.json").write_text(f"manifest of {step}")
    writer.commit()
    return folder


def remove(writer: RunWriter, path: Path) -> None:
    """Delete a file or folder of the run, as `storage.remove` does."""
    with writer.hold():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        writer.add_deleted(path, "of no use")


def list_objects(copy: RunCopy) -> set[str]:
    return set(copy.storage.list_objects("objects"))

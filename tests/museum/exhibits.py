"""Open the museum: folders that an earlier version of Nonet left behind, as its users have them on disk."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

from nonet.trust import approve_code

MUSEUM = Path(__file__).parent
PLACEHOLDER = b"@MUSEUM@"
OLDEST = "fe1e6d5"
NAMES = ("shop", "stopped", "clicks", "hugging_face", "mine", "exports", "store")
NEWER = "b37ab36"
NEWER_NAMES = ("labels", "keras", "scaled", "served", "stored", "stored_stopped")


def open_exhibit(name: str, folder: Path, version: str = OLDEST) -> Path:
    """Unpack an exhibit below a folder and give its files the paths that they have there.

    Checkpoints name the SHA-256 of their run's scenario, in which paths are absolute, so that name follows the new text.
    An exhibit of a bucket is the subfolder `bucket_NAME`, with a file for each object.

    Returns:
        `folder`, in which a run exhibit is the subfolder of its own name.
    """
    with tarfile.open(MUSEUM / version / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in folder.rglob("*"):
        if path.is_file() and PLACEHOLDER in (body := path.read_bytes()):
            path.write_bytes(body.replace(PLACEHOLDER, str(folder).encode()))
    for scenario in folder.glob("*/scenario.yaml"):
        sha256 = hashlib.sha256(scenario.read_bytes()).hexdigest()
        for manifest in scenario.parent.glob("checkpoints/*/manifest.json"):
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "scenario": sha256}))
        approve_code(scenario.parent)
    for description in folder.rglob("export.json"):
        approve_code(description.parent)
    return folder

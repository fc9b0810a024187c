"""A commit's participant: what it writes into a folder is on disk and hashed when it answers."""

from __future__ import annotations

from pathlib import Path

from nonet.background import Written, seal_files


def written(folder: Path) -> Written:
    """Describe the files in a folder, as one participant that wrote all of them would."""
    return seal_files(folder, sorted(path for path in folder.rglob("*") if path.is_file()))

"""States of sources in a checkpoint: one file per rank, `samples/RANK-of-WORLD.json`, for state beyond the step number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, write_whole
from nonet.errors import CheckpointError


def write_state(state: str, rank: int, world: int, folder: Path) -> list[Path]:
    """Write a rank's state (JSON) to a checkpoint folder and return the written paths."""
    place = _get_state_path(folder, rank, world)
    make_folder(place.parent)
    write_whole(place, state.encode())
    return [place]


def has_states(folder: str) -> bool:
    """Return whether a checkpoint contains states of sources."""
    return any((Path(folder) / "samples").glob("*-of-*.json"))


def read_state(folder: str, rank: int, world: int) -> dict[str, Any]:
    """Read a rank's state. Raises CheckpointError if other ranks wrote the checkpoint."""
    place = _get_state_path(Path(folder), rank, world)
    if not place.is_file():
        there = ", ".join(sorted(path.stem for path in place.parent.iterdir()))
        raise CheckpointError(
            f"{folder} was written by other trainers than {place.stem}: their samples are those of {there}; "
            "resume with as many, or start a stage afresh"
        )
    return json.loads(place.read_text())


def _get_state_path(folder: Path, rank: int, world: int) -> Path:
    return folder / "samples" / f"{rank}-of-{world}.json"

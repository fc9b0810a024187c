"""States of sources in a commit: a file a rank, `samples/RANK-of-WORLD.json`, for what a step's number does not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, write_whole
from nonet.errors import CheckpointError


def write_state(state: str, rank: int, world: int, folder: Path) -> list[Path]:
    """Add a rank's state, as JSON, to a commit; what was written."""
    place = _place(folder, rank, world)
    make_folder(place.parent)
    write_whole(place, state.encode())
    return [place]


def has_states(folder: str) -> bool:
    """Whether the sources of a commit had any state."""
    return any((Path(folder) / "samples").glob("*-of-*.json"))


def read_state(folder: str, rank: int, world: int) -> dict[str, Any]:
    """A rank's state. Raises CheckpointError where other ranks wrote the commit."""
    place = _place(Path(folder), rank, world)
    if not place.is_file():
        there = ", ".join(sorted(path.stem for path in place.parent.iterdir()))
        raise CheckpointError(
            f"{folder} was written by other trainers than {place.stem}: their samples are those of {there}; "
            "resume with as many, or start a stage afresh"
        )
    return json.loads(place.read_text())


def _place(folder: Path, rank: int, world: int) -> Path:
    return folder / "samples" / f"{rank}-of-{world}.json"

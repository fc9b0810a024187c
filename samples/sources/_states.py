"""The states of sources in a checkpoint: one file per rank, `samples/RANK-of-WORLD.json`, for state beyond the step number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, write_whole
from nonet.errors import CheckpointError


def write_state(state: str, rank: int, world: int, folder: Path) -> list[Path]:
    """Write a rank's state (JSON) to a checkpoint folder and return the written paths."""
    path = _get_state_path(folder, rank, world)
    make_folder(path.parent)
    write_whole(path, state.encode())
    return [path]


def has_states(folder: str) -> bool:
    """Return whether a checkpoint folder contains states of sources."""
    return any((Path(folder) / "samples").glob("*-of-*.json"))


def read_state(folder: str, rank: int, world: int) -> dict[str, Any]:
    """Read a rank's state from a checkpoint folder. Raises CheckpointError if another number of ranks wrote it."""
    state_path = _get_state_path(Path(folder), rank, world)
    if not state_path.is_file():
        written_names = ", ".join(sorted(path.stem for path in state_path.parent.iterdir()))
        raise CheckpointError(
            f"{folder} was written by other trainers than {state_path.stem}: their samples are those of {written_names}; "
            "resume with as many, or start a stage afresh"
        )
    return json.loads(state_path.read_text())


def _get_state_path(folder: Path, rank: int, world: int) -> Path:
    return folder / "samples" / f"{rank}-of-{world}.json"

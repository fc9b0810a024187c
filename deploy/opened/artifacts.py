"""Requirements for serving a run, checked without importing torch."""

from __future__ import annotations

from nonet.controller.record import Checkpoints, RunFolder
from nonet.errors import ConfigError


def find_artifacts(folder: RunFolder) -> dict[str, str]:
    """Return the folders of a run's artifacts by kind. Raises ConfigError if it has none yet."""
    facts = folder.read_facts()
    if facts is None:
        raise ConfigError(f"{folder.id} has not tokenised its data yet: there is nothing to serve")
    return folder.fetch_artifacts(facts["artifacts"])


def check_selected(folder: RunFolder) -> None:
    """Check that a stage of a run has ended and therefore selected a checkpoint.

    Args:
        folder: The run's folder.

    Raises:
        ConfigError: No stage has ended; the message says how to serve the newest checkpoint.
    """
    checkpoints = Checkpoints(folder.checkpoints)
    if checkpoints.find_newest_stage_end() is not None:
        return
    newest = checkpoints.find_newest()
    if newest is None:
        raise ConfigError(f"{folder.id} has no checkpoint yet: there is no model to serve")
    _, manifest = newest
    step, stage = manifest.step, manifest.stage
    raise ConfigError(
        f"{folder.id}: no stage has ended yet, and its newest checkpoint, of step {step}, is from the middle of "
        f"{stage}; to serve it nevertheless: nonet publish --step {step} {folder.id}, then nonet promote"
    )

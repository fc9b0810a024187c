"""What a run must have before it can be served, told without loading torch."""

from __future__ import annotations

from nonet.controller.record import Checkpoints, RunFolder
from nonet.controller.scenario import Scenario, joined_features
from nonet.errors import ConfigError


def artifacts_of(folder: RunFolder) -> dict[str, str]:
    """The artifacts of a run by kind. Raises ConfigError where there is nothing in it to recommend from."""
    facts = folder.read_facts()
    if facts is None:
        raise ConfigError(f"{folder.id} has not tokenised its data yet: there is nothing to serve")
    if "sids" not in facts["artifacts"]:
        raise ConfigError(f"{folder.id} predicts clicks: it scores events and has nothing to recommend from")
    return {kind: each["path"] for kind, each in facts["artifacts"].items()}


def check_features(scenario: Scenario, run: str, verb: str) -> None:
    """Check that a model's features are there where `verb` asks it.

    Raises:
        ConfigError: The model reads columns that are joined from a store.
    """
    if joined := joined_features(scenario):
        names = ", ".join(joined)
        raise ConfigError(
            f"{verb}: the model of {run} reads {names} from data.join, which is not read there yet; "
            f"train a run without sparse.tables for {names}, or ask this one by: nonet recommend --user"
        )


def check_selected(folder: RunFolder) -> None:
    """Check that a stage of a run has ended, so that it has selected a checkpoint.

    Raises:
        ConfigError: No stage has; the message says how its newest checkpoint is served all the same.
    """
    checkpoints = Checkpoints(folder.checkpoints)
    if checkpoints.newest_selected() is not None:
        return
    newest = checkpoints.newest()
    if newest is None:
        raise ConfigError(f"{folder.id} has no commit yet: there is no model to serve")
    step, stage = newest[1].step, newest[1].stage
    raise ConfigError(
        f"{folder.id}: no stage has ended yet, and its newest checkpoint, of step {step}, is from the middle of "
        f"{stage}; to serve it all the same: nonet publish --step {step} {folder.id}, then nonet promote"
    )

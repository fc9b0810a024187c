"""RunningSession: the attributes of a session that the other modules of this package use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nonet.controller.groups import RewardHandles, RolloutHandle, RunGroups, TrainerHandle
from nonet.controller.record import CheckpointLog, Manifest, RunFolder
from nonet.controller.scenario import Scenario
from nonet.controller.session.objectives import RewardObjectives
from nonet.controller.session.stage_validation import StageValidation
from nonet.deadlines import Deadlines
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import WorkerGroup


class RunningSession(Protocol):
    """A session that has been entered, so that its groups exist; `Session` documents the attributes and implements them."""

    run: RunFolder
    scenario: Scenario
    stages: dict[str, StageSetup]
    step: int
    version: int
    restored: Manifest | None
    checkpoint_log: CheckpointLog
    deadlines: Deadlines
    groups: RunGroups
    facts: dict[str, Any]
    validation: StageValidation | None
    objectives: RewardObjectives | None
    add_note: Callable[[str], None]

    @property
    def stage(self) -> StageSetup:
        """The current stage."""
        ...

    @property
    def trainer(self) -> TrainerHandle:
        """The trainers."""
        ...

    @property
    def reward(self) -> RewardHandles:
        """The rewards of the current stage."""
        ...

    @property
    def rollout(self) -> RolloutHandle:
        """The rollouts."""
        ...

    @property
    def evaluator(self) -> WorkerGroup:
        """The evaluator."""
        ...

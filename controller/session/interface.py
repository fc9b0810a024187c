"""RunningSession: the attributes of a session that the other modules of this package use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from nonet.controller.groups import GroupChange, RewardHandles, RunGroups
from nonet.controller.plan import Plan
from nonet.controller.record import CheckpointLog, ChromeTrace, Manifest, RunFolder
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
    step: int | None
    applied_steps: int
    restored: Manifest | None
    checkpoint_log: CheckpointLog
    deadlines: Deadlines
    plan: Plan
    trace: ChromeTrace
    groups: RunGroups
    facts: dict[str, Any]
    validation: StageValidation | None
    objectives: RewardObjectives | None
    add_note: Callable[[str], None]
    record_metrics: Callable[[str, int, Mapping[str, float]], None]

    @property
    def stage(self) -> StageSetup:
        """The current stage."""
        ...

    def save_applied_steps(self) -> Path | None:
        """Write a checkpoint if steps were applied since the newest one, and return the folder of the newest."""
        ...

    @property
    def version(self) -> int:
        """The published version."""
        ...

    @property
    def evaluator(self) -> WorkerGroup:
        """The evaluator."""
        ...

    def get_rewards(self, stage: str) -> RewardHandles:
        """Return the rewards of a stage."""
        ...

    def load(self, checkpoint: Path, resumed_stage: StageSetup | None = None) -> None:
        """Load a checkpoint into the trainers and shards."""
        ...

    def require_stored(self, *paths: Path) -> None:
        """Commit files or folders that a worker has made."""
        ...

    def change_groups(
        self,
        stage: str,
        change: GroupChange,
        checkpoint: Path | None,
        resumed_stage: StageSetup | None = None,
    ) -> None:
        """Stop and start groups before a stage or within it."""
        ...

    def renumber_stages(self, manifest: Manifest) -> None:
        """Renumber the global steps of the stages so that they follow a checkpoint."""
        ...

    def follow_plan(self, scenario: Scenario, plan: Plan, manifest: Manifest) -> None:
        """Follow another plan from a checkpoint of the current stage on."""
        ...

"""RunningSession: the part of a session that its commands and validations use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nonet.controller.groups import RewardHandles, RolloutHandle, RunGroups
from nonet.controller.record import CommitLog, RunFolder
from nonet.controller.scenario import Scenario
from nonet.deadlines import Deadlines
from nonet.workers.roles import StageSetup


class RunningSession(Protocol):
    """A session whose groups are there (`Session`)."""

    run: RunFolder
    scenario: Scenario
    stages: dict[str, StageSetup]
    commits: CommitLog
    deadlines: Deadlines
    groups: RunGroups
    facts: Any
    told: Callable[[str], None]

    @property
    def stage(self) -> StageSetup:
        """The stage under way."""
        ...

    @property
    def reward(self) -> RewardHandles:
        """The rewards of the stage under way."""
        ...

    @property
    def rollout(self) -> RolloutHandle:
        """The rollouts."""
        ...

    @property
    def evaluator(self) -> Any:
        """The evaluator."""
        ...

"""RunningSession: the state of a session whose groups have opened the artifacts, on which the modules of this package work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nonet.controller.groups import EmbeddingHandle, GroupChange, Published, RewardHandles, RunGroups
from nonet.controller.plan import Plan
from nonet.controller.record import Manifest
from nonet.controller.scenario import Scenario
from nonet.controller.session.artifacts import make_run_stages
from nonet.controller.session.bound_run import BoundRun, write_plan
from nonet.controller.session.objectives import RewardObjectives
from nonet.controller.session.stage_validation import StageValidation
from nonet.controller.setup import renumber_stages
from nonet.errors import ConfigError
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import WorkerGroup


class RunningSession:
    """The groups of a run, and how far its stages are.

    Args:
        bound_run: The run with its processes.
        facts: What the tokenise stage reported about the data and artifacts.
        stages: The settings of all stages by name.
        groups: The worker groups, which have opened the artifacts.

    Attributes:
        run: The folder of the run.
        scenario: The scenario, with the run's copies of the user's own files.
        deadlines: The timeouts of the run's waits.
        plan: The plan of the run.
        facts: What the tokenise stage reported about the data and artifacts.
        stages: The settings of all stages by name.
        groups: The worker groups.
        checkpoint_log: The checkpoints and the journal.
        trace: The trace of workers and controller.
        add_note: The function that shows a note of the run to its user.
        record_metrics: The function that records metrics of the controller: (stage, step, values by name).
        restored: The manifest of the checkpoint that a resumed run continues from, or None.
        step: The step of the current stage that was entered last; None before the first.
        applied_steps: The number of applied steps of the current stage.
        published: The newest version that was published to the rollouts.
        validation: The validations of the current stage, or None if it is not validated.
        objectives: The rewards of the current RL stage with their weights and multipliers, or None.
    """

    def __init__(
        self, bound_run: BoundRun, facts: dict[str, Any], stages: dict[str, StageSetup], groups: RunGroups
    ):
        self._bound_run, self.facts, self.stages, self.groups = bound_run, facts, stages, groups
        processes = bound_run.processes
        self.run, self.scenario, self.plan = processes.run, processes.scenario, processes.plan
        self.deadlines = processes.deadlines
        self.checkpoint_log, self.trace = bound_run.checkpoint_log, bound_run.trace
        self.add_note, self.record_metrics = bound_run.add_note, bound_run.record_metrics
        self.restored = bound_run.resumed_from[1] if bound_run.resumed_from else None
        self.published = Published(self.restored.version) if self.restored else Published()
        self.require_stored = bound_run.require_stored
        self._stage: str | None = None  # the name of the current stage
        self.step: int | None = None
        self.applied_steps = 0
        self.validation: StageValidation | None = None
        self.objectives: RewardObjectives | None = None

    @property
    def version(self) -> int:
        """The number of the newest published version of the weights."""
        return self.published.version

    @property
    def embedding(self) -> EmbeddingHandle:
        """The sparse tables, of which every shard holds a part."""
        return EmbeddingHandle(self.groups.trainer)

    @property
    def evaluator(self) -> WorkerGroup:
        """The evaluator.

        Raises:
            Exception: The error with which the evaluator failed to open the artifacts.
        """
        return self.groups.evaluator

    def group(self, role: str) -> WorkerGroup:
        """Return the workers of a role, including roles that are plug-ins.

        Raises:
            ConfigError: No group of the run holds the role.
        """
        return self.groups.group(role)

    def size(self) -> dict[str, int]:
        """Return the current number of dense parameters (`parameters`) and of sparse rows in all tables (`sparse_rows`)."""
        initial_stage = self.restored.stage if self.restored else next(iter(self.stages))
        self.groups.trainer.ensure_on_device(self.stages[self._stage or initial_stage])
        sparse_rows = sum(sum(shard.values()) for shard in self.embedding.count_rows())
        return {"parameters": self.groups.parameters, "sparse_rows": sparse_rows}

    @property
    def stage(self) -> StageSetup:
        """The current stage.

        Raises:
            ConfigError: No stage has begun.
        """
        if self._stage is None:
            raise ConfigError("no stage has begun: call begin(stage) or iterate_prompts(stage) first")
        return self.stages[self._stage]

    def get_rewards(self, stage: str) -> RewardHandles:
        """Return the rewards of a stage."""
        return self.groups.rewards[stage]

    def change_groups(
        self,
        stage: str,
        change: GroupChange,
        checkpoint: Path | None,
        resumed_stage: StageSetup | None = None,
    ) -> None:
        """Stop and start groups before a stage or within it (`RunGroups.change`), and write to the journal which."""
        self.groups.change(change, checkpoint, resumed_stage)
        self.published = Published(self.version)  # new rollouts have no weights and no rows
        self.checkpoint_log.write_record(
            rebound=stage,
            stops=list(change.stops),
            starts={group.name: group.workers for group in change.starts},
        )

    def load(self, checkpoint: Path, resumed_stage: StageSetup | None = None) -> None:
        """Load a checkpoint into the trainers and shards (`RunGroups.load`)."""
        self.groups.load(checkpoint, resumed_stage)
        self.published = self.published.forget_rows()

    def renumber_stages(self, manifest: Manifest) -> None:
        """Renumber the global steps of the stages so that they follow a checkpoint."""
        self.stages = renumber_stages(self.stages, manifest)

    def follow_plan(self, scenario: Scenario, plan: Plan, manifest: Manifest) -> None:
        """Follow another plan from a checkpoint of the current stage on, to whose groups `change_groups` changes."""
        self.scenario, self.plan, self.restored = scenario, plan, manifest
        write_plan(self.run, plan, self.add_note)
        self.stages = renumber_stages(make_run_stages(scenario, self.facts, plan), manifest)
        self.groups.processes.replace_plan(scenario, plan)

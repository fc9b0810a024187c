"""RunningSession: trains the stages of a run whose processes have opened its artifacts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonet.controller.groups import (
    EmbeddingHandle,
    GroupChange,
    GroupProcesses,
    PromptRequest,
    Published,
    RewardHandles,
    RewardScores,
    RunGroups,
    publish,
)
from nonet.controller.plan import Plan
from nonet.controller.record import CONTROLLER, CheckpointLog, ChromeTrace, Manifest
from nonet.controller.scenario import Scenario
from nonet.controller.session.artifacts import make_run_stages
from nonet.controller.session.checkpoint_writer import CheckpointWriter
from nonet.controller.session.objectives import RewardObjectives
from nonet.controller.session.scaling import WorkerScaling, write_plan
from nonet.controller.session.stage_checkpoints import (
    begin_validation,
    end_stage,
    end_stage_at_last_checkpoint,
    load_initial_checkpoint,
    restore_checkpoint,
)
from nonet.controller.session.stage_validation import StageValidation
from nonet.controller.session.steering import RewardSteering, begin_steering, replay_weights
from nonet.controller.setup import renumber_stages
from nonet.errors import ConfigError, WorkerLost
from nonet.storage import RunWriter
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture, WorkerGroup


@dataclass(frozen=True, slots=True)
class BoundRun:
    """A run whose processes have started.

    Attributes:
        processes: The processes of the groups.
        checkpoint_log: The checkpoints and the journal.
        trace: The trace of workers and controller.
        writer: The open writer of a run in object storage.
        resumed_from: The folder and the manifest of the checkpoint to continue from; None for a new run.
        add_note: The function that shows a note of the run to its user.
        record_metrics: The function that records metrics of the controller: (stage, step, values by name).
    """

    processes: GroupProcesses
    checkpoint_log: CheckpointLog
    trace: ChromeTrace
    writer: RunWriter | None
    resumed_from: tuple[Path, Manifest] | None
    add_note: Callable[[str], None]
    record_metrics: Callable[[str, int, Mapping[str, float]], None]

    def require_stored(self, *paths: Path) -> None:
        """Commit files or folders that a worker has made, before a result counts that stands for them.

        Raises:
            WorkerLost: A run in object storage lacks one, and workers have died: with them, what they could not tell.
        """
        # The first answer of a worker may be to a question from before it made the files.
        for _ in range(2):
            self.checkpoint_log.store_changes()
            missing = [path for path in paths if not self.checkpoint_log.has_file(path)]
            if not missing:
                return
        if dead := self.processes.binding.list_dead_workers():
            raise WorkerLost(
                f"{missing[0].relative_to(self.processes.run.path)} was lost with {', '.join(dead)}"
            )


class RunningSession:
    """The stages of a run.

    Args:
        bound: The run with its processes.
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
        checkpoint_writer: The writer of checkpoints.
        scaling: The changes of the number of workers within stages.
        trainer: The trainers, with the shards of the sparse tables.
        rollout: The rollouts.
        reward: The rewards of the current stage.
    """

    def __init__(
        self, bound: BoundRun, facts: dict[str, Any], stages: dict[str, StageSetup], groups: RunGroups
    ):
        self._bound, self.facts, self.stages, self.groups = bound, facts, stages, groups
        processes = bound.processes
        self.run, self.scenario, self.plan = processes.run, processes.scenario, processes.plan
        self.deadlines = processes.deadlines
        self.checkpoint_log, self.trace = bound.checkpoint_log, bound.trace
        self.add_note, self.record_metrics = bound.add_note, bound.record_metrics
        self.restored = bound.resumed_from[1] if bound.resumed_from else None
        self.published = Published(self.restored.version) if self.restored else Published()
        self.require_stored = bound.require_stored
        self._stage: str | None = None  # the name of the current stage
        self.step: int | None = None
        self.applied_steps = 0
        self.validation: StageValidation | None = None
        self.objectives: RewardObjectives | None = None
        self._steering: RewardSteering | None = None
        self.checkpoint_writer, self.scaling = CheckpointWriter(self), WorkerScaling(self)
        self.trainer = LoopTrainer(self, lambda: self.groups.trainer)
        self.rollout = LoopRollout(self, lambda: self.groups.rollout)
        self.reward = LoopRewards(self, lambda: self.get_rewards(self.stage.name))

    def restore(self) -> None:
        """Load the checkpoint that a resumed run continues from, else the checkpoint that `init` names.

        Raises:
            CheckpointError: The checkpoint was trained from other artifacts.
        """
        if self._bound.resumed_from:
            restore_checkpoint(self, *self._bound.resumed_from)
        else:
            load_initial_checkpoint(self)
        if self._bound.writer:
            # Results that were made after the checkpoint have been deleted here, but not on other nodes.
            self.checkpoint_log.store_changes()
            self.groups.processes.refresh_copies()

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

    @property
    def steering(self) -> RewardSteering:
        """The commands about rewards of the RL stage that began last."""
        assert self._steering is not None, "no RL stage has begun"
        return self._steering

    def get_rewards(self, stage: str) -> RewardHandles:
        """Return the rewards of a stage."""
        return self.groups.rewards[stage]

    def prepare(self, name: str) -> GroupChange:
        """Start the groups that a stage needs and stop those that it replaces.

        The newest applied step is saved in a checkpoint first, and the new groups load the newest checkpoint.

        Returns:
            The groups that were started and stopped; falsy if nothing had to change.

        Raises:
            PlacementError: The cluster has no room. All processes of the run have ended, and it can be resumed.
        """
        change = self.groups.find_due_change(name)
        if change:
            with self.trace.record_span("rebind", stage=name, what=change.describe()):
                self.change_groups(name, change, self.save_applied_steps())
        return change

    def save_applied_steps(self) -> Path | None:
        """Write a checkpoint if steps were applied since the newest one, and wait for it.

        Returns:
            The folder of the newest checkpoint, or None if no step was applied yet.
        """
        self.checkpoint_writer.finish(wait=True)
        if self.checkpoint_log.open_step is not None:
            stage, step = self.checkpoint_log.open_step
            self.checkpoint_writer.write(stage, step + 1, wait=True)
        return self.wait_for_checkpoint()

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

    def begin(self, name: str) -> int:
        """Enter a stage, at its start or at the step of the restored checkpoint.

        Args:
            name: The name of the stage.

        Returns:
            The next step of the stage.
        """
        if name not in self.stages:
            raise ConfigError(f"there is no stage {name!r}; stages: {', '.join(self.stages)}")
        self.prepare(name)
        self.checkpoint_writer.finish(wait=True)
        self._stage, self.step = name, None
        if not self.stage.rolls_out:  # nobody reads the published rows, which take memory
            self.groups.trainer.shards.unpublish().get(self.deadlines.step)
        resumed = self.restored if self.restored and self.restored.stage == name else None
        self.applied_steps = resumed.stage_step if resumed else 0
        self.validation = begin_validation(self, resumed=resumed is not None)
        if resumed is None:
            self.groups.trainer.begin(self.stage)
        return self.applied_steps

    def end(self, step: int) -> Path | None:
        """End the current stage after `step` applied steps; the trainer continues with the selected checkpoint.

        Waits for all validations. If the stage selects the checkpoint that it began from, that checkpoint ends the stage; the
        best checkpoint of the stage itself is then kept in RUN/controls, and is evaluated too.

        Returns:
            The folder of the checkpoint that ends the stage, or None if the stage is not validated, so that its
                last checkpoint has ended it.
        """
        return end_stage(self, self.checkpoint_writer, step)

    def end_at_last_checkpoint(self) -> int | None:
        """End the current stage at its newest complete checkpoint, or at an earlier one that it selects, and load it.

        Returns:
            The number of steps of that checkpoint, or None if the stage has none.
        """
        return end_stage_at_last_checkpoint(self, self.checkpoint_writer)

    def compute_current_weights(self, stage: str) -> dict[str, float]:
        """Return the current weight of each reward of an RL stage, without multipliers.

        For a stage that is not running, these are the weights at its last command: those of the scenario, changed by all
        commands that were applied in the stage.
        """
        objectives, step = self.objectives, self.step or 0
        if objectives is None or self._stage != stage:
            objectives, step = replay_weights(self, stage)
        return {name: options.compute_weight(step) for name, options in objectives.rewards.items()}

    def iterate_prompts(self, name: str) -> Iterator[tuple[int, PromptRequest]]:
        """Iterate over the remaining steps of an RL stage as pairs (step, prompts)."""
        start = self.begin_rl(name)
        for step in range(start, self.stage.steps):
            self.enter_step(step)
            self.groups.rollout.ensure_on_device(name)
            yield step, PromptRequest(name, step, self.stage.users)

    def begin_rl(self, name: str) -> int:
        """Enter an RL stage, publish its first version, and return its next step."""
        start = self.begin(name)
        self.publish()
        self._steering = begin_steering(self, name)
        self.objectives = self._steering.objectives
        return start

    def enter_step(self, step: int) -> None:
        """Apply pending commands, and make `step` the step of the next update of the RL stage that began last."""
        self.steering.apply_commands(step)
        self.step = step

    def publish(self, stage: str | None = None, *, behind: bool = False) -> int:
        """Publish the trainer's weights and rows to the rollouts, which then generate with this version only.

        Args:
            stage: The RL stage in which the rollouts use them; by default the current one.
            behind: Whether to return without waiting for rollouts that are still generating with the version before.

        Returns:
            The new version.
        """
        began = time.time()
        name = stage or self._stage
        setup = self.stages[name] if name is not None and self.stages[name].rolls_out else None
        replica_bytes = self.scenario.sparse.replica_bytes
        self.published = publish(
            self.groups.trainer,
            self.groups.rollout,
            self.published,
            replica_bytes,
            setup,
            in_background=behind,
        )
        facts = {"version": self.version, "rows": self.published.route}
        self.trace.add(CONTROLLER, "publish", began, time.time(), **facts)
        return self.version

    def commit(self, step: int, *, now: bool = False) -> Path | None:
        """Record a step of the current stage as applied, and write a checkpoint if one is due.

        A checkpoint is due every `checkpoint.every` steps, at the validation points and at the end of the stage. A
        checkpoint that ends its stage or was requested by `now` is complete when this returns; others are written while
        the next steps run, unless `checkpoint.background` is off. After the last step, the stage ends as in `end`. An error
        of an earlier background write is raised here.

        Args:
            step: The step within the stage.
            now: Whether to write a checkpoint even if none is due.

        Returns:
            The folder of the checkpoint, or None if none was due or it is still being written.
        """
        stage, applied_steps, every = self.stage, step + 1, self.scenario.checkpoint.every
        floor_state = self.objectives.get_state() if stage.rolls_out and self.objectives else {}
        self.checkpoint_log.record_applied_step(stage, step, **floor_state)
        self.applied_steps = applied_steps
        self.checkpoint_writer.finish(wait=False)
        is_last = applied_steps == stage.steps
        is_validated = self.validation and applied_steps in self.validation.points
        if not (now or is_last or applied_steps % every == 0 or is_validated):
            return None
        wait = now or is_last or not self.scenario.checkpoint.background
        with self.trace.record_span("commit", step=stage.first + applied_steps):
            path = self.checkpoint_writer.write(stage, applied_steps, wait=wait)
            return (self.end(applied_steps) or path) if is_last else path

    def wait_for_checkpoint(self) -> Path | None:
        """Wait for a checkpoint that is being written.

        Returns:
            The folder of the newest checkpoint, or None before the first.
        """
        self.checkpoint_writer.finish(wait=True)
        return self.checkpoint_log.newest and self.checkpoint_log.newest[0]


class LoopHandle:
    """A handle of the groups that a session has now, whose calls get what the session knows."""

    def __init__(self, session: RunningSession, get_handle: Callable[[], Any]):
        self._session, self._get_handle = session, get_handle

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the handle."""
        return getattr(self._get_handle(), name)


class LoopTrainer(LoopHandle):
    """The trainers (`TrainerHandle`), whose updates get the version and the objectives of the session."""

    def update(
        self, stage: StageSetup, step: int, beams: GroupFuture, scores: Mapping[str, GroupFuture]
    ) -> dict[str, float]:
        """Take one RL step on beams and scores, and return its record (`TrainerHandle.update`)."""
        known = {"version": self._session.version, "objectives": self._session.objectives}
        return self._get_handle().update(stage, step, beams, scores, **known)


class LoopRollout(LoopHandle):
    """The rollouts (`RolloutHandle`), which generate with the version that the session has published last."""

    def generate(self, prompts: PromptRequest) -> GroupFuture:
        """Start generating beams for prompts, and return the future (`RolloutHandle.generate`)."""
        return self._get_handle().generate(prompts, self._session.version)


class LoopRewards(LoopHandle):
    """The rewards of the current stage (`RewardHandles`), which score for the step that was entered last."""

    def score(self, beams: GroupFuture, *, step: int | None = None, **options: Any) -> RewardScores:
        """Score beams, and wait for the scores (`RewardHandles.score`)."""
        step = self._session.step if step is None else step
        return self._get_handle().score(beams, step=step, **options)

"""StageRun: begins and ends the stages of a run, publishes versions and writes checkpoints, for a loop that trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nonet.controller.groups import GroupChange, PromptRequest, RewardScores, RunGroups, publish
from nonet.controller.record import CONTROLLER
from nonet.controller.session.bound_run import BoundRun
from nonet.controller.session.checkpoint_writer import CheckpointWriter
from nonet.controller.session.running_session import RunningSession
from nonet.controller.session.scaling import WorkerScaling
from nonet.controller.session.stage_checkpoints import (
    begin_validation,
    end_stage,
    end_stage_at_last_checkpoint,
    load_initial_checkpoint,
    restore_checkpoint,
)
from nonet.controller.session.steering import RewardSteering, begin_steering, replay_weights
from nonet.errors import ConfigError
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture


class StageRun(RunningSession):
    """The stages of a run, as a loop drives them.

    Args:
        bound_run: The run with its processes.
        facts: What the tokenise stage reported about the data and artifacts.
        stages: The settings of all stages by name.
        groups: The worker groups, which have opened the artifacts.

    Attributes:
        checkpoint_writer: The writer of checkpoints.
        scaling: The changes of the number of workers within stages.
        trainer: The trainers, with the shards of the sparse tables.
        rollout: The rollouts.
        reward: The rewards of the current stage.
    """

    def __init__(
        self, bound_run: BoundRun, facts: dict[str, Any], stages: dict[str, StageSetup], groups: RunGroups
    ):
        super().__init__(bound_run, facts, stages, groups)
        self._steering: RewardSteering | None = None
        self.checkpoint_writer = CheckpointWriter(self)
        self.scaling = WorkerScaling(self, self.save_applied_steps)
        self.trainer = LoopTrainer(self, lambda: self.groups.trainer)
        self.rollout = LoopRollout(self, lambda: self.groups.rollout)
        self.reward = LoopRewards(self, lambda: self.get_rewards(self.stage.name))

    def restore(self) -> None:
        """Load the checkpoint that a resumed run continues from, else the checkpoint that `init` names.

        Raises:
            CheckpointError: The checkpoint was trained from other artifacts.
        """
        if self._bound_run.resumed_from:
            restore_checkpoint(self, *self._bound_run.resumed_from)
        else:
            load_initial_checkpoint(self)
        if self._bound_run.writer:
            # Results that were made after the checkpoint have been deleted here, but not on other nodes.
            self.checkpoint_log.store_changes()
            self.groups.processes.refresh_copies()

    def finish(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint that is being written, unless an error has ended the loop."""
        if error is None:
            self.checkpoint_writer.finish(wait=True)

    @property
    def steering(self) -> RewardSteering:
        """The commands about rewards of the RL stage that began last."""
        assert self._steering is not None, "no RL stage has begun"
        return self._steering

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

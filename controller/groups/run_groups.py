"""RunGroups: opens the artifacts in the groups of a run, and holds the handles through which they are called.

If a group that trains is stopped and started again, the training groups join a new process group and load the newest
checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from nonet.controller.groups.group_processes import GroupChange, GroupProcesses
from nonet.controller.groups.handles import RolloutHandle, TrainerHandle, join_training_groups
from nonet.controller.groups.reward_handles import RewardHandles
from nonet.controller.scenario import RewardOptions, Scenario
from nonet.controller.setup import (
    list_between_roles,
    list_reward_options,
    make_baseline_options,
    make_rollout_options,
)
from nonet.errors import ConfigError
from nonet.models.baselines.kinds import BASELINES
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import WorkerGroup


class RunGroups:
    """The groups of a run as handles. Creating it opens the artifacts in all groups and joins the process group.

    Args:
        processes: The processes of the groups.
        folders: The folders of the artifacts, by kind.
        ttl_steps: The number of steps after which a table drops an unused row, by table.

    Attributes:
        processes: The processes of the groups.
        binding: The plans of the groups that run now.
        hosts: The processes of each group that runs now, by its name.
        offloader: What moves groups to their devices and from them.
        deadlines: The timeouts of waits.
        trainer: The trainers and the shards of the sparse tables.
        rewards: The rewards, by stage.
        parameters: The number of dense parameters.
        notes: What the trainers say about themselves.
    """

    def __init__(self, processes: GroupProcesses, folders: Mapping[str, str], ttl_steps: Mapping[str, int]):
        self.processes, self._folders, self._ttl_steps, self._epoch = processes, dict(folders), ttl_steps, 0
        self.binding, self.hosts, self.offloader = processes.binding, processes.hosts, processes.offloader
        self.group, self.find_due_change = processes.group, processes.find_due_change
        self.deadlines = processes.deadlines
        self._open({group.name for group in self.binding.groups})

    @property
    def evaluator(self) -> WorkerGroup:
        """The evaluator. It may still be opening, because it reads all events, and answers calls afterwards.

        Raises:
            Exception: Opening has failed with this error.
        """
        if self._evaluator_opened.done():
            self._evaluator_opened.get(self.deadlines.open)
        return self._evaluator

    @property
    def rollout(self) -> RolloutHandle:
        """The rollouts.

        Raises:
            ConfigError: The run has none.
        """
        if self._rollout is None:
            raise ConfigError("this run has no rollouts: no stage of it generates")
        return self._rollout

    def start_reward(self, stage: str, name: str, options: RewardOptions) -> WorkerGroup:
        """Start a reward that is not in the plan, and open the artifacts in it (`GroupProcesses.start_reward`)."""
        group = self.processes.start_reward(stage, name, options)
        try:
            group.open(self._folders).get(self.deadlines.open)
        except BaseException:
            self.processes.stop_reward(stage, name)
            raise
        return group

    def change(
        self, change: GroupChange, checkpoint: Path | None, resumed_stage: StageSetup | None = None
    ) -> None:
        """Stop and start groups; if a group that trains is among them, load a checkpoint into all groups that train.

        If a group cannot be started, all processes of the run are stopped.

        Args:
            change: The groups to stop and to start.
            checkpoint: The folder of the newest checkpoint; None if the run has none.
            resumed_stage: The stage that continues from the checkpoint; None if a stage begins with it. The stage attaches
                its rewards that are not in the plan again, so their workers are stopped.
        """
        trained_before = self.processes.list_training_groups()
        started = self.processes.change(change, stops_attached=resumed_stage is not None)
        training = trained_before | self.processes.list_training_groups()
        regroup = bool((started | set(change.stops)) & training)
        self._epoch += regroup
        self._open(started)
        if regroup and checkpoint is not None:
            self.load(checkpoint, resumed_stage)

    def load(self, checkpoint: Path, resumed_stage: StageSetup | None) -> None:
        """Load a checkpoint into trainers and shards, whatever the number of ranks that wrote it.

        Args:
            checkpoint: The folder of the checkpoint.
            resumed_stage: The stage that continues from the checkpoint; None if a stage begins with it.
        """
        folder = str(checkpoint)
        load_calls = [self.trainer.group.load(folder, resumed_stage), self.trainer.shards.load(folder)]
        for call in load_calls:
            call.get(self.deadlines.open)

    def _open(self, new_names: Collection[str]) -> None:
        """Create all handles again, join new training groups in a process group, and open the artifacts in new groups."""
        scenario, plan = self.processes.scenario, self.processes.plan
        for name in new_names:
            self.hosts[name].wait_until_ready()
        self.offloader.stages = frozenset(
            stage for stage in scenario.stages if not self.find_due_change(stage)
        )
        trainers, shards = self.group("trainer"), self.group("embedding")
        self._rollout: RolloutHandle | None = None
        between = {
            stage: [self.group(name) for name in names]
            for stage, names in list_between_roles(scenario).items()
        }
        if self.processes.has_role("rollout"):
            rollouts = make_rollout_options(scenario)
            chunks = {stage: plan.find_chunk(stage, "rollout") for stage in scenario.stages}
            self._rollout = RolloutHandle(
                self.group("rollout"), rollouts, self.offloader.enter, self.deadlines, chunks, between
            )
        self._evaluator = self.group("evaluator")
        self.rewards = self._make_reward_handles()
        other_groups = [group for handles in self.rewards.values() for group in handles.groups.values()]
        other_groups += [group for groups in between.values() for group in groups if group.has_method("open")]
        for group in (trainers, shards) if self._ttl_steps else ():
            if group.hosts.name in new_names:
                group.set_ttl_steps(self._ttl_steps).get(self.deadlines.open)
        if self.processes.list_training_groups() & set(new_names):
            self._join_process_group(trainers, shards)
        trainer_call = trainers.open(self._folders) if trainers.hosts.name in new_names else None
        open_calls = [group.open(self._folders) for group in other_groups if group.hosts.name in new_names]
        if self._evaluator.hosts.name in new_names:
            self._evaluator_opened = self._evaluator.open(self._folders, str(self.processes.run.results))
            if _has_own_baselines(scenario):  # errors in user code are raised before anything is trained
                open_calls.append(self._evaluator_opened)
        if trainer_call is not None:
            facts = trainer_call.get(self.deadlines.open)[0]
            self.parameters: int = facts["parameters"]
            self._buckets = facts["buckets"]
            self.notes: list[str] = facts.get("notes", [])
        self.trainer = TrainerHandle(
            trainers,
            shards,
            self.offloader.enter,
            self.deadlines,
            buckets=self._buckets,
            delta=scenario.weights.publish == "delta",
        )
        if self._rollout and self._rollout.group.hosts.name in new_names:
            self._rollout.group.open(self._folders).get(self.deadlines.open)
        for call in open_calls:
            call.get(self.deadlines.open)

    def _join_process_group(self, trainers: WorkerGroup, shards: WorkerGroup) -> None:
        """Join trainers and shards in a process group; once it replaces an older one, ranks refuse calls of the older one."""
        if self._epoch:
            for name in sorted(self.processes.list_training_groups()):
                self.hosts[name].begin_epoch(self._epoch)
        join_training_groups(trainers, shards, self.deadlines, self._epoch)

    def _make_reward_handles(self) -> dict[str, RewardHandles]:
        """Create the handles of the rewards, by stage."""
        groups_by_stage: dict[str, dict[str, WorkerGroup]] = {}
        timeouts: dict[str, dict[str, float]] = {}
        for stage, name, options in list_reward_options(self.processes.scenario):
            groups_by_stage.setdefault(stage, {})[name] = self.group(f"{stage}.reward.{name}")
            timeouts.setdefault(stage, {})[name] = options.timeout_s
        return {
            stage: RewardHandles(
                group_by_reward, timeouts[stage], stage, self.offloader.enter, self.deadlines
            )
            for stage, group_by_reward in groups_by_stage.items()
        }


def _has_own_baselines(scenario: Scenario) -> bool:
    """Return whether a scenario has baselines that are not shipped."""
    configs = make_baseline_options(scenario).values()
    return any(config["use"] not in BASELINES.list_shipped() for config in configs)

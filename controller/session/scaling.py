"""WorkerScaling: changes the number of workers of a run within a stage, through a checkpoint and new groups.

Three things lead to a change: a user's command (`nonet scale`), a node with room for an elastic role, and a node that Ray
drains. A change happens between two steps. The run writes a checkpoint, stops and starts the groups that differ, and
continues the stage from the checkpoint, so that its weights are those of a run that was stopped and restarted there. A
command that was applied at a step is applied again at that step when the run resumes from an earlier checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.controller.cluster import list_draining_nodes, read_live_view
from nonet.controller.plan import Plan, RunningGroups, plan, scale_roles
from nonet.controller.record import SCALE, CommandQueue, Manifest, RunFolder
from nonet.controller.scenario import Scenario
from nonet.errors import NonetError, PlacementError, WorkerLost

if TYPE_CHECKING:
    from nonet.controller.session.running_session import RunningSession

_LOOK_EVERY_S = 5.0  # between two looks at the nodes of the cluster


@dataclass(frozen=True, slots=True)
class PlannedScaling:
    """A change of workers that fits on the cluster.

    Attributes:
        scenario: The scenario with the new numbers of workers.
        plan: The plan that begins with the current stage.
        text: What changes and why, for the user.
        command: The command that asked for it; None if the cluster has changed.
        is_replay: Whether an earlier part of the run applied the command.
    """

    scenario: Scenario
    plan: Plan
    text: str
    command: dict[str, Any] | None = None
    is_replay: bool = False


class WorkerScaling:
    """The changes of workers of one session.

    Args:
        session: The session.
        save_applied_steps: Writes a checkpoint if steps were applied since the newest one.
    """

    def __init__(self, session: RunningSession, save_applied_steps: Callable[[], object]):
        self._session, self._commands = session, CommandQueue(session.run)
        self._save_applied_steps = save_applied_steps
        # The commands that an earlier part of the run applied after the restored checkpoint, in the order of their steps.
        _, self._to_replay = _split_commands(session.run, session.scenario, session.restored)
        self._planned: PlannedScaling | None = None
        self._next_look = 0.0
        self._drained_without_room: set[str] = set()  # the nodes because of which a checkpoint was written

    def find_next_step(self, stage: str, step: int) -> int | None:
        """Return the step after `step` at which a command has to be applied again in a stage; None without one."""
        steps = (command["step"] for command in self._to_replay if command["stage"] == stage)
        return min((other for other in steps if other > step), default=None)

    @property
    def is_due(self) -> bool:
        """Whether `poll` has found a change that `apply` has to make before the next step."""
        return self._planned is not None

    @property
    def stops_evaluators(self) -> bool:
        """Whether the change that is due stops evaluators, which then lose the calls that they have not answered."""
        if self._planned is None:
            return False
        groups = self._session.groups
        stops = groups.find_due_change(self._session.stage.name, self._planned.plan).stops
        return any("evaluator" in group.roles for group in groups.binding.groups if group.name in stops)

    def poll(self) -> bool:
        """Look for a change of workers that is due before the next step; refuse commands that are not possible.

        Returns:
            Whether there is one. The loop of the stage must then return, so that `apply` can be called.
        """
        session = self._session
        if self._planned is None and 0 < session.applied_steps < session.stage.steps:
            self._planned = next(self._list_candidates(), None)
        return self.is_due

    def apply(self) -> None:
        """Write a checkpoint, stop and start the groups that change, and let the stage continue from the checkpoint.

        Raises:
            WorkerLost: A group could not be started, so that all workers of the run have ended. The command is refused.
        """
        planned, self._planned = self._planned, None
        assert planned is not None
        session, began = self._session, time.time()
        stage, step = session.stage, session.applied_steps
        with session.trace.record_span("scale", stage=stage.name, what=planned.text):
            self._save_applied_steps()
            assert session.checkpoint_log.newest is not None
            self._change_groups(planned, *session.checkpoint_log.newest)
        text = f"{planned.text}, from step {step} of {stage.name} on; {time.time() - began:.1f} s"
        if planned.command and not planned.is_replay:
            self._commands.take(planned.command, stage.name, step, text)
        session.add_note(f"taken again: {planned.text}" if planned.is_replay else text)

    def _change_groups(self, planned: PlannedScaling, checkpoint: Path, manifest: Manifest) -> None:
        """Stop and start the groups that differ in a new plan, and load the checkpoint of the current step into them."""
        session, stage = self._session, self._session.stage
        change = session.groups.find_due_change(stage.name, planned.plan)
        session.follow_plan(planned.scenario, planned.plan, manifest)
        try:
            session.change_groups(stage.name, change, checkpoint, session.stage)
        except PlacementError as error:
            if planned.command and not planned.is_replay:
                self._refuse(planned.command, str(error))
            raise WorkerLost(f"the workers were not changed ({planned.text}): {error}") from None
        if (
            session.stage != stage
        ):  # trainers that were not started again would still compute with other chunks
            session.groups.trainer.ensure_on_device(session.stage)
            session.load(checkpoint, session.stage)

    def refuse_waiting(self, reason: str) -> None:
        """Refuse the commands that have not been applied, because no step will follow."""
        for command in self._list_waiting():
            self._refuse(command, reason)

    def _list_candidates(self) -> Iterator[PlannedScaling]:
        """Yield the changes that are possible now, the most urgent ones first."""
        yield from self._plan_replay()
        for command in self._list_waiting():
            yield from self._plan_command(command)
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY_S
            yield from self._plan_for_drained_nodes()
            yield from self._plan_growth()

    def _plan_replay(self) -> Iterator[PlannedScaling]:
        """Yield the change of the commands that an earlier part of the run applied at this step."""
        session = self._session
        stage, step = session.stage.name, session.applied_steps
        while self._to_replay and self._to_replay[0]["stage"] == stage and self._to_replay[0]["step"] <= step:
            command = self._to_replay.pop(0)
            try:
                yield self._plan_workers(command, is_replay=True)
            except NonetError as error:
                session.add_note(f"warning: not taken again: {command['text']}: {error}")

    def _plan_command(self, command: dict[str, Any]) -> Iterator[PlannedScaling]:
        """Yield the change that a command asks for; answer the command if nothing changes or it is not possible."""
        try:
            planned = self._plan_workers(command)
        except NonetError as error:
            self._refuse(command, " ".join(str(error).split()))
            return
        session = self._session
        if session.groups.find_due_change(session.stage.name, planned.plan):
            yield planned
        else:
            text = f"nothing to change: {_describe_workers(command['workers'])} already"
            self._commands.take(command, session.stage.name, session.applied_steps, text)

    def _plan_workers(self, command: Mapping[str, Any], *, is_replay: bool = False) -> PlannedScaling:
        """Plan the numbers of workers of a command.

        Raises:
            ConfigError: The roles do not exist, or do not allow these numbers.
            PlacementError: The cluster has no room.
        """
        session, workers = self._session, command["workers"]
        scenario = scale_roles(session.scenario, workers)
        planned = plan(scenario, read_live_view(), running=self._get_running())
        text = f"scaled {_describe_workers(workers)}"
        return PlannedScaling(scenario, planned, text, dict(command), is_replay)

    def _plan_for_drained_nodes(self) -> Iterator[PlannedScaling]:
        """Yield a change that moves groups away from nodes that Ray drains; without room, only write a checkpoint.

        Without room, the loop of the stage goes on as it is, because no group changes.
        """
        nodes = {node for group in self._session.groups.binding.groups for node in group.nodes}
        draining = nodes & list_draining_nodes()
        if not draining:
            return
        scenario, text = (
            self._session.scenario,
            f"node {', '.join(sorted(node[:8] for node in draining))} is drained",
        )
        try:
            planned = plan(scenario, read_live_view(), running=self._get_running())
        except PlacementError as error:
            if draining <= self._drained_without_room:
                return
            self._drained_without_room |= draining
            reason = " ".join(str(error).split())
            self._save_applied_steps()
            self._session.add_note(f"{text}: wrote a checkpoint; its workers stay until it ends, as {reason}")
            return
        yield PlannedScaling(scenario, planned, f"{text}: moved its workers")

    def _plan_growth(self) -> Iterator[PlannedScaling]:
        """Yield a change by which elastic roles get more workers, if the cluster now has room for them."""
        scenario, running = self._session.scenario, self._get_running(grows=True)
        if not self._has_elastic_roles():
            return
        try:
            planned = plan(scenario, read_live_view(), running=running)
        except PlacementError:
            return
        before = {group.name: group.workers for group in running.groups}
        after = {group.name: group.workers for group in planned.list_groups(running.stage)}
        grown = {name: workers for name, workers in after.items() if workers > before.get(name, workers)}
        if grown and all(after.get(name, 0) >= workers for name, workers in before.items()):
            yield PlannedScaling(scenario, planned, f"room for more workers: {_describe_workers(grown)}")

    def _has_elastic_roles(self) -> bool:
        """Return whether a role may have a number of workers that depends on the cluster."""
        scenario = self._session.scenario
        all_roles = [scenario.roles, *(stage.roles for stage in scenario.stages.values())]
        return any(not isinstance(role.workers, int) for roles in all_roles for role in roles.values())

    def _get_running(self, *, grows: bool = False) -> RunningGroups:
        """Return the groups that run now."""
        session = self._session
        return RunningGroups(session.stage.name, session.groups.binding.groups, grows)

    def _list_waiting(self) -> list[dict[str, Any]]:
        """Return the commands about numbers of workers without an answer, oldest first."""
        return [command for command in self._commands.list_waiting() if command["verb"] == SCALE]

    def _refuse(self, command: dict[str, Any], reason: str) -> None:
        """Record and answer the refusal of a command, and show it as a note of the run."""
        self._commands.refuse(command, reason)
        self._session.add_note(f"refused: scale {command['name']}: {reason}")


def restore_workers(run: RunFolder, scenario: Scenario, restored: Manifest | None) -> Scenario:
    """Return the scenario with the numbers of workers that a checkpoint was written with; later commands are replayed.

    Args:
        run: The folder of the run.
        scenario: The scenario of the run.
        restored: The manifest of the checkpoint that the run resumes from; None for a run that begins.
    """
    applied, _ = _split_commands(run, scenario, restored)
    for command in applied:
        scenario = scale_roles(scenario, command["workers"])
    return scenario


def _split_commands(
    run: RunFolder, scenario: Scenario, restored: Manifest | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the applied commands into those before a checkpoint was written, and those to apply again after it."""
    taken = CommandQueue(run).list_taken()
    commands = [command for command in taken if command["verb"] == SCALE and "refused" not in command]
    if restored is None:
        return [], commands
    stages = list(scenario.stages)
    reached = (stages.index(restored.stage), float("inf") if restored.last else restored.stage_step)
    applied = [c for c in commands if (stages.index(c["stage"]), c["step"]) <= reached]
    return applied, [c for c in commands if c not in applied]


def _describe_workers(workers_by_role: Mapping[str, int]) -> str:
    """Format numbers of workers, such as "rollout to 4, trainer to 1"."""
    return ", ".join(f"{role} to {workers}" for role, workers in workers_by_role.items())

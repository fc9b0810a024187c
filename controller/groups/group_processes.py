"""GroupProcesses: starts the processes of a run's worker groups, and stops and starts groups between steps.

A stage with its own roles gets the groups of its re-plan, and so does a run whose number of workers changes. Unchanged
groups stay. Groups that do not fit on their device together take turns through the `Offloader`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from nonet.controller.groups.binding import RESTARTS, GroupBinding
from nonet.controller.groups.lifetimes import Heartbeat, keep_alive
from nonet.controller.groups.offload import Offloader
from nonet.controller.groups.watchdog import Watchdog
from nonet.controller.plan import LIGHT_CPUS, GroupPlan, Plan
from nonet.controller.record import ChromeTrace, RunFolder, check_shared
from nonet.controller.scenario import RewardOptions, Role, Scenario
from nonet.controller.setup import make_reward_spec, make_role_specs
from nonet.deadlines import suggest_longer_deadline
from nonet.errors import ConfigError, DeadlineExceeded, PlacementError, WorkerLost
from nonet.storage import FileEntry, RunCopy, find_copy
from nonet.workers.roles.kinds import get_gang_roles
from nonet.workers.runtime import PING_PATIENCE_S, ActorGroup, GroupLifetime, WorkerGroup, WorkerResources


@dataclass(frozen=True, slots=True)
class GroupChange:
    """The groups to stop and start before a stage; falsy if there are none.

    Attributes:
        stops: The names of the groups to stop.
        starts: The groups to start.
        kept: The groups that stay, but with another number of threads.
    """

    stops: tuple[str, ...]
    starts: tuple[GroupPlan, ...]
    kept: tuple[GroupPlan, ...]

    def __bool__(self) -> bool:
        return bool(self.stops or self.starts)

    def describe(self) -> str:
        """Describe the change, such as "stopped trainer; started trainer x1, rollout x2"."""
        started = ", ".join(f"{group.name} x{group.workers}" for group in self.starts)
        return f"stopped {', '.join(self.stops) or 'nothing'}; started {started or 'nothing'}"


class GroupProcesses:
    """The processes of a run's groups.

    Args:
        scenario: The scenario.
        run: The folder of the run.
        plan: The plan, with the groups of every stage.
        life_s: If 0, the processes end with this process. If above 0, they are detached and end after this many seconds
            without a heartbeat.
        trace: Takes the spans of the workers.
        stage: The stage whose groups are started first.
    """

    def __init__(
        self, scenario: Scenario, run: RunFolder, plan: Plan, life_s: float, trace: ChromeTrace, stage: str
    ):
        self.scenario, self.plan, self.run, self._trace = scenario, plan, run, trace
        envs = {name: pool.env.model_dump() for name, pool in scenario.pools.items() if pool.env}
        specs = make_role_specs(scenario, run)
        self.deadlines = scenario.deadlines
        self._life = GroupLifetime(run.id, life_s)
        self.binding = GroupBinding(plan, specs, self._life, envs, stage=stage, deadlines=self.deadlines)
        self.hosts = self.binding.hosts
        self._heartbeat: Heartbeat | None = None
        with self._stop_on_error():
            self.offloader = Offloader(plan.ledger, self.hosts, trace, self.deadlines)
            self._collected_counts: dict[Any, int] = {}  # files that `collect_files` has returned, by actor
            self._collecting: dict[Any, Any] = {}  # its calls that have no answer yet, by actor
            self._watchdog = Watchdog(run.path, self.hosts)
            self._attach_watchdog()
            self._heartbeat = keep_alive(self.hosts, life_s) if life_s else None
            self._check_shared(self.hosts)

    def stop(self, *, at_once: bool = False) -> None:
        """Stop every process.

        Args:
            at_once: Whether to kill the processes without calling the teardown of their roles.
        """
        if self._heartbeat:
            self._heartbeat.stop()
        try:
            if not at_once:
                self._trace.collect(self.hosts.values())
        except BaseException:
            at_once = True
            raise
        finally:
            self.binding.stop(at_once=at_once)

    def pop_warning(self) -> str:
        """Return a text about heartbeats that failed since the last call, empty without failures."""
        return self._heartbeat.pop_warning() if self._heartbeat else ""

    @property
    def silent_workers(self) -> int:
        """The number of workers that did not answer the last heartbeat."""
        return self._heartbeat.last_failures if self._heartbeat else 0

    def group(self, role: str) -> WorkerGroup:
        """Return the current group that holds a role.

        Raises:
            ConfigError: No group of the run holds the role.
        """
        group = next((group for group in self.binding.groups if role in group.roles), None)
        if group is None or group.name not in self.hosts:
            roles = ", ".join(name for group in self.binding.groups for name in group.roles)
            raise ConfigError(f"no group of this run holds the role {role!r}; roles: {roles}")
        kind = self.scenario.roles.get(role, Role()).find_kind(role)
        ranks_per_share = (
            self.scenario.tensor_ranks if kind.follows_shares and "trainer" in group.roles else 1
        )
        return WorkerGroup.from_actors(self.hosts[group.name], role, ranks_per_share)

    def has_role(self, role: str) -> bool:
        """Return whether a running group holds a role."""
        return any(role in group.roles for group in self.binding.groups)

    def list_training_groups(self) -> set[str]:
        """Return the names of the groups that train together."""
        return {group.name for group in self.binding.groups if get_gang_roles() & set(group.roles)}

    def start_reward(self, stage: str, name: str, options: RewardOptions) -> WorkerGroup:
        """Start the processes of a reward that is not in the plan, on any node with room, and return their group.

        If this fails, its processes are stopped.

        Raises:
            PlacementError: There is no room.
            ConfigError: The reward's options are wrong.
        """
        role, free = f"{stage}.reward.{name}", float(ray.available_resources().get("CPU", 0.0))
        if free < LIGHT_CPUS * options.workers:
            raise PlacementError(
                f"reward {name!r} asks for {options.workers} x {LIGHT_CPUS:g} CPU, free are {free:g}; detach another, or give "
                "it fewer workers"
            )
        spec = make_reward_spec(self.scenario, self.run, name, options)
        life = replace(self._life, restarts=RESTARTS)
        hosts = ActorGroup(
            {role: spec},
            workers=options.workers,
            name=role,
            life=life,
            seat=WorkerResources(cpus=LIGHT_CPUS, threads=0),
            deadlines=self.deadlines,
        )
        self.hosts[role] = hosts
        try:
            self._attach_watchdog()
            hosts.wait_until_ready()
        except BaseException:
            self.stop_reward(stage, name)
            raise
        return WorkerGroup.from_actors(hosts, role)

    def stop_reward(self, stage: str, name: str) -> None:
        """Stop the processes of an attached reward; those of planned rewards stay idle until the run ends."""
        role = f"{stage}.reward.{name}"
        if not any(group.name == role for group in self.binding.groups) and role in self.hosts:
            self.hosts.pop(role).kill()

    def find_due_change(self, stage: str, plan: Plan | None = None) -> GroupChange:
        """Return the groups to stop and to start before a stage; falsy if all of its groups are already running.

        Args:
            stage: The name of the stage.
            plan: The plan to follow; by default the current one.
        """
        planned = {group.name: group for group in (plan or self.plan).list_groups(stage)}
        running = {group.name: group for group in self.binding.groups}
        staying = {
            name for name, group in planned.items() if name in running and _is_unchanged(group, running[name])
        }
        stops = tuple(name for name in running if name not in staying)
        starts = tuple(group for name, group in planned.items() if name not in staying)
        rethreaded = tuple(planned[name] for name in sorted(staying) if planned[name] != running[name])
        return GroupChange(stops, starts, rethreaded)

    def replace_plan(self, scenario: Scenario, plan: Plan) -> None:
        """Follow another plan from now on; `change` must be called next with what `find_due_change` returns."""
        self.scenario, self.plan = scenario, plan
        self.offloader.replace_ledger(plan.ledger)

    def change(self, change: GroupChange, *, stops_attached: bool) -> set[str]:
        """Stop and start groups. If a group cannot be started, all processes of the run are stopped.

        Args:
            change: The groups to stop and to start.
            stops_attached: Whether to stop the processes of rewards that are not in the plan, too.

        Returns:
            The names of the groups that were started.
        """
        started = {group.name for group in change.starts}
        planned = {group.name for group in self.binding.groups}
        attached = [name for name in self.hosts if name not in planned] if stops_attached else []
        stops = (*change.stops, *attached)
        self._trace.collect(self.hosts[name] for name in stops)
        self.binding.change(stops, change.starts)
        with self._stop_on_error():
            self._attach_watchdog()
            self._check_shared(started)
            self.binding.set_threads(change.kept)
            for name in started:
                self.offloader.mark_resident(name)
        return started

    def collect_files(self) -> list[tuple[str, FileEntry]]:
        """Return the results and artifacts of a stored run that workers on other nodes have stored since the last call.

        A worker that does not answer within seconds is not waited for; a later call returns its answer.
        """
        folder, collected = str(self.run.path), list[tuple[str, FileEntry]]()
        for actor in self._list_remote_actors():
            if actor not in self._collecting:
                self._collecting[actor] = actor.list_put.remote(folder, self._collected_counts.get(actor, 0))
        calls = list(self._collecting.values())
        answered = ray.wait(calls, num_returns=len(calls), timeout=PING_PATIENCE_S)[0] if calls else []
        for actor in [actor for actor, call in self._collecting.items() if call in answered]:
            # A lost worker is reported by the calls of its roles, and by `Session.require_stored`.
            with contextlib.suppress(RayError):
                entries = ray.get(self._collecting.pop(actor))
                self._collected_counts[actor] = self._collected_counts.get(actor, 0) + len(entries)
                collected += entries
        return collected

    def refresh_copies(self) -> None:
        """Make the local copies of a stored run on other nodes equal to the stored run, from which results were deleted.

        Raises:
            WorkerLost: A worker died.
            DeadlineExceeded: A worker did not answer.
        """
        folder, copy = str(self.run.path), find_copy(self.run.path)
        if isinstance(copy, RunCopy):
            generation = copy.raise_generation()
            for hosts in list(self.hosts.values()):
                hosts.begin_generation(folder, generation)
        calls = [actor.refresh_copy.remote(folder) for actor in self._list_remote_actors()]
        try:
            ray.get(calls, timeout=self.deadlines.open)
        except GetTimeoutError:
            raise DeadlineExceeded(
                f"a worker did not fetch the run's files within {float(self.deadlines.open):g} s"
                f"{suggest_longer_deadline(self.deadlines.open)}"
            ) from None
        except RayActorError as error:
            raise WorkerLost(f"a worker died while it fetched the run's files: {error}") from error

    def _list_remote_actors(self) -> list[Any]:
        """Return the actors on other nodes."""
        own_node = ray.get_runtime_context().get_node_id()[:8]
        ready = [entry for hosts in list(self.hosts.values()) for entry in hosts.list_ready_actors()]
        return [actor for node, actor in ready if node != own_node]

    @contextlib.contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """Stop all processes if the context raises anything, such as KeyboardInterrupt."""
        try:
            yield
        except BaseException:
            self.stop(at_once=True)
            raise

    def _check_shared(self, new_names: Collection[str]) -> None:
        """Check that the workers of new groups reach the run's folder, unless the run is stored.

        Raises:
            PlacementError: A worker on another node does not reach it.
        """
        if find_copy(self.run.path) is not None:
            return
        nodes = {node for group in self.binding.groups if group.name in new_names for node in group.nodes}
        own_node = ray.get_runtime_context().get_node_id()
        check_shared(self.run, [self.hosts[name] for name in new_names], {*nodes, own_node})

    def _attach_watchdog(self) -> None:
        """Set the watchdog of every group, which explains a wait that exceeds its deadline."""
        for hosts in self.hosts.values():
            hosts.watchdog = self._watchdog


def _is_unchanged(planned: GroupPlan, running: GroupPlan) -> bool:
    """Return whether two plans of a group differ at most in a number of threads above 0, which can be set without a restart."""
    return replace(planned, threads=bool(planned.threads)) == replace(running, threads=bool(running.threads))

"""Binds a plan to a live Ray cluster: placement groups on the planned nodes, and the processes in them.

A group without room is an error within 2 s that names the group, the resource, what was requested, what is free and in
total, who holds it, and what to change. It is raised at plan time from the live view, and at bind time if the room was
taken in between. In the second case everything that was created is removed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from nonet.controller.cluster import read_live_view, wait_for_settled_view
from nonet.controller.groups.lifetimes import list_remains
from nonet.controller.plan import GroupPlan, Plan, describe_lost_room, plan
from nonet.controller.scenario import Scenario
from nonet.deadlines import DEFAULTS, Deadlines
from nonet.errors import PlacementError
from nonet.workers.devices import PoolEnvironment
from nonet.workers.runtime import OWNED, ActorGroup, GroupLifetime, RoleSpec, WorkerResources

NO_ROOM_PATIENCE_S = 1.0  # how long Ray must report that a group has no room before binding fails
PATIENCE_S = (
    0.8  # how long planning is repeated: resources of a run that just ended become free some 100 ms late
)
STOP_GRACE_S = 10.0  # how long processes may take to call the teardown of their roles
GONE_PATIENCE_S = 20.0  # how long the names of stopped workers may stay in use
RESTARTS = -1  # Ray restarts a stateless worker without limit; whoever awaits its answer limits the attempts
_FIRST_POLL_S, _POLL_S = 0.002, 0.02  # the first pause between looks at placement groups, and the longest
_SETTLE_PATIENCE_S = 0.4  # how long an error waits for a consistent view of the cluster
_NO_ROOM_STATES = ("NO_RESOURCES", "INFEASIBLE")  # scheduling states that Ray reports

__all__ = ["GroupBinding", "plan_live", "read_live_view"]


def plan_live(scenario: Scenario, *, patience_s: float = PATIENCE_S, **options: Any) -> Plan:
    """Make a plan on what is free now.

    Args:
        scenario: The scenario.
        patience_s: How long planning is repeated if there is no room.
        **options: Further arguments of `plan`.

    Raises:
        PlacementError: There is no room after `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return plan(scenario, read_live_view(), **options)
        except PlacementError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # nodes report their free resources about that often


class GroupBinding:
    """The processes and placement groups of a plan's groups; creating it starts them.

    Args:
        plan: The plan.
        specs: The specs of the roles, by role.
        life: The lifetime of the processes and placement groups; they are detached if the run outlives its creator.
        envs: The environment of each pool: {python | image | pip, vars}.
        stage: The stage whose groups are started; by default those that the plan begins with.
        deadlines: The deadlines of the start and of waits among ranks.
    """

    def __init__(
        self,
        plan: Plan,
        specs: Mapping[str, RoleSpec],
        life: GroupLifetime = OWNED,
        envs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        stage: str = "",
        deadlines: Deadlines = DEFAULTS,
    ):
        self._deadlines = deadlines
        self.groups: tuple[GroupPlan, ...] = ()
        self._specs, self._life, self._envs = specs, life, dict(envs or {})
        self._placement_groups: dict[str, PlacementGroup] = {}
        self.hosts: dict[str, ActorGroup] = {}
        self.change((), plan.list_groups(stage) if stage else plan.groups)

    def change(self, stops: Collection[str], starts: Sequence[GroupPlan]) -> None:
        """Stop some groups with their placement groups, and start others; if that fails, all groups are stopped.

        `hosts` stays the same mapping, so that everyone who holds a reference to it sees the current groups.

        Args:
            stops: The names of the groups to stop.
            starts: The groups to start.
        """
        try:
            if stops:
                self._end(stops)
                # The names of detached workers must be free before groups of the same names start.
                gone = {self._life.format_name(name) for name in stops}
                _wait_until(
                    lambda: (
                        not gone & {worker.rpartition("-")[0] for worker in self._list_remaining_workers()}
                    ),
                    GONE_PATIENCE_S,
                )
            staying = tuple(group for group in self.groups if group.name not in stops)
            self.groups = (*staying, *starts)
            for group in starts:
                if not group.shares:
                    self._placement_groups[group.name] = _reserve(group, self._life)
            self._wait_for_placement_groups()
            for pool, env in self._envs.items():
                nodes = {node for group in starts if group.pool == pool for node in group.nodes}
                PoolEnvironment.from_options(env).check_interpreter(pool, nodes, self._deadlines.start)
            for group in starts:
                self.hosts[group.name] = self._start(group)
        except BaseException:
            self.stop()
            raise

    def set_threads(self, groups: Sequence[GroupPlan]) -> None:
        """Replace the plans of groups that stay, and send their workers the planned number of threads without waiting."""
        plan_by_name = {group.name: group for group in groups}
        self.groups = tuple(plan_by_name.get(group.name, group) for group in self.groups)
        for group in groups:
            self.hosts[group.name].set_threads(group.threads)

    def stop(self, *, at_once: bool = False) -> None:
        """Stop every process and remove the placement groups.

        Args:
            at_once: Whether to kill the processes without calling the teardown of their roles.
        """
        self._end({*self.hosts, *self._placement_groups}, at_once=at_once)
        self.groups = ()

    def list_dead_workers(self) -> list[str]:
        """Return the names of workers whose processes are dead, such as "trainer-0"."""
        return [f"{hosts.name}-{rank}" for hosts in self.hosts.values() for rank in hosts.find_dead_ranks()]

    def _end(self, names: Collection[str], *, at_once: bool = False) -> None:
        """Stop the processes of these groups, remove their placement groups, and forget both."""
        running = [self.hosts[name] for name in names if name in self.hosts]
        reserved = {name: self._placement_groups[name] for name in names if name in self._placement_groups}
        try:
            stop_refs = [] if at_once else [ref for hosts in running for ref in hosts.request_stop()]
            if stop_refs:
                ray.wait(stop_refs, num_returns=len(stop_refs), timeout=STOP_GRACE_S)
        finally:  # also if the wait is interrupted
            for hosts in running:
                hosts.kill()
            for group in reserved.values():
                remove_placement_group(group)
        _wait_until(lambda: all(state == "REMOVED" for state, _ in _read_states(reserved).values()), 0.5)
        for name in names:
            self.hosts.pop(name, None)
            self._placement_groups.pop(name, None)

    def _list_remaining_workers(self) -> list[str]:
        """Return the names of the run's workers that Ray still knows; none if they are not detached.

        Ray knows a detached worker until some milliseconds after its end.
        """
        return list_remains(self._life.run)[0] if self._life.detached else []

    def _start(self, group: GroupPlan) -> ActorGroup:
        """Start the processes of a group in its placement group."""
        return ActorGroup(
            {role: self._specs[role] for role in group.roles},
            workers=group.workers,
            name=group.name,
            life=replace(self._life, restarts=RESTARTS if _is_stateless(group) else 0),
            seat=WorkerResources(
                device=group.device,
                cpus=group.cpus,
                devices=group.devices,
                threads=group.threads,
                placement_group=self._placement_groups[group.shares or group.name],
                env=self._envs.get(group.pool),
            ),
            deadlines=self._deadlines,
        )

    def _wait_for_placement_groups(self) -> None:
        """Wait for all placement groups.

        Raises:
            PlacementError: Ray has reported for NO_ROOM_PATIENCE_S seconds that a group has no room, or a group is not there
                within the start deadline. All groups are stopped then.
        """
        began, pause_s = time.monotonic(), _FIRST_POLL_S
        waiting = set(self._placement_groups)
        while True:
            states = _read_states(self._placement_groups)
            waiting = {name for name in waiting if states[name][0] != "CREATED"}
            if not waiting:
                return
            waited = time.monotonic() - began
            late = [
                name
                for name in self._placement_groups
                if name in waiting
                and (
                    waited > self._deadlines.start
                    or (states[name][1] in _NO_ROOM_STATES and waited > NO_ROOM_PATIENCE_S)
                )
            ]
            if late:
                self._stop_and_raise(late[0])
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 2 * pause_s)

    def _stop_and_raise(self, name: str) -> None:
        """Stop all groups and raise PlacementError, which says who holds the resources that a group was planned on."""
        group = next(group for group in self.groups if group.name == name)
        self.stop()
        raise PlacementError(describe_lost_room(group, wait_for_settled_view(_SETTLE_PATIENCE_S)))


def _is_stateless(group: GroupPlan) -> bool:
    """Return whether a restarted worker needs no state but what its recorded calls create again, as for rewards."""
    return all(".reward." in role for role in group.roles)


def _reserve(group: GroupPlan, life: GroupLifetime) -> PlacementGroup:
    """Request the placement group of a group of processes, with one bundle per worker on its planned node."""
    return placement_group(
        [dict(group.bundle)] * group.workers,
        strategy="PACK",
        name=life.format_name(group.name),
        lifetime="detached" if life.detached else None,
        bundle_label_selector=[{"ray.io/node-id": node} for node in group.nodes],
    )


def _read_states(groups: Mapping[str, PlacementGroup]) -> dict[str, tuple[str, str]]:
    """Return (state, scheduling state) of each placement group, with one call to Ray."""
    table = placement_group_table()
    rows = {name: table.get(group.id.hex(), {}) for name, group in groups.items()}
    return {
        name: (row.get("state", "REMOVED"), row.get("stats", {}).get("scheduling_state", ""))
        for name, row in rows.items()
    }


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until a condition holds, or the timeout has passed."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)

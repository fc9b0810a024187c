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

NO_ROOM_S = 1.0  # how long Ray may say that there is no room before we believe it
PATIENCE_S = 0.8  # what a run that just ended holds is reported free some 100 ms late
STOP_S = 10.0
GONE_S = 20.0
RESTARTS = (
    -1
)  # without end, of a worker that needs only its remembered calls to be what it was; who waits counts them
_FIRST_POLL_S, _POLL_S, _SETTLE_S = 0.002, 0.02, 0.4
_NO_ROOM = ("NO_RESOURCES", "INFEASIBLE")

__all__ = ["GroupBinding", "plan_live", "read_live_view"]


def plan_live(scenario: Scenario, *, patience_s: float = PATIENCE_S, **options: Any) -> Plan:
    """Make a plan on what is free now.

    Args:
        scenario: The scenario.
        patience_s: How long to look again if there is no room, because a run that just ended is reported free late.
        **options: Further arguments of `plan`.

    Raises:
        PlacementError: There is no room.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return plan(scenario, read_live_view(), **options)
        except PlacementError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class GroupBinding:
    """The running groups of a plan.

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
        self._groups: dict[str, PlacementGroup] = {}
        self.hosts: dict[str, ActorGroup] = {}
        self.change((), plan.list_groups(stage) if stage else plan.groups)

    def change(self, stops: Collection[str], starts: Sequence[GroupPlan]) -> None:
        """Stop some groups with their placement groups, and start others; if that fails, all groups are stopped.

        `hosts` stays the same mapping, so that its holders see the current groups.
        """
        try:
            if stops:
                self._end(stops)
                names = {self._life.format_name(name) for name in stops}
                _wait_until(
                    lambda: not names & {left.rpartition("-")[0] for left in self._list_remaining_workers()},
                    GONE_S,
                )
            staying = tuple(group for group in self.groups if group.name not in stops)
            self.groups = (*staying, *starts)
            for group in starts:
                if not group.shares:
                    self._groups[group.name] = _reserve(group, self._life)
            self._wait()
            for pool, env in self._envs.items():
                nodes = {node for group in starts if group.pool == pool for node in group.nodes}
                PoolEnvironment.from_options(env).check_interpreter(pool, nodes, self._deadlines.start)
            for group in starts:
                self.hosts[group.name] = self._start(group)
        except BaseException:
            self.stop()
            raise

    def set_threads(self, groups: Sequence[GroupPlan]) -> None:
        """Set the planned number of threads of groups that stay, without waiting."""
        named = {group.name: group for group in groups}
        self.groups = tuple(named.get(group.name, group) for group in self.groups)
        for group in groups:
            self.hosts[group.name].set_threads(group.threads)

    def stop(self, *, at_once: bool = False) -> None:
        """Stop every process and remove the placement groups.

        Args:
            at_once: Whether to kill the processes without calling the teardown of their roles.
        """
        self._end({*self.hosts, *self._groups}, at_once=at_once)
        self.groups = ()

    def list_dead_workers(self) -> list[str]:
        """Return the names of workers that do not answer."""
        return [f"{hosts.name}-{rank}" for hosts in self.hosts.values() for rank in hosts.find_dead_ranks()]

    def _end(self, names: Collection[str], *, at_once: bool = False) -> None:
        """Stop the processes of these groups and remove their placement groups; their names are free afterwards."""
        ended = [self.hosts[name] for name in names if name in self.hosts]
        bundles = {name: self._groups[name] for name in names if name in self._groups}
        said = [] if at_once else [ref for hosts in ended for ref in hosts.request_stop()]
        if said:
            ray.wait(said, num_returns=len(said), timeout=STOP_S)
        for hosts in ended:
            hosts.kill()
        for group in bundles.values():
            remove_placement_group(group)
        _wait_until(lambda: all(state == "REMOVED" for state, _ in _read_states(bundles).values()), 0.5)
        for name in names:
            self.hosts.pop(name, None)
            self._groups.pop(name, None)

    def _list_remaining_workers(self) -> list[str]:
        """Return the names of the run's remaining workers.

        The name of a detached worker is free only some milliseconds after its end.
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
                group.device,
                group.cpus,
                group.devices,
                group.threads,
                self._groups[group.shares or group.name],
                self._envs.get(group.pool),
            ),
            deadlines=self._deadlines,
        )

    def _wait(self) -> None:
        """Wait for all placement groups.

        Raises:
            PlacementError: Ray has reported for NO_ROOM_S seconds that a group has no room.
        """
        began, pause_s = time.monotonic(), _FIRST_POLL_S
        waiting = set(self._groups)
        while True:
            states = _read_states(self._groups)
            waiting = {name for name in waiting if states[name][0] != "CREATED"}
            if not waiting:
                return
            waited = time.monotonic() - began
            late = [
                name
                for name in self._groups
                if name in waiting
                and (waited > self._deadlines.start or (states[name][1] in _NO_ROOM and waited > NO_ROOM_S))
            ]
            if late:
                self._refuse(late[0])
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 2 * pause_s)

    def _refuse(self, name: str) -> None:
        """Stop everything and raise PlacementError, which says who holds what the plan counted on."""
        group = next(group for group in self.groups if group.name == name)
        self.stop()
        raise PlacementError(describe_lost_room(group, wait_for_settled_view(_SETTLE_S)))


def _is_stateless(group: GroupPlan) -> bool:
    """Return whether a restarted worker is complete once its recorded calls are repeated, as rewards are."""
    return all(".reward." in role for role in group.roles)


def _reserve(group: GroupPlan, life: GroupLifetime) -> PlacementGroup:
    """Create the placement group of a group of processes."""
    return placement_group(
        [dict(group.bundle)] * group.workers,
        strategy="PACK",
        name=life.format_name(group.name),
        lifetime="detached" if life.detached else None,
        bundle_label_selector=[{"ray.io/node-id": node} for node in group.nodes],
    )


def _read_states(groups: Mapping[str, PlacementGroup]) -> dict[str, tuple[str, str]]:
    """Return the state of each group and the scheduler's last report on it, in one call."""
    table = placement_group_table()
    rows = {name: table.get(group.id.hex(), {}) for name, group in groups.items()}
    return {
        name: (row.get("state", "REMOVED"), row.get("stats", {}).get("scheduling_state", ""))
        for name, row in rows.items()
    }


def _wait_until(true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(_POLL_S)

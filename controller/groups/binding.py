"""The binder: a Plan on a live Ray: placement groups pinned to the planned nodes, then the processes in them.

What has no room is an error within 2 s that names group, resource, asked, free, total, who holds it and what to change: at plan
time against the live view, and at bind time when somebody took the room in between. Then everything made is removed again,
so that nothing half-made stays.
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

from nonet.controller.cluster import live_view, settled_view
from nonet.controller.groups.lifetimes import left_of
from nonet.controller.plan import GroupPlan, Plan, plan, taken_since
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

__all__ = ["Binding", "live_view", "plan_live"]


def plan_live(scenario: Scenario, *, patience_s: float = PATIENCE_S, **options: Any) -> Plan:
    """A plan on what is free now, looked at again for `patience_s` where it is short. Raises PlacementError."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return plan(scenario, live_view(), **options)
        except PlacementError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class Binding:
    """The running groups of a plan. `stop` ends them and their placement groups; a re-plan changes some of them.

    life   of its groups; those of a run that outlives its maker are detached, and so are their placement groups
    envs   each pool's environment: {python | image | pip, vars}
    deadlines  of starting, and of what ranks wait for among themselves
    stage  whose groups to begin with; those the plan begins with by default
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
        self.change((), plan.groups_at(stage) if stage else plan.groups)

    def change(self, stops: Collection[str], starts: Sequence[GroupPlan]) -> None:
        """End some groups, with their placement groups, and start others. Where that fails, everything is ended.

        `hosts` stays the same mapping, so that who holds it sees the groups there are.
        """
        try:
            if stops:
                self._end(stops)
                names = {self._life.format_name(name) for name in stops}
                _until(lambda: not names & {left.rpartition("-")[0] for left in self._left()}, GONE_S)
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
        """Have groups that stay compute with their planned threads; never waits."""
        named = {group.name: group for group in groups}
        self.groups = tuple(named.get(group.name, group) for group in self.groups)
        for group in groups:
            self.hosts[group.name].set_threads(group.threads)

    def stop(self, *, at_once: bool = False) -> None:
        """End every process, `at_once` without a word to its roles, then give the bundles back."""
        self._end({*self.hosts, *self._groups}, at_once=at_once)
        self.groups = ()

    def dead(self) -> list[str]:
        """Names of workers that do not answer."""
        return [f"{hosts.name}-{rank}" for hosts in self.hosts.values() for rank in hosts.find_dead_ranks()]

    def _end(self, names: Collection[str], *, at_once: bool = False) -> None:
        """End these groups' processes and give their bundles back; their names are free afterwards."""
        ended = [self.hosts[name] for name in names if name in self.hosts]
        bundles = {name: self._groups[name] for name in names if name in self._groups}
        said = [] if at_once else [ref for hosts in ended for ref in hosts.request_stop()]
        if said:
            ray.wait(said, num_returns=len(said), timeout=STOP_S)
        for hosts in ended:
            hosts.kill()
        for group in bundles.values():
            remove_placement_group(group)
        _until(lambda: all(state == "REMOVED" for state, _ in _states(bundles).values()), 0.5)
        for name in names:
            self.hosts.pop(name, None)
            self._groups.pop(name, None)

    def _left(self) -> list[str]:
        """Names of the run's workers that still are; a detached one's name is free some milliseconds after its end."""
        return left_of(self._life.run)[0] if self._life.detached else []

    def _start(self, group: GroupPlan) -> ActorGroup:
        return ActorGroup(
            {role: self._specs[role] for role in group.roles},
            workers=group.workers,
            name=group.name,
            life=replace(self._life, restarts=RESTARTS if _stateless(group) else 0),
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
        """Until every bundle is there. Raises PlacementError once Ray has said NO_ROOM_S long that one has no room."""
        began, pause_s = time.monotonic(), _FIRST_POLL_S
        waiting = set(self._groups)
        while True:
            states = _states(self._groups)
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
        """Give everything back, then say who has what the plan counted on."""
        group = next(group for group in self.groups if group.name == name)
        self.stop()
        raise PlacementError(taken_since(group, settled_view(_SETTLE_S)))


def _stateless(group: GroupPlan) -> bool:
    """Whether a restarted worker needs only its remembered calls to be what it was: rewards."""
    return all(".reward." in role for role in group.roles)


def _reserve(group: GroupPlan, life: GroupLifetime) -> PlacementGroup:
    return placement_group(
        [dict(group.bundle)] * group.workers,
        strategy="PACK",
        name=life.format_name(group.name),
        lifetime="detached" if life.detached else None,
        bundle_label_selector=[{"ray.io/node-id": node} for node in group.nodes],
    )


def _states(groups: Mapping[str, PlacementGroup]) -> dict[str, tuple[str, str]]:
    """Each group's state and what the scheduler last said of it, in one call for all."""
    table = placement_group_table()
    rows = {name: table.get(group.id.hex(), {}) for name, group in groups.items()}
    return {
        name: (row.get("state", "REMOVED"), row.get("stats", {}).get("scheduling_state", ""))
        for name, row in rows.items()
    }


def _until(true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(_POLL_S)

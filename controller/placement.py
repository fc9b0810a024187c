"""The binder: a Plan on a live Ray: placement groups pinned to the planned nodes, then the processes in them.

What has no room is an error within 2 s that names group, resource, asked, free, total, who holds it and what to change: at plan
time against the live view, and at bind time when somebody took the room in between. Then everything made is removed again,
so that nothing half-made stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from nonet.controller.live import live_view, settled_view
from nonet.controller.plan import GroupPlan, Plan, plan
from nonet.controller.scenario import Scenario
from nonet.controller.shortage import taken_since
from nonet.errors import PlacementError
from nonet.workers.environment import Environment
from nonet.workers.host import RoleSpec
from nonet.workers.hosts import OWNED, Hosts, Life, Seat

READY_S = 30.0  # for Ray's scheduler to answer at all
NO_ROOM_S = 1.0  # how long Ray may say that there is no room before we believe it
PATIENCE_S = 0.8  # what a run that just ended holds is reported free some 100 ms late
STOP_S = 10.0
RESTARTS = 3  # of a worker that needs only its remembered calls to be what it was
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
    """The running groups of a plan. `stop` ends them and their placement groups.

    life   of its groups; those of a run that outlives its maker are detached, and so are their placement groups
    envs   each pool's environment: {python | image | pip, vars}
    """

    def __init__(
        self,
        plan: Plan,
        specs: Mapping[str, RoleSpec],
        life: Life = OWNED,
        envs: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        self.plan, self._life, self._envs = plan, life, dict(envs or {})
        self._groups: dict[str, PlacementGroup] = {}
        self.hosts: dict[str, Hosts] = {}
        try:
            for group in plan.groups:
                if not group.shares:
                    self._groups[group.name] = _reserve(group, life)
            self._wait()
            for pool, env in self._envs.items():
                nodes = {node for group in plan.groups if group.pool == pool for node in group.nodes}
                Environment.of(env).check(pool, nodes)
            for group in plan.groups:
                self.hosts[group.name] = self._start(group, specs)
        except BaseException:
            self.stop()
            raise

    def stop(self, *, at_once: bool = False) -> None:
        """End every process, `at_once` without a word to its roles, then give the bundles back."""
        said = [] if at_once else [ref for hosts in self.hosts.values() for ref in hosts.say_stop()]
        if said:
            ray.wait(said, num_returns=len(said), timeout=STOP_S)
        for hosts in self.hosts.values():
            hosts.kill()
        for group in self._groups.values():
            remove_placement_group(group)
        _until(lambda: all(state == "REMOVED" for state, _ in _states(self._groups).values()), 0.5)
        self.hosts, self._groups = {}, {}

    def dead(self) -> list[str]:
        """Names of workers that do not answer."""
        return [f"{hosts.name}-{rank}" for hosts in self.hosts.values() for rank in hosts.dead()]

    def _start(self, group: GroupPlan, specs: Mapping[str, RoleSpec]) -> Hosts:
        return Hosts(
            {role: specs[role] for role in group.roles},
            workers=group.workers,
            name=group.name,
            life=replace(self._life, restarts=RESTARTS if _stateless(group) else 0),
            seat=Seat(
                group.device,
                group.cpus,
                group.devices,
                group.threads,
                self._groups[group.shares or group.name],
                self._envs.get(group.pool),
            ),
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
                and (waited > READY_S or (states[name][1] in _NO_ROOM and waited > NO_ROOM_S))
            ]
            if late:
                self._refuse(late[0])
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 2 * pause_s)

    def _refuse(self, name: str) -> None:
        """Give everything back, then say who has what the plan counted on."""
        self.stop()
        group = next(group for group in self.plan.groups if group.name == name)
        raise PlacementError(taken_since(group, settled_view(_SETTLE_S)))


def _stateless(group: GroupPlan) -> bool:
    """Whether a restarted worker needs only its remembered calls to be what it was: rewards."""
    return all(".reward." in role for role in group.roles)


def _reserve(group: GroupPlan, life: Life) -> PlacementGroup:
    return placement_group(
        [dict(group.bundle)] * group.workers,
        strategy="PACK",
        name=life.name_of(group.name),
        lifetime="detached" if life.detached else None,
        bundle_label_selector=[{"ray.io/node-id": node} for node in group.nodes],
    )


def _states(groups: Mapping[str, PlacementGroup]) -> dict[str, tuple[str, str]]:
    """Each group's state and what the scheduler last said of it, in one call for all."""
    table = placement_group_table()
    found = {name: table.get(group.id.hex(), {}) for name, group in groups.items()}
    return {
        name: (row.get("state", "REMOVED"), row.get("stats", {}).get("scheduling_state", ""))
        for name, row in found.items()
    }


def _until(true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(_POLL_S)

"""The binder: a Plan on a live Ray. Reads the cluster's view, makes placement groups, starts the processes.

A bundle is pinned to the planned node by `ray.io/node-id`; whatever is not ready within the deadline is removed again, so
nothing half-made stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from nonet.controller.cluster import ClusterView, Node
from nonet.controller.plan import GroupPlan, Plan
from nonet.errors import PlacementError
from nonet.workers.device import device
from nonet.workers.host import RoleSpec
from nonet.workers.hosts import OWNED, Hosts, Life, Seat

READY_S = 30.0
STOP_S = 10.0
RESTARTS = 3


def live_view() -> ClusterView:
    """The nodes of the Ray this process is connected to, with what is free now."""
    free = ray._private.state.available_resources_per_node()  # the public API has only the cluster's sum
    return ClusterView(
        tuple(
            Node(
                node["NodeID"],
                dict(node["Resources"]),
                dict(free.get(node["NodeID"], {})),
                dict(node.get("Labels") or {}),
            )
            for node in ray.nodes()
            if node["Alive"]
        )
    )


class Binding:
    """The running groups of a plan. `stop` ends them and their placement groups.

    life   of its groups; those of a run are detached, and so are their placement groups
    """

    def __init__(self, plan: Plan, specs: Mapping[str, RoleSpec], life: Life = OWNED):
        self.plan, self._life = plan, life
        self._groups: dict[str, PlacementGroup] = {}
        self.hosts: dict[str, Hosts] = {}
        try:
            for group in plan.groups:
                if not group.shares:
                    self._groups[group.name] = _reserve(group, life.run)
            self._wait()
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
            ),
        )

    def _wait(self) -> None:
        for name, group in self._groups.items():
            if not group.wait(READY_S):
                raise PlacementError(
                    f"no room for group {name!r} within {READY_S:g} s: somebody took it after the plan was made; "
                    f"free now: {ray.available_resources()}"
                )


def _stateless(group: GroupPlan) -> bool:
    """Whether a restarted worker needs only its remembered calls to be what it was: rewards."""
    return all(".reward." in role for role in group.roles)


def _reserve(group: GroupPlan, run: str) -> PlacementGroup:
    bundle = {"CPU": group.cpus} if group.cpus else {device(group.device).resource: group.devices}
    where = [{"ray.io/node-id": node} for node in group.nodes]
    name, lifetime = (f"{run}/{group.name}", "detached") if run else (group.name, None)
    return placement_group(
        [bundle] * group.workers,
        strategy="PACK",
        name=name,
        lifetime=lifetime,
        bundle_label_selector=where,
    )

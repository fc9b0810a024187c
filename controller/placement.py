"""The binder: a Plan on a live Ray. Reads the cluster's view, makes placement groups, starts the processes.

A bundle is pinned to the planned node by `ray.io/node-id`; whatever is not ready within the deadline is removed again, so
nothing half-made stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from nonet.controller.cluster import ClusterView, Node
from nonet.controller.plan import GroupPlan, Plan
from nonet.errors import PlacementError
from nonet.workers.device import device
from nonet.workers.environment import Environment
from nonet.workers.group import Hosts
from nonet.workers.host import RoleSpec

READY_S = 30.0


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
    """The running groups of a plan. `stop` ends them and their placement groups."""

    def __init__(
        self,
        plan: Plan,
        specs: Mapping[str, RoleSpec],
        envs: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        self.plan, self._envs = plan, dict(envs or {})
        self._groups: dict[str, PlacementGroup] = {}
        self.hosts: dict[str, Hosts] = {}
        try:
            for group in plan.groups:
                if not group.shares:
                    self._groups[group.name] = _reserve(group)
            self._wait()
            for pool, env in self._envs.items():
                nodes = {node for group in plan.groups if group.pool == pool for node in group.nodes}
                Environment.of(env).check(pool, nodes)
            for group in plan.groups:
                self.hosts[group.name] = self._start(group, specs)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process, then give the bundles back."""
        for hosts in self.hosts.values():
            hosts.stop()
        for group in self._groups.values():
            remove_placement_group(group)
        self.hosts, self._groups = {}, {}

    def _start(self, group: GroupPlan, specs: Mapping[str, RoleSpec]) -> Hosts:
        return Hosts(
            {role: specs[role] for role in group.roles},
            workers=group.workers,
            name=group.name,
            device=group.device,
            cpus=group.cpus,
            devices=group.devices,
            threads=group.threads,
            env=self._envs.get(group.pool),
            placement_group=self._groups[group.shares or group.name],
        )

    def _wait(self) -> None:
        for name, group in self._groups.items():
            if not group.wait(READY_S):
                raise PlacementError(
                    f"no room for group {name!r} within {READY_S:g} s: somebody took it after the plan was made; "
                    f"free now: {ray.available_resources()}"
                )


def _reserve(group: GroupPlan) -> PlacementGroup:
    bundle = {"CPU": group.cpus} if group.cpus else {device(group.device).resource: group.devices}
    where = [{"ray.io/node-id": node} for node in group.nodes]
    return placement_group(
        [bundle] * group.workers, strategy="PACK", name=group.name, bundle_label_selector=where
    )

"""SpareNodes: which nodes of a cluster may be killed, so that the run has room on the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from nonet.controller.cluster import read_live_view
from nonet.controller.plan import plan
from nonet.controller.scenario import Scenario
from nonet.errors import ConfigError, PlacementError


class SpareNodes:
    """The nodes of a cluster that a run can lose. A node that was killed does not come back by itself.

    Args:
        scenario: The scenario of the run, which has not been started.
        replaces: Whether the cluster replaces nodes that it has lost, so that a run may lose any node.

    Raises:
        ConfigError: There is no such node.
    """

    def __init__(self, scenario: Scenario, *, replaces: bool):
        if os.environ.get("RAY_ADDRESS", "local") == "local":
            raise ConfigError("--kill node needs a cluster of several nodes; set RAY_ADDRESS to one")
        from nonet.workers.runtime import ensure_ray

        ensure_ray()
        self._scenario, self._replaces = scenario, replaces
        self._view = read_live_view()
        self._kept_nodes = _find_kept_nodes()
        others = [node.id for node in self._view.nodes if node.id not in self._kept_nodes]
        if not others:
            raise ConfigError(
                "--kill node never hits the head or this node, and the cluster has no other one"
            )
        if not self.choose(others):
            raise ConfigError(
                "--kill node: without any one of its nodes, the cluster has no room for the run; add a node, or say "
                "--nodes-return if the cluster replaces lost nodes"
            )

    def choose(self, node_ids: Sequence[str]) -> str:
        """Return which of some nodes may be killed now, "" for none."""
        living_ids = {node.id for node in read_live_view().nodes}
        for node_id in node_ids:
            may_be_killed = node_id in living_ids and node_id not in self._kept_nodes
            if may_be_killed and (self._replaces or self._has_room(living_ids - {node_id})):
                return node_id
        return ""

    def _has_room(self, node_ids: set[str]) -> bool:
        """Return whether the run fits on some of the nodes that the cluster had before it."""
        nodes = tuple(node for node in self._view.nodes if node.id in node_ids)
        held = tuple(holding for holding in self._view.held if holding.node in node_ids)
        try:
            plan(self._scenario, replace(self._view, nodes=nodes, held=held))
        except PlacementError:
            return False
        return True


def _find_kept_nodes() -> set[str]:
    """Return the nodes that are never killed: the head and the one of this process."""
    import ray

    heads = {
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and "node:__internal_head__" in node["Resources"]
    }
    return {*heads, ray.get_runtime_context().get_node_id()}

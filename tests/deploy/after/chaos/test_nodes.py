"""Which nodes `nonet chaos --kill node` may kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from nonet.controller.cluster import ClusterView, Node
from nonet.controller.scenario import Scenario
from nonet.deploy.after.chaos import nodes as nodes_module
from nonet.deploy.after.chaos.nodes import SpareNodes
from nonet.deploy.run import api
from nonet.errors import ConfigError


def make_view(cpus_by_node: dict[str, float]) -> ClusterView:
    return ClusterView(
        tuple(Node(name, {"CPU": cpus}, free={"CPU": cpus}) for name, cpus in cpus_by_node.items())
    )


@pytest.fixture
def scenario(ring: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Return a scenario, on a cluster whose head is the node `head`."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("nonet.workers.runtime.ensure_ray", lambda: None)
    monkeypatch.setattr(nodes_module, "_find_kept_nodes", lambda: {"head"})
    return api.scenario(ring / "ring.yaml").scenario


def use_cluster(monkeypatch: pytest.MonkeyPatch, cpus_by_node: dict[str, float]) -> None:
    monkeypatch.setattr(nodes_module, "read_live_view", lambda: make_view(cpus_by_node))


def test_a_node_is_killed_only_if_the_run_has_room_on_the_others(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
):
    use_cluster(monkeypatch, {"head": 0.0, "b": 8.0, "c": 8.0})
    nodes = SpareNodes(scenario, replaces=False)
    assert nodes.choose(["head", "b"]) == "b"
    assert nodes.choose(["head"]) == ""
    use_cluster(monkeypatch, {"head": 0.0, "c": 8.0})  # b was lost: without c, there is no room
    assert nodes.choose(["c"]) == ""
    assert SpareNodes(scenario, replaces=True).choose(["c"]) == "c"


def test_a_cluster_without_a_spare_node_is_refused(scenario: Scenario, monkeypatch: pytest.MonkeyPatch):
    use_cluster(monkeypatch, {"head": 0.0, "b": 8.0})
    with pytest.raises(ConfigError, match="has no room for the run; add a node, or say --nodes-return"):
        SpareNodes(scenario, replaces=False)
    use_cluster(monkeypatch, {"head": 8.0})
    with pytest.raises(ConfigError, match="never hits the head or this node"):
        SpareNodes(scenario, replaces=True)

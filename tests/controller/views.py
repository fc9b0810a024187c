"""Cluster views for planner tests."""

from __future__ import annotations

from typing import Any

from nonet.controller.cluster.view import ClusterView, DeviceFacts, Node
from nonet.controller.scenario.scenario import Scenario, make_scenario
from nonet.workers.roles.kinds import RoleKind

OWN_KIND = RoleKind(
    "nonet.workers.runtime:DistributeWorker"
)  # views:OWN_KIND, of roles that only use up resources


def node(
    name: str, free: dict[str, float] | None = None, labels: dict[str, str] | None = None, **total: float
) -> Node:
    """Make a node with these resources; `free` says what is left where it is not all."""
    return Node(name, dict(total), {**total, **(free or {})}, labels or {})


def gpu_nodes(
    count: int, gpus: float = 4.0, racks: int = 0, memory_bytes: int = 0, domain: int = 0
) -> ClusterView:
    """`count` nodes of `gpus` GPUs, `racks` of them to a rack (0: no rack labels)."""
    nodes = []
    for i in range(count):
        total = {"CPU": 8.0, "GPU": gpus}
        labels = {"rack": f"r{i // racks}"} if racks else {}
        nodes.append(Node(f"n{i:03}", total, dict(total), labels, {"GPU": DeviceFacts(memory_bytes, domain)}))
    return ClusterView(tuple(nodes))


def scenario(**parts: Any) -> Scenario:
    """Make a small scenario with one supervised stage, changed by `parts`."""
    plain: dict[str, Any] = {
        "name": "small",
        "data": {"interactions": "x.parquet"},
        "pools": {"gpu": {"device": "cuda"}, "npu": {"device": "npu"}},
        "stages": {"pretrain": {"epochs": 1}},
    }
    return make_scenario({**plain, **parts})


RL = {"steps": 2, "users": 8, "rewards": {"hit": {}}}

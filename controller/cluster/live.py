"""The view of a running Ray cluster: nodes, labels, free resources, and the placement groups and actors that use the rest.

It makes two calls to Ray's control store and one for the actors, which take 5 ms on a small cluster. Nothing is scheduled.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ray
from ray._private import state as ray_state
from ray.util.placement_group import placement_group_table

from nonet.controller.cluster.view import ClusterView, DeviceFacts, Holding, Node

# The memory of one device by Ray's name of its type. Types with several sizes (A100: 40 or 80 GB) are left out.
_MEMORY_GB = {
    "T4": 16,
    "L4": 24,
    "A10G": 24,
    "L40S": 48,
    "A100-40G": 40,
    "A100-80G": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
}
_NOT_DEVICES = ("CPU", "memory", "object_store_memory")  # Ray's resources that are no accelerators


_left_out: frozenset[str] = frozenset()  # nodes on which this process places nothing


def leave_out_nodes(ids: Iterable[str]) -> None:
    """Leave some nodes, and no others, out of the views that this process reads."""
    global _left_out
    _left_out = frozenset(ids)


def read_live_view() -> ClusterView:
    """Return the nodes of the connected Ray cluster with their free resources, and who holds the others.

    Nodes that Ray drains are left out, because they are about to end, and those of `leave_out_nodes`.
    """
    free = ray_state.available_resources_per_node()  # the public API has only the cluster's sum
    holdings = tuple(_list_holdings())
    held: dict[tuple[str, str], float] = defaultdict(float)
    for holding in holdings:
        held[holding.node, holding.resource] += holding.amount
    draining = list_draining_nodes()
    nodes = (
        _make_node(node, free.get(node["NodeID"], {}), held)
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining | _left_out
    )
    return ClusterView(tuple(nodes), holdings)


def list_draining_nodes() -> set[str]:
    """Return the ids of the nodes that Ray drains, such as those that a cloud provider is about to take away."""
    return set(ray_state.state.get_draining_nodes())


def wait_for_settled_view(timeout_s: float) -> ClusterView:
    """Wait until the free and held resources of each node add up to its total; nodes report about 100 ms late.

    Args:
        timeout_s: Seconds after which the last view is returned, consistent or not.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        view = read_live_view()
        held_units: dict[tuple[str, str], float] = defaultdict(float)
        for holding in view.held:
            held_units[holding.node, holding.resource] += holding.amount
        is_late = any(
            node.free[resource] + held_units[node.id, resource] < node.total[resource] - 1e-6
            for node in view.nodes
            for resource in node.devices | {"CPU": 0}
            if resource in node.total
        )
        if not is_late or time.monotonic() > deadline:
            return view
        time.sleep(0.02)


def _make_node(node: dict[str, Any], free: dict[str, float], held: Mapping[tuple[str, str], float]) -> Node:
    """Build a node from Ray's record. Its free resources are at most those that no holder uses."""
    total, labels = dict(node["Resources"]), dict(node.get("Labels") or {})
    accelerator = labels.get("ray.io/accelerator-type", "")
    memory = _MEMORY_GB.get(accelerator, 0) * 10**9
    devices = {
        name: DeviceFacts(memory_bytes=memory)
        for name, amount in total.items()
        if name not in _NOT_DEVICES and ":" not in name and amount >= 1
    }
    node_id = node["NodeID"]
    unused = {n: min(free.get(n, 0.0), max(0.0, total[n] - held.get((node_id, n), 0.0))) for n in total}
    return Node(node_id, total, free=unused, labels=labels, devices=devices)


def _list_holdings() -> Iterator[Holding]:
    """Yield the resources that each placement group, and each actor outside of placement groups, holds."""
    for group in placement_group_table().values():
        if group["state"] in ("CREATED", "RESCHEDULING"):
            name = group["name"] or f"placement group {group['placement_group_id'][:8]}"
            for index, bundle in group["bundles"].items():
                node = group["bundles_to_node_id"].get(index, "")
                yield from (
                    Holding(name, node, resource, amount) for resource, amount in bundle.items() if node
                )
    for actor in _list_actors("ALIVE"):
        name = f"actor {actor.name or actor.class_name} (pid {actor.pid})"
        node, resources = actor.address.node_id.hex(), dict(actor.required_resources)
        is_in_group = any("_group_" in resource for resource in resources)  # counted with its placement group
        yield from (
            Holding(name, node, resource, amount) for resource, amount in resources.items() if not is_in_group
        )


def list_dead_actors(namespace: str) -> set[str]:
    """Return the names of the actors of a namespace that have ended for good, as far as Ray remembers them."""
    return {actor.name for actor in _list_actors("DEAD") if actor.ray_namespace == namespace and actor.name}


def _list_actors(state: str) -> Iterator[Any]:
    """Yield Ray's record of every actor in a state; none if Ray's internal interface has changed."""
    from ray.core.generated import gcs_pb2

    connect = getattr(ray_state.state, "_connect_and_get_accessor", None)
    for raw in connect().get_actor_table(None, state) if connect else ():
        actor = gcs_pb2.ActorTableData.FromString(raw)  # pyright: ignore[reportAttributeAccessIssue]
        if actor.state == getattr(gcs_pb2.ActorTableData, state):  # pyright: ignore[reportAttributeAccessIssue]
            yield actor

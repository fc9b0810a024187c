"""Messages that explain why a group does not fit: its request, the free resources, their other users, and a remedy.

The same text is used at plan time, against a view, and at bind time, if resources were taken in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from nonet.controller.cluster import ClusterView
from nonet.controller.plan.packing import Capacity
from nonet.controller.plan.requests import GroupRequest

_NAMED = 4


class PlacedGroup(Protocol):
    """The part of a `GroupPlan` that a message about a shortage uses."""

    @property
    def name(self) -> str:
        """The name of the group."""
        ...

    @property
    def pool(self) -> str:
        """The pool of the scenario."""
        ...

    @property
    def workers(self) -> int:
        """The number of workers."""
        ...

    @property
    def resource(self) -> str:
        """Ray's name of the device."""
        ...

    @property
    def bundle(self) -> Mapping[str, float]:
        """Resources reserved for one worker."""
        ...

    @property
    def nodes(self) -> Sequence[str]:
        """The node of each rank."""
        ...


def describe_shortage(
    request: GroupRequest, capacity: Capacity, view: ClusterView, placed_groups: Sequence[PlacedGroup]
) -> str:
    """Return the message for a group that does not fit.

    Args:
        request: The group.
        capacity: What is free after the other groups of the plan.
        view: The cluster.
        placed_groups: The groups of the plan that were placed before.
    """
    nodes = capacity.find_matching_nodes(request.labels)
    ids = {node.id for node in nodes}
    total = sum(node.total.get(request.resource, 0.0) for node in nodes)
    before = sum(node.free.get(request.resource, 0.0) for node in nodes)
    left = capacity.sum_free(request.resource, nodes)
    needed = request.least * request.bundle
    text = (
        f"group {request.name!r} (pool {request.pool}) needs {needed:g} {request.resource}"
        f"{_format_labels(request)}{_format_topology(request)}, the cluster has {total:g} in "
        f"{len(nodes)} of {len(view.nodes)} nodes, "
        f"{before:g} free before this plan"
    )
    if left < before - 1e-6:
        text += f", {left:g} free after its other groups"
    held_by_holder = sum_by_holder(view, request.resource, ids)
    mine = Counter[str]()
    for group in placed_groups:
        amount = sum(group.bundle.get(request.resource, 0.0) for node in group.nodes if node in ids)
        if amount:
            mine[f"this plan's {group.name}"] += amount  # type: ignore[assignment]
    return f"{text}. {format_holders({**held_by_holder, **mine})}{_suggest_changes(request, capacity, view, left)}"


def sum_by_holder(view: ClusterView, resource: str, nodes: Iterable[str]) -> dict[str, float]:
    """Return the units of a resource that each holder has on the given nodes, the largest first.

    Args:
        view: The cluster, with who holds what.
        resource: Ray's name of the resource.
        nodes: Ids of the nodes.
    """
    among, taken = set(nodes), Counter[str]()
    for holding in view.held:
        if holding.resource == resource and holding.node in among:
            taken[holding.by] += holding.amount  # type: ignore[assignment]
    return dict(sorted(taken.items(), key=lambda item: (-item[1], item[0])))


def format_holders(amounts: Mapping[str, float]) -> str:
    """Format holders as "Held by run-a/rollout 4, ... "; "" if there are none."""
    if not amounts:
        return ""
    named = [f"{name} {amount:g}" for name, amount in list(amounts.items())[:_NAMED]]
    more = f" and {len(amounts) - _NAMED} more" if len(amounts) > _NAMED else ""
    return f"Held by {', '.join(named)}{more}. "


def _format_labels(request: GroupRequest) -> str:
    """Format the labels that a request needs; "" if it needs none."""
    return f" with labels {dict(request.labels)}" if request.labels else ""


def _format_topology(request: GroupRequest) -> str:
    """Format the topology that a request requires; "" if it requires none."""
    return f" in one {request.topology.require[0].replace('_', ' ')}" if request.topology.require else ""


def _suggest_changes(request: GroupRequest, capacity: Capacity, view: ClusterView, left: float) -> str:
    """Return a sentence with the changes that would make room."""
    key = f"{request.where}.workers" + (".min" if request.least != request.most else "")
    fits = int(left / request.bundle + 1e-6)
    ways = []
    if request.topology.require:
        known = sum(
            any(label in node.labels for label in (request.topology.require[0],))
            for node in capacity.find_matching_nodes(request.labels)
        )
        if request.topology.require[0] in ("rack", "zone"):
            ways.append(
                f"prefer instead of require ({known} nodes state their {request.topology.require[0]})"
            )
        else:
            ways.append("prefer instead of require")
    elif fits:
        ways.append(f"lower {key} to {fits}")
    elsewhere = capacity.sum_free(request.resource, view.nodes) - left
    if request.labels and elsewhere >= request.bundle:
        ways.append(
            f"widen pools.{request.pool}.labels ({elsewhere:g} more {request.resource} are free elsewhere)"
        )
    ways += ["free what is held", "add nodes"] if left or view.get_total(request.resource) else ["add nodes"]
    return f"Lower its workers or change the cluster: {', '.join(ways)}; --cluster plans for another one."


def describe_lost_room(group: PlacedGroup, view: ClusterView) -> str:
    """Return the message for a planned group whose resources were taken before it was bound.

    Args:
        group: The planned group.
        view: The cluster as it is now.
    """
    planned = group.workers * group.bundle[group.resource]
    planned_by_node: Counter[str] = Counter(group.nodes)
    short = []
    for name, count in planned_by_node.items():
        node = next((node for node in view.nodes if node.id == name), None)
        free = node.free.get(group.resource, 0.0) if node else 0.0
        if free < count * group.bundle[group.resource] - 1e-6:
            short.append((name, free, node))
    waiting = ", ".join(
        f"node {name[:8]} has {free:g} free of {node.total.get(group.resource, 0.0):g}"
        if node
        else f"node {name[:8]} is gone"
        for name, free, node in short[:_NAMED]
    )
    amounts = sum_by_holder(view, group.resource, [name for name, _, _ in short] or list(planned_by_node))
    return (
        f"group {group.name!r} (pool {group.pool}) was planned {planned:g} {group.resource} on {len(planned_by_node)} nodes, "
        f"which were taken before it was bound: {waiting or 'the scheduler has not placed it'}; in all nodes "
        f"{view.get_free(group.resource):g} of {view.get_total(group.resource):g} {group.resource} are free. "
        f"{format_holders(amounts)}Nothing was kept. Start it again to plan on what is free now, lower its workers, "
        "or free what is held."
    )

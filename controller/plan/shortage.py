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

_MAX_NAMED = 4  # holders or nodes that a message names
_TOLERANCE = 1e-6  # for sums of Ray's fractional resources, which are inexact


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
        capacity: What is free after the groups that were placed before it.
        view: The cluster.
        placed_groups: The groups of the plan that were placed before.
    """
    nodes = capacity.find_matching_nodes(request.labels)
    node_ids = {node.id for node in nodes}
    total = sum(node.total.get(request.resource, 0.0) for node in nodes)
    free_before = sum(node.free.get(request.resource, 0.0) for node in nodes)
    free_now = capacity.sum_free(request.resource, nodes)
    needed = request.least * request.bundle
    text = (
        f"group {request.name!r} (pool {request.pool}) needs {needed:g} {request.resource}"
        f"{_format_labels(request)}{_format_topology(request)}, the cluster has {total:g} in "
        f"{len(nodes)} of {len(view.nodes)} nodes, "
        f"{free_before:g} free before this plan"
    )
    if free_now < free_before - _TOLERANCE:
        text += f", {free_now:g} free after its other groups"
    held_by_holder = sum_by_holder(view, request.resource, node_ids)
    held_by_plan = Counter[str]()
    for group in placed_groups:
        amount = sum(group.bundle.get(request.resource, 0.0) for node in group.nodes if node in node_ids)
        if amount:
            held_by_plan[f"this plan's {group.name}"] += amount  # type: ignore[assignment]
    return f"{text}. {format_holders({**held_by_holder, **held_by_plan})}{_suggest_changes(request, capacity, view, free_now)}"


def sum_by_holder(view: ClusterView, resource: str, nodes: Iterable[str]) -> dict[str, float]:
    """Return the units of a resource that each holder has on the given nodes, the largest first.

    Args:
        view: The cluster, with who holds what.
        resource: Ray's name of the resource.
        nodes: Ids of the nodes.
    """
    node_ids, units_by_holder = set(nodes), Counter[str]()
    for holding in view.held:
        if holding.resource == resource and holding.node in node_ids:
            units_by_holder[holding.by] += holding.amount  # type: ignore[assignment]
    return dict(sorted(units_by_holder.items(), key=lambda item: (-item[1], item[0])))


def format_holders(amounts: Mapping[str, float]) -> str:
    """Format holders as "Held by run-a/rollout 4, ... "; "" if there are none."""
    if not amounts:
        return ""
    named = [f"{name} {amount:g}" for name, amount in list(amounts.items())[:_MAX_NAMED]]
    others = f" and {len(amounts) - _MAX_NAMED} more" if len(amounts) > _MAX_NAMED else ""
    return f"Held by {', '.join(named)}{others}. "


def _format_labels(request: GroupRequest) -> str:
    """Format the labels that a request needs; "" if it needs none."""
    return f" with labels {dict(request.labels)}" if request.labels else ""


def _format_topology(request: GroupRequest) -> str:
    """Format the topology that a request requires; "" if it requires none."""
    return f" in one {request.topology.require[0].replace('_', ' ')}" if request.topology.require else ""


def _suggest_changes(request: GroupRequest, capacity: Capacity, view: ClusterView, free_now: float) -> str:
    """Return a sentence with changes of the scenario or the cluster that would make room."""
    key = f"{request.where}.workers" + (".min" if request.least != request.most else "")
    fitting_workers = int(free_now / request.bundle + _TOLERANCE)
    changes = []
    if request.topology.require:
        labelled_nodes = sum(
            any(label in node.labels for label in (request.topology.require[0],))
            for node in capacity.find_matching_nodes(request.labels)
        )
        if request.topology.require[0] in ("rack", "zone"):
            changes.append(
                f"prefer instead of require ({labelled_nodes} nodes state their {request.topology.require[0]})"
            )
        else:
            changes.append("prefer instead of require")
    elif fitting_workers:
        changes.append(f"lower {key} to {fitting_workers}")
    elsewhere = capacity.sum_free(request.resource, view.nodes) - free_now
    if request.labels and elsewhere >= request.bundle:
        changes.append(
            f"widen pools.{request.pool}.labels ({elsewhere:g} more {request.resource} are free elsewhere)"
        )
    changes += (
        ["free what is held", "add nodes"] if free_now or view.get_total(request.resource) else ["add nodes"]
    )
    return f"Lower its workers or change the cluster: {', '.join(changes)}; --cluster plans for another one."


def describe_lost_room(group: PlacedGroup, view: ClusterView) -> str:
    """Return the message for a planned group whose resources were taken before it was bound.

    Args:
        group: The planned group.
        view: The cluster as it is now.
    """
    units = group.workers * group.bundle[group.resource]
    planned_by_node: Counter[str] = Counter(group.nodes)
    short = []
    for node_id, count in planned_by_node.items():
        node = next((node for node in view.nodes if node.id == node_id), None)
        free = node.free.get(group.resource, 0.0) if node else 0.0
        if free < count * group.bundle[group.resource] - _TOLERANCE:
            short.append((node_id, free, node))
    reasons = ", ".join(
        f"node {node_id[:8]} has {free:g} free of {node.total.get(group.resource, 0.0):g}"
        if node
        else f"node {node_id[:8]} is gone"
        for node_id, free, node in short[:_MAX_NAMED]
    )
    amounts = sum_by_holder(
        view, group.resource, [node_id for node_id, _, _ in short] or list(planned_by_node)
    )
    return (
        f"group {group.name!r} (pool {group.pool}) was planned {units:g} {group.resource} on {len(planned_by_node)} nodes, "
        f"which were taken before it was bound: {reasons or 'the scheduler has not placed it'}; in all nodes "
        f"{view.get_free(group.resource):g} of {view.get_total(group.resource):g} {group.resource} are free. "
        f"{format_holders(amounts)}Nothing was kept. Start it again to plan on what is free now, lower its workers, "
        "or free what is held."
    )

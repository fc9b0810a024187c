"""Choice of the nodes for one group's workers; `Capacity` tracks what is free while a plan is made.

A group is placed in the smallest topology domain that has room for it. A placement policy
(`nonet.controller.cluster.placement`) chooses the nodes in that domain. The work is O(groups x nodes), whatever the number of
workers: 50 groups on 1,000 nodes of 8 devices take a fraction of a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nonet.controller.cluster import (
    ANYWHERE,
    ClusterView,
    Domain,
    Node,
    Topology,
    find_domain,
    list_levels,
    make_place_key,
)
from nonet.controller.cluster.placement import NodeSlots, Placement, pack_workers

_TOLERANCE = 1e-6  # for sums of Ray's fractional resources, which are inexact


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A request for the workers of one group.

    Attributes:
        resource: Ray's name of the resource.
        each: Units of the resource that one worker needs.
        least: The smallest acceptable number of workers.
        most: The largest number of workers.
        labels: Labels that a node must have.
        topology: The topology level within which the workers must or should be.
        gang: Whether the workers communicate all the time, so that few nodes are better than partly used ones.
        together: The number of neighbouring workers that should be on one node; it divides `least` and `most`.
    """

    resource: str
    each: float
    least: int
    most: int
    labels: Mapping[str, str]
    topology: Topology
    gang: bool
    together: int = 1


Choice = list[tuple[Node, int]]
"""The chosen nodes and the number of workers on each."""


class Capacity:
    """The free resources of a cluster view, reduced as groups are placed.

    Args:
        view: The cluster.
        placement: The placement policy that chooses nodes; by default best fit.
    """

    def __init__(self, view: ClusterView, placement: Placement | None = None):
        placement = placement or Placement(use=Placement.default)
        self._policy, self._options = placement.spec, placement.get_options()
        self.nodes = sorted(view.nodes, key=make_place_key)
        self._order = {node.id: index for index, node in enumerate(self.nodes)}
        self._free = {node.id: dict(node.free) for node in self.nodes}
        self._zones = {node.id: find_domain(node, "zone") for node in self.nodes}
        self._racks = {node.id: find_domain(node, "rack") for node in self.nodes}

    def get_free(self, node: str, resource: str) -> float:
        """Return the units of a resource that are left on a node."""
        return self._free[node].get(resource, 0.0)

    def sum_free(self, resource: str, nodes: Iterable[Node]) -> float:
        """Return the units of a resource that are left on the given nodes."""
        return sum(self.get_free(node.id, resource) for node in nodes)

    def take(self, node: str, resource: str, amount: float) -> None:
        """Reserve units of a resource on a node; a negative amount returns them.

        Args:
            node: The id of the node.
            resource: Ray's name of the resource.
            amount: The units to reserve.
        """
        self._free[node][resource] = self.get_free(node, resource) - amount

    def find_matching_nodes(self, labels: Mapping[str, str]) -> list[Node]:
        """Return the nodes that have all of the given labels, in the order of `make_place_key`."""
        return [node for node in self.nodes if labels.items() <= node.labels.items()]

    def choose(self, request: PlacementRequest) -> tuple[Choice, str] | None:
        """Choose nodes for a request, without reserving anything; `take` reserves.

        Returns:
            The nodes with their numbers of workers, in the order of `make_place_key`, and the topology level that all of them
            share; None if too few workers fit.
        """
        if (size := request.together) > 1:
            teams = replace(
                request,
                each=request.each * size,
                least=request.least // size,
                most=request.most // size,
                together=1,
            )
            if (choice := self.choose(teams)) is not None:
                return [(node, count * size) for node, count in choice[0]], choice[1]
        rooms = self._find_rooms(request)
        levels = list(list_levels(request.topology))
        for level in levels:
            domain_rooms = self._choose_domain(
                self._split_into_domains(rooms, level, request), request, last=level == levels[-1]
            )
            if domain_rooms:
                count = min(request.most, sum(room.slots for room in domain_rooms))
                packed = pack_workers(self._policy, self._options, domain_rooms, count, request.gang)
                return [(room.node, workers) for room, workers in packed], level
        return None

    def _find_rooms(self, request: PlacementRequest) -> list[NodeSlots]:
        """Return the matching nodes with room for a worker, and the number of workers that fit on each.

        For CPU groups, these are only nodes without devices if all workers fit on such nodes.
        """
        nodes = self.find_matching_nodes(request.labels)
        free_by_domain: dict[Domain | None, float] = defaultdict(float)
        for node in nodes:
            free = self.get_free(node.id, request.resource)
            free_by_domain[self._racks[node.id]] += free
            free_by_domain[self._zones[node.id]] += free
        rooms = []
        for node in nodes:
            free = self.get_free(node.id, request.resource)
            slots = int(free / request.each + _TOLERANCE)
            if slots:
                free_nearby = (free_by_domain[self._racks[node.id]], free_by_domain[self._zones[node.id]])
                broken = free < node.total.get(request.resource, 0.0) - _TOLERANCE
                rooms.append(NodeSlots(node, self._order[node.id], slots, broken, free_nearby))
        # Nodes without devices; those with devices are left to groups that need them.
        plain_rooms = (
            [room for room in rooms if not _has_devices(room.node)] if request.resource == "CPU" else []
        )
        return plain_rooms if sum(room.slots for room in plain_rooms) >= request.most else rooms

    def _split_into_domains(
        self, rooms: list[NodeSlots], level: str, request: PlacementRequest
    ) -> list[list[NodeSlots]]:
        """Split nodes into the domains of a topology level; nodes without a known domain are left out."""
        if level == ANYWHERE:
            return [rooms]
        if level == "device_domain":
            return [
                [room] for room in (self._limit_to_device_domain(room, request) for room in rooms) if room
            ]
        domains: dict[Domain, list[NodeSlots]] = defaultdict(list)
        for room in rooms:
            domain = find_domain(room.node, level)
            if domain is not None:
                domains[domain].append(room)
        return list(domains.values())

    def _limit_to_device_domain(self, room: NodeSlots, request: PlacementRequest) -> NodeSlots | None:
        """Limit a node's slots to free devices that lie in one device domain; None if the domain is unknown.

        Ray assigns the lowest free device ids first. On a node that was entirely free when planning began, the next ids are
        therefore those that follow the ids which this plan has taken. On any other node the free ids are unknown, so the node
        is not used.
        """
        facts = room.node.devices.get(request.resource)
        total = room.node.total.get(request.resource, 0.0)
        if not facts or not facts.domain or room.node.free.get(request.resource, 0.0) < total - _TOLERANCE:
            return None
        taken_units = total - self.get_free(room.node.id, request.resource)
        slots = int((facts.domain - taken_units % facts.domain) / request.each + _TOLERANCE)
        return NodeSlots(room.node, room.order, min(slots, room.slots), room.broken, room.full)

    def _choose_domain(
        self, domains: list[list[NodeSlots]], request: PlacementRequest, *, last: bool
    ) -> list[NodeSlots] | None:
        """Choose the domain with the fewest free slots among those with room for `request.most` workers.

        If there is none at the `last`, widest level, choose the domain with the most slots, if it has room for
        `request.least` workers.
        """
        slots_and_rooms = [(sum(room.slots for room in rooms), rooms) for rooms in domains]
        # Each list of nodes is in the order of `make_place_key`, so its first node stands for the domain.
        complete = [(slots, rooms) for slots, rooms in slots_and_rooms if slots >= request.most]
        if complete:
            return min(complete, key=lambda choice: (choice[0], choice[1][0].full, choice[1][0].order))[1]
        sufficient = [(slots, rooms) for slots, rooms in slots_and_rooms if slots >= request.least]
        if sufficient and last:
            return max(sufficient, key=lambda choice: (choice[0], -choice[1][0].order))[1]
        return None


def _has_devices(node: Node) -> bool:
    """Return whether a node has accelerators."""
    return any(node.total.get(resource) for resource in node.devices) or any(
        node.total.get(resource) for resource in ("GPU", "NPU")
    )

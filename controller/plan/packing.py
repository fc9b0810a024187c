"""Choose nodes for the workers of one group; `Capacity` is what is free while a plan is made.

Best fit across groups and jobs: a group takes the fewest nodes, and the one it fills in part is the fullest that still fits;
among equals the one in the fullest rack. So four one-GPU groups share a node and three whole nodes stay whole, where Ray's
own placement leaves none (`nonet bench placement`). Groups whose workers work alone fill broken nodes first. The work is
O(groups x nodes), whatever the number of workers: 50 groups on 1,000 nodes of 8 devices take a fraction of a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nonet.controller.cluster import ANYWHERE, ClusterView, Domain, Node, domain, levels_to_try, place_key
from nonet.controller.scenario import Topology

_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class Request:
    """What a group asks: workers (at least, at most), of what one worker needs, and how near each other they must be.

    gang   the workers talk to each other all the time, so few nodes are better than broken ones
    """

    resource: str
    each: float
    least: int
    most: int
    labels: Mapping[str, str]
    topology: Topology
    gang: bool


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """A node and how many workers fit on it."""

    node: Node
    order: int
    slots: int
    broken: bool
    full: tuple[float, float]


Choice = list[tuple[Node, int]]


class Capacity:
    """The free resources of a view, taken from as groups are placed."""

    def __init__(self, view: ClusterView):
        self.nodes = sorted(view.nodes, key=place_key)
        self._order = {node.id: index for index, node in enumerate(self.nodes)}
        self._free = {node.id: dict(node.free) for node in self.nodes}
        self._zones = {node.id: domain(node, "zone") for node in self.nodes}
        self._racks = {node.id: domain(node, "rack") for node in self.nodes}

    def free(self, node: str, resource: str) -> float:
        """What is left of a resource on a node."""
        return self._free[node].get(resource, 0.0)

    def total_free(self, resource: str, nodes: Iterable[Node]) -> float:
        """What is left of a resource on these nodes."""
        return sum(self.free(node.id, resource) for node in nodes)

    def take(self, node: str, resource: str, amount: float) -> None:
        """Use up; a negative amount gives back."""
        self._free[node][resource] = self.free(node, resource) - amount

    def matching(self, labels: Mapping[str, str]) -> list[Node]:
        """Nodes that carry all of these labels, in order of place."""
        return [node for node in self.nodes if labels.items() <= node.labels.items()]

    def choose(self, request: Request) -> tuple[Choice, str] | None:
        """Nodes with the number of workers on each, in order of place, and the level they share; None when too few fit.

        Takes nothing: `take` does.
        """
        rooms = self._rooms(request)
        levels = list(levels_to_try(request.topology))
        for level in levels:
            best = self._best_domain(self._domains(rooms, level, request), request, last=level == levels[-1])
            if best:
                count = min(request.most, sum(room.slots for room in best))
                return self._pack(best, count, request.gang), level
        return None

    def _rooms(self, request: Request) -> list[NodeSlots]:
        """Nodes that match and have room; for CPU groups those without devices only, where they suffice."""
        nodes = self.matching(request.labels)
        rack_free: dict[Domain | None, float] = defaultdict(float)
        for node in nodes:
            free = self.free(node.id, request.resource)
            rack_free[self._racks[node.id]] += free
            rack_free[self._zones[node.id]] += free
        rooms = []
        for node in nodes:
            free = self.free(node.id, request.resource)
            slots = int(free / request.each + _TINY)
            if slots:
                full = (rack_free[self._racks[node.id]], rack_free[self._zones[node.id]])
                broken = free < node.total.get(request.resource, 0.0) - _TINY
                rooms.append(NodeSlots(node, self._order[node.id], slots, broken, full))
        plain = [room for room in rooms if not _has_devices(room.node)] if request.resource == "CPU" else []
        return plain if sum(room.slots for room in plain) >= request.most else rooms

    def _domains(self, rooms: list[NodeSlots], level: str, request: Request) -> list[list[NodeSlots]]:
        if level == ANYWHERE:
            return [rooms]
        if level == "device_domain":
            return [[room] for room in (self._one_domain(room, request) for room in rooms) if room]
        domains: dict[Domain, list[NodeSlots]] = defaultdict(list)
        for room in rooms:
            name = domain(room.node, level)
            if name is not None:
                domains[name].append(room)
        return list(domains.values())

    def _one_domain(self, room: NodeSlots, request: Request) -> NodeSlots | None:
        """The part of a node's free devices that lies in one device domain, as far as that is known.

        Ray hands out the lowest free ids first, so on a node that was whole when planning began the next ids are those
        after what this plan has taken; on any other node the free ids are unknown and it is no candidate.
        """
        facts = room.node.devices.get(request.resource)
        total = room.node.total.get(request.resource, 0.0)
        if not facts or not facts.domain or room.node.free.get(request.resource, 0.0) < total - _TINY:
            return None
        taken = total - self.free(room.node.id, request.resource)
        slots = int((facts.domain - taken % facts.domain) / request.each + _TINY)
        return NodeSlots(room.node, room.order, min(slots, room.slots), room.broken, room.full)

    def _best_domain(
        self, domains: list[list[NodeSlots]], request: Request, *, last: bool
    ) -> list[NodeSlots] | None:
        """The fullest domain that still holds everyone; for elastic groups else the one that holds most, if enough.

        A level that holds some of an elastic group's workers is only taken when no wider one is left to try.
        """
        sized = [(sum(room.slots for room in rooms), rooms) for rooms in domains]
        whole = [(total, rooms) for total, rooms in sized if total >= request.most]
        if whole:
            return min(whole, key=lambda choice: (choice[0], choice[1][0].full, choice[1][0].order))[1]
        some = [(total, rooms) for total, rooms in sized if total >= request.least]
        if some and last:
            return max(some, key=lambda choice: (choice[0], -choice[1][0].order))[1]
        return None

    def _pack(self, rooms: Sequence[NodeSlots], count: int, gang: bool) -> Choice:
        taken: list[tuple[NodeSlots, int]] = []
        if not gang:
            for room in sorted((r for r in rooms if r.broken), key=lambda r: (r.slots, r.full, r.order)):
                if room.slots >= count:
                    break
                taken.append((room, room.slots))
                count -= room.slots
        used = {room.order for room, _ in taken}
        left = sorted((r for r in rooms if r.order not in used), key=lambda r: (-r.slots, r.full, r.order))
        for index, room in enumerate(left):
            if room.slots >= count:
                taken.append((_tightest(left[index:], count), count))
                break
            taken.append((room, room.slots))
            count -= room.slots
        return [(room.node, n) for room, n in sorted(taken, key=lambda t: t[0].order) if n]


def _tightest(rooms: list[NodeSlots], count: int) -> NodeSlots:
    return min((r for r in rooms if r.slots >= count), key=lambda r: (r.slots, r.full, r.order))


def _has_devices(node: Node) -> bool:
    return any(node.total.get(resource) for resource in node.devices) or any(
        node.total.get(resource) for resource in ("GPU", "NPU")
    )

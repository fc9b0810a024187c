"""Groups on nodes: each request of a scenario placed by best fit, the hardest to place first.

Devices before CPUs, fixed sizes before elastic ones, required topology and gangs before the rest, large before small. Pure.

Plans that change: groups that a stage's own roles, or a node that came or went, stop and start. Nothing moves needlessly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nonet.controller.cluster import ClusterView
from nonet.controller.plan.packing import Capacity, Request
from nonet.controller.plan.requests import GroupRequest, group_requests
from nonet.controller.plan.resolved import ResolvedRun
from nonet.controller.plan.shortage import shortage
from nonet.errors import PlacementError

MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group of processes.

    roles      what each process holds (more than one: fused)
    shares     the group whose bundles these workers sit in, "" for bundles of their own (collocate)
    resource   what Ray counts its device as ("CPU" on cpu)
    cpus, devices   what one worker asks Ray for
    bundle     what is reserved for one worker and those that share with it; empty for sharers
    threads    torch threads a worker, 0 for roles without torch
    nodes      node of each rank, neighbours in rank on neighbouring nodes
    level      the narrowest wanted level that all of them share: device_domain, host, rack, zone, "" for none
    """

    name: str
    roles: tuple[str, ...]
    pool: str
    device: str
    resource: str
    workers: int
    cpus: float
    devices: float
    bundle: Mapping[str, float]
    threads: int
    nodes: tuple[str, ...]
    shares: str = ""
    level: str = ""

    def on_nodes(self) -> Counter[str]:
        """Workers by node."""
        return Counter(self.nodes)


def place_groups(
    requests: list[GroupRequest], capacity: Capacity, view: ClusterView, kept: tuple[GroupPlan, ...]
) -> tuple[GroupPlan, ...]:
    """Groups in the order of their requests, taken from `capacity`; those in `kept` stay where they are."""
    placed = {group.name: group for group in kept}
    todo = sorted((d for d in requests if not d.shares and d.name not in placed), key=_hardness)
    for index, request in enumerate(todo):
        placed[request.name] = _place(request, todo[index + 1 :], capacity, view, tuple(placed.values()))
    for request in requests:
        if request.shares and request.name not in placed:
            host = placed[request.shares]
            placed[request.name] = _group(request, host.nodes, host.level, {})
    return tuple(placed[request.name] for request in requests)


def _hardness(request: GroupRequest) -> tuple[bool, bool, bool, bool, float]:
    """Devices before CPUs, fixed sizes before elastic ones, required topology, gangs, then the largest."""
    return (
        request.resource == "CPU",
        request.least != request.most,
        not request.topology.require,
        not request.gang,
        -request.most * request.bundle,
    )


def _place(
    request: GroupRequest,
    later: list[GroupRequest],
    capacity: Capacity,
    view: ClusterView,
    done: tuple[GroupPlan, ...],
) -> GroupPlan:
    most = request.most
    if request.least < request.most:  # leave to later groups what they need at least
        nodes = capacity.matching(request.labels)
        others = sum(d.least * d.bundle for d in later if d.resource == request.resource)
        spare = capacity.total_free(request.resource, nodes) - others
        most = min(most, max(request.least, int(spare / request.bundle + 1e-6)))
    ask = Request(
        request.resource, request.bundle, request.least, most, request.labels, request.topology, request.gang
    )
    choice = capacity.choose(ask)
    if choice is None:
        raise PlacementError(shortage(request, capacity, view, done))
    spots, level = choice
    for node, count in spots:
        capacity.take(node.id, request.resource, count * request.bundle)
    nodes = tuple(node.id for node, count in spots for _ in range(count))
    return _group(request, nodes, level, {request.resource: request.bundle})


def _group(
    request: GroupRequest, nodes: tuple[str, ...], level: str, bundle: Mapping[str, float]
) -> GroupPlan:
    on_cpu = request.resource == "CPU"
    return GroupPlan(
        request.name,
        request.roles,
        request.pool,
        request.device,
        request.resource,
        len(nodes),
        request.asks if on_cpu else 0.0,
        0.0 if on_cpu else request.asks,
        bundle,
        0 if request.light else 1,
        nodes,
        request.shares,
        level,
    )


def with_threads(
    groups: tuple[GroupPlan, ...], view: ClusterView, threads_given: int
) -> tuple[GroupPlan, ...]:
    """The same count for every torch role, so that fused and separate runs give the same bits."""
    threads = threads_given or _threads(groups, view)
    return tuple(replace(group, threads=threads) if group.threads else group for group in groups)


def _threads(groups: tuple[GroupPlan, ...], view: ClusterView) -> int:
    """Cores of the tightest node over the torch workers busy at once on it: its evaluators beside its widest other group."""
    widest: Counter[str] = Counter()
    evaluators: Counter[str] = Counter()
    for group in groups:
        if group.threads:
            evaluator = "evaluator" in group.roles and "trainer" not in group.roles
            for node, count in group.on_nodes().items():
                if evaluator:
                    evaluators[node] += count
                else:
                    widest[node] = max(widest[node], count)
    least = float(MOST_THREADS)
    for node in {*widest, *evaluators}:
        least = min(least, view.node(node).total.get("CPU", 1.0) / (evaluators[node] + widest[node]))
    return max(1, int(least))


@dataclass(frozen=True, slots=True)
class StageChange:
    """Groups that a stage of its own roles stops, and those it starts, before it begins; then torch threads a worker."""

    stage: str
    stops: tuple[str, ...]
    starts: tuple[GroupPlan, ...]
    threads: int = 0

    def after(self, before: Iterable[GroupPlan]) -> tuple[GroupPlan, ...]:
        """The groups that there are once this is done, those that stay with the threads they then have."""
        staying = (group for group in before if group.name not in self.stops)
        return (*(replace(g, threads=self.threads if g.threads else 0) for g in staying), *self.starts)


def replan(
    run: ResolvedRun, view: ClusterView, stage: str | None, before: Iterable[GroupPlan]
) -> StageChange:
    """What must stop and start so that the groups `before` become those of `stage` on the view: nothing moves needlessly.

    A group stays when its request is the same and its nodes are still there; `view` says what is free beside them.
    """
    return _change(run, stage, tuple(before), Capacity(view), view, 0)[0]


def make_changes(
    run: ResolvedRun, groups: tuple[GroupPlan, ...], capacity: Capacity, view: ClusterView, threads: int
) -> tuple[tuple[StageChange, ...], dict[str, tuple[GroupPlan, ...]]]:
    """Re-plans before the stages that name roles of their own, and back after them; and the groups of every stage."""
    changes, by_stage, now, own = [], {}, groups, False
    for stage, body in run.scenario.stages.items():
        if body.roles or own:
            change, now = _change(run, stage, now, capacity, view, threads)
            if change.stops or change.starts:
                changes.append(change)
        by_stage[stage], own = now, bool(body.roles)
    return tuple(changes), by_stage


def _change(
    run: ResolvedRun,
    stage: str | None,
    now: tuple[GroupPlan, ...],
    capacity: Capacity,
    view: ClusterView,
    threads: int,
) -> tuple[StageChange, tuple[GroupPlan, ...]]:
    requests = group_requests(run, stage)
    by_name = {request.name: request for request in requests}
    alive = {node.id for node in view.nodes}
    staying = tuple(g for g in now if _stays(g, by_name.get(g.name), alive))
    staying = tuple(g for g in staying if not g.shares or g.shares in {k.name for k in staying})
    stops = tuple(g for g in now if g not in staying)
    for group in stops:
        for node in (n for n in group.nodes if n in alive):
            for resource, amount in group.bundle.items():
                capacity.take(node, resource, -amount)
    after = with_threads(place_groups(requests, capacity, view, staying), view, threads)
    names = {group.name for group in staying}
    starts = tuple(group for group in after if group.name not in names)
    counts = max((group.threads for group in after), default=0)
    return StageChange(stage or "", tuple(group.name for group in stops), starts, counts), after


def _stays(group: GroupPlan, request: GroupRequest | None, alive: set[str]) -> bool:
    return (
        request is not None
        and (request.roles, request.pool, request.shares) == (group.roles, group.pool, group.shares)
        and request.least <= group.workers <= request.most
        and request.asks == (group.cpus or group.devices)
        and (bool(group.shares) or group.bundle.get(request.resource) == request.bundle)
        and set(group.nodes) <= alive
    )

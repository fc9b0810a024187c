"""Placement of a scenario's groups on nodes by best fit, the groups that are hardest to place first.

Devices are placed before CPUs, groups whose labels match few nodes before others, fixed sizes before elastic ones, required
topology and gangs before the rest, and large groups before small ones. Re-plans stop and start only the groups that a
stage's own roles, or a lost or added node, require.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nonet.controller.cluster import ClusterView
from nonet.controller.plan.packing import Capacity, PlacementRequest
from nonet.controller.plan.requests import GroupRequest, make_group_requests
from nonet.controller.plan.resolved import ResolvedRun
from nonet.controller.plan.shortage import describe_shortage
from nonet.errors import PlacementError

_ROUNDING = 1e-6  # added before rounding down, because sums of Ray's fractions are inexact
MOST_THREADS = 8  # torch threads per worker, which a plan derives at most


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The placement of one group of processes.

    Attributes:
        name: The name of the group.
        roles: The roles that each process holds; more than one if they are fused.
        pool: The pool of the scenario.
        device: The kind of device, such as "gpu" or "cpu".
        resource: Ray's name of the device; "CPU" on cpu.
        workers: The number of workers.
        cpus: CPUs that one worker requests from Ray.
        devices: Devices that one worker requests from Ray.
        bundle: Resources reserved for one worker and those that share with it; empty for groups that share another's
            bundles.
        threads: Torch threads per worker; 0 for roles without torch.
        nodes: The node of each rank; neighbouring ranks are on neighbouring nodes.
        shares: The group whose bundles these workers use (collocate); "" for bundles of their own.
        level: The narrowest requested level that all workers share (device_domain, host, rack, zone); "" for none.
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

    def count_by_node(self) -> Counter[str]:
        """Count the workers on each node."""
        return Counter(self.nodes)


def place_groups(
    requests: list[GroupRequest], capacity: Capacity, view: ClusterView, kept_groups: tuple[GroupPlan, ...]
) -> tuple[GroupPlan, ...]:
    """Place groups on nodes.

    Args:
        requests: The groups, in the order in which they are returned.
        capacity: Free resources, from which those of placed groups are subtracted.
        view: The cluster, for messages.
        kept_groups: Groups that stay where they are.

    Raises:
        PlacementError: A group does not fit.
    """
    placed = {group.name: group for group in kept_groups}
    pending = sorted(
        (r for r in requests if not r.shares and r.name not in placed),
        key=lambda request: _make_difficulty_key(request, capacity),
    )
    for index, request in enumerate(pending):
        placed[request.name] = _place_group(
            request, pending[index + 1 :], capacity, view, tuple(placed.values())
        )
    for request in requests:
        if request.shares and request.name not in placed:
            host = placed[request.shares]
            placed[request.name] = _make_group_plan(request, host.nodes, host.level, {})
    return tuple(placed[request.name] for request in requests)


def _make_difficulty_key(
    request: GroupRequest, capacity: Capacity
) -> tuple[bool, int, bool, bool, bool, float]:
    """Return a sort key, by which groups come first that are hard to place.

    These are groups on devices, those whose labels match few nodes (others must not take the room there), of a fixed size, with
    a required topology, gangs, and large groups.
    """
    return (
        request.resource == "CPU",
        len(capacity.find_matching_nodes(request.labels)),
        request.least != request.most,
        not request.topology.require,
        not request.gang,
        -request.most * request.bundle,
    )


def _place_group(
    request: GroupRequest,
    later_requests: list[GroupRequest],
    capacity: Capacity,
    view: ClusterView,
    placed_groups: tuple[GroupPlan, ...],
) -> GroupPlan:
    """Choose nodes for one group and reserve its resources.

    An elastic group gets no more workers than leave room for the minimum numbers of workers of later groups.

    Args:
        request: The group.
        later_requests: The groups that are placed after it.
        capacity: Free resources, from which those of the group are subtracted.
        view: The cluster, for messages.
        placed_groups: The groups that were placed before it, for messages.
    """
    max_workers = request.most
    if request.least < request.most:
        nodes = capacity.find_matching_nodes(request.labels)
        reserved = sum(r.least * r.bundle for r in later_requests if r.resource == request.resource)
        spare = capacity.sum_free(request.resource, nodes) - reserved
        max_workers = min(max_workers, max(request.least, int(spare / request.bundle + _ROUNDING)))
    placement_request = PlacementRequest(
        resource=request.resource,
        each=request.bundle,
        least=request.least,
        most=max_workers,
        labels=request.labels,
        topology=request.topology,
        gang=request.gang,
        together=request.together,
    )
    choice = capacity.choose(placement_request)
    if choice is None:
        raise PlacementError(describe_shortage(request, capacity, view, placed_groups))
    chosen_nodes, level = choice
    for node, count in chosen_nodes:
        capacity.take(node.id, request.resource, count * request.bundle)
    nodes = tuple(node.id for node, count in chosen_nodes for _ in range(count))
    return _make_group_plan(request, nodes, level, {request.resource: request.bundle})


def _make_group_plan(
    request: GroupRequest, nodes: tuple[str, ...], level: str, bundle: Mapping[str, float]
) -> GroupPlan:
    """Build the plan of a group on the given nodes, one per rank."""
    on_cpu = request.resource == "CPU"
    return GroupPlan(
        name=request.name,
        roles=request.roles,
        pool=request.pool,
        device=request.device,
        resource=request.resource,
        workers=len(nodes),
        cpus=request.asks if on_cpu else 0.0,
        devices=0.0 if on_cpu else request.asks,
        bundle=bundle,
        threads=0 if request.light else 1,  # `assign_threads` replaces the 1 by the number of threads
        nodes=nodes,
        shares=request.shares,
        level=level,
    )


def assign_threads(
    groups: tuple[GroupPlan, ...], view: ClusterView, threads_given: int
) -> tuple[GroupPlan, ...]:
    """Return the groups with the same number of torch threads in every role that uses torch.

    The number is the same everywhere so that fused and separate runs compute identical bits.

    Args:
        groups: The placed groups.
        view: The cluster, for the cores of its nodes.
        threads_given: The number of threads; 0 to derive it from the cores.
    """
    threads = threads_given or _choose_threads(groups, view)
    return tuple(replace(group, threads=threads) if group.threads else group for group in groups)


def _choose_threads(groups: tuple[GroupPlan, ...], view: ClusterView) -> int:
    """Return the number of torch threads that fits the most crowded node; at least 1 and at most `MOST_THREADS`.

    A node's cores are divided by the workers that compute on it at the same time: its evaluators and those of the other
    group that has most workers there.
    """
    widest_group: Counter[str] = Counter()
    evaluator_workers: Counter[str] = Counter()
    for group in groups:
        if group.threads:
            is_evaluator = "evaluator" in group.roles and "trainer" not in group.roles
            for node, count in group.count_by_node().items():
                if is_evaluator:
                    evaluator_workers[node] += count
                else:
                    widest_group[node] = max(widest_group[node], count)
    cores = float(MOST_THREADS)
    for node in {*widest_group, *evaluator_workers}:
        workers = evaluator_workers[node] + widest_group[node]
        cores = min(cores, view.get_node(node).total.get("CPU", 1.0) / workers)
    return max(1, int(cores))


@dataclass(frozen=True, slots=True)
class StageChange:
    """The groups that are stopped and started before a stage that changes roles.

    Attributes:
        stage: The name of the stage.
        stops: Names of the groups that are stopped.
        starts: The groups that are started.
        threads: Torch threads per worker afterwards.
    """

    stage: str
    stops: tuple[str, ...]
    starts: tuple[GroupPlan, ...]
    threads: int = 0

    def apply_to(self, groups: Iterable[GroupPlan]) -> tuple[GroupPlan, ...]:
        """Return the groups that run after the change; groups that stay get the new number of threads.

        Args:
            groups: The groups that run before the change.
        """
        staying = (group for group in groups if group.name not in self.stops)
        return (*(replace(g, threads=self.threads if g.threads else 0) for g in staying), *self.starts)


def make_changes(
    run: ResolvedRun,
    groups: tuple[GroupPlan, ...],
    capacity: Capacity,
    view: ClusterView,
    threads: int,
    first_stage: str | None = None,
) -> tuple[tuple[StageChange, ...], dict[str, tuple[GroupPlan, ...]]]:
    """Plan the changes of groups before stages that change roles, and the changes back after them.

    Args:
        run: The scenario with the values derived from it.
        groups: The groups at the start of the run, or in `first_stage`.
        capacity: Free resources, updated by the changes.
        view: The cluster.
        threads: Torch threads per worker; 0 to derive them.
        first_stage: The stage in progress, if a run changes its workers within a stage. Earlier stages, which are over, get
            the same groups.

    Returns:
        The changes in order, and the groups of every stage.
    """
    changes, groups_by_stage, current_groups, previous_has_own_roles = [], {}, groups, False
    stages = run.scenario.stages
    for stage in list(stages)[: list(stages).index(first_stage) + 1] if first_stage else ():
        groups_by_stage[stage], previous_has_own_roles = groups, bool(stages[stage].roles)
    for stage, stage_options in stages.items():
        if stage in groups_by_stage:
            continue
        if stage_options.roles or previous_has_own_roles:
            change, current_groups = change_groups(run, stage, current_groups, capacity, view, threads)
            if change.stops or change.starts:
                changes.append(change)
        groups_by_stage[stage], previous_has_own_roles = current_groups, bool(stage_options.roles)
    return tuple(changes), groups_by_stage


def change_groups(
    run: ResolvedRun,
    stage: str | None,
    current_groups: tuple[GroupPlan, ...],
    capacity: Capacity,
    view: ClusterView,
    threads: int,
    *,
    grows: bool = False,
) -> tuple[StageChange, tuple[GroupPlan, ...]]:
    """Plan the change from the current groups to those of a stage.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage; None for the roles of the whole run.
        current_groups: The groups that run now.
        capacity: Free resources, updated by the change.
        view: The cluster.
        threads: Torch threads per worker; 0 to derive them.
        grows: Whether elastic groups with fewer workers than they may have are placed again, with as many as now fit.

    Returns:
        The change, and the groups after it. `capacity` is updated.
    """
    requests = make_group_requests(run, stage)
    request_by_name = {request.name: request for request in requests}
    live_node_ids = {node.id for node in view.nodes}
    staying = tuple(
        group
        for group in current_groups
        if _can_stay(group, request_by_name.get(group.name), live_node_ids)
        and not (grows and group.workers < request_by_name[group.name].most)
    )
    # A group that uses the bundles of another one can stay only with that one.
    staying = tuple(g for g in staying if not g.shares or g.shares in {k.name for k in staying})
    stops = tuple(g for g in current_groups if g not in staying)
    for group in stops:
        for node in (n for n in group.nodes if n in live_node_ids):
            for resource, amount in group.bundle.items():
                capacity.take(node, resource, -amount)
    planned = assign_threads(place_groups(requests, capacity, view, staying), view, threads)
    staying_names = {group.name for group in staying}
    starts = tuple(group for group in planned if group.name not in staying_names)
    thread_count = max((group.threads for group in planned), default=0)
    return StageChange(stage or "", tuple(group.name for group in stops), starts, thread_count), planned


def _can_stay(group: GroupPlan, request: GroupRequest | None, live_node_ids: set[str]) -> bool:
    """Return whether a running group fulfils a request on nodes that are still alive."""
    return (
        request is not None
        and (request.roles, request.pool, request.shares) == (group.roles, group.pool, group.shares)
        and request.least <= group.workers <= request.most
        and request.asks == (group.cpus or group.devices)
        and (bool(group.shares) or group.bundle.get(request.resource) == request.bundle)
        and set(group.nodes) <= live_node_ids
    )

"""Groups on nodes: each draft of a scenario placed by best fit, the hardest to place first.

Devices before CPUs, fixed sizes before elastic ones, required topology and gangs before the rest, large before small. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nonet.controller.cluster import ClusterView
from nonet.controller.draft import Draft
from nonet.controller.fit import Capacity, Wanted
from nonet.controller.shortage import shortage
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
    wanted: list[Draft], capacity: Capacity, view: ClusterView, kept: tuple[GroupPlan, ...]
) -> tuple[GroupPlan, ...]:
    """Groups in the order of their drafts, taken from `capacity`; those in `kept` stay where they are."""
    found = {group.name: group for group in kept}
    todo = sorted((d for d in wanted if not d.shares and d.name not in found), key=_hardness)
    for index, draft in enumerate(todo):
        found[draft.name] = _place(draft, todo[index + 1 :], capacity, view, tuple(found.values()))
    for draft in wanted:
        if draft.shares and draft.name not in found:
            host = found[draft.shares]
            found[draft.name] = _group(draft, host.nodes, host.level, {})
    return tuple(found[draft.name] for draft in wanted)


def _hardness(draft: Draft) -> tuple[Any, ...]:
    """Devices before CPUs, fixed sizes before elastic ones, required topology, gangs, then the largest."""
    return (
        draft.resource == "CPU",
        draft.least != draft.most,
        not draft.topology.require,
        not draft.gang,
        -draft.most * draft.bundle,
    )


def _place(
    draft: Draft, later: list[Draft], capacity: Capacity, view: ClusterView, done: tuple[GroupPlan, ...]
) -> GroupPlan:
    most = draft.most
    if draft.least < draft.most:  # leave to later groups what they need at least
        nodes = capacity.matching(draft.labels)
        others = sum(d.least * d.bundle for d in later if d.resource == draft.resource)
        spare = capacity.total_free(draft.resource, nodes) - others
        most = min(most, max(draft.least, int(spare / draft.bundle + 1e-6)))
    ask = Wanted(draft.resource, draft.bundle, draft.least, most, draft.labels, draft.topology, draft.gang)
    choice = capacity.choose(ask)
    if choice is None:
        raise PlacementError(shortage(draft, capacity, view, done))
    spots, level = choice
    for node, count in spots:
        capacity.take(node.id, draft.resource, count * draft.bundle)
    nodes = tuple(node.id for node, count in spots for _ in range(count))
    return _group(draft, nodes, level, {draft.resource: draft.bundle})


def _group(draft: Draft, nodes: tuple[str, ...], level: str, bundle: Mapping[str, float]) -> GroupPlan:
    on_cpu = draft.resource == "CPU"
    return GroupPlan(
        draft.name,
        draft.roles,
        draft.pool,
        draft.device,
        draft.resource,
        len(nodes),
        draft.asks if on_cpu else 0.0,
        0.0 if on_cpu else draft.asks,
        bundle,
        0 if draft.light else 1,
        nodes,
        draft.shares,
        level,
    )


def with_threads(groups: tuple[GroupPlan, ...], view: ClusterView, given: int) -> tuple[GroupPlan, ...]:
    """The same count for every torch role, so that fused and separate runs give the same bits."""
    threads = given or _threads(groups, view)
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

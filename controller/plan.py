"""The planner: scenario + cluster view -> plan. Pure and deterministic: no Ray, no torch, no clock.

Groups are placed hardest first (devices before CPUs, required topology and gangs before the rest, large before small) and
each by best fit, so that what is left of the cluster is whole nodes; then the memory ledger refuses what cannot fit.
1,000 nodes of 8 devices and 50 groups take a fraction of a second and give the same bytes every time
(tests/controller/test_plan_scale.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nonet.controller.cluster import ClusterView
from nonet.controller.derived import make_stages
from nonet.controller.draft import Draft, drafts
from nonet.controller.fit import Capacity, Wanted
from nonet.controller.ledger import Ledger, make_ledger
from nonet.controller.scenario import Scenario
from nonet.controller.shortage import shortage
from nonet.errors import PlacementError

_MOST_THREADS = 8


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


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: which groups work, what it takes and gives, and sizes derived from the global ones."""

    name: str
    kind: str
    groups: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    derived: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """Groups that a stage of its own roles stops, and those it starts, before it begins."""

    stage: str
    stops: tuple[str, ...]
    starts: tuple[GroupPlan, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run where. `show()` prints it, `as_dict()` is `plan.json`.

    pools     each pool in words; cluster: what the view has, in words
    groups    what the run begins with; changes: re-plans between stages that name roles of their own
    left      whole free nodes after the plan, by resource: (whole, of)
    cores     CPUs of every node that the plan uses
    """

    name: str
    seed: int
    groups: tuple[GroupPlan, ...]
    stages: tuple[StagePlan, ...]
    pools: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""
    notes: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    left: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cores: Mapping[str, float] = field(default_factory=dict)

    def group_of(self, role: str) -> GroupPlan:
        """The group that holds a role. Raises KeyError."""
        for group in self.groups:
            if role in group.roles:
                return group
        raise KeyError(
            f"no group holds the role {role!r}; roles: {', '.join(r for g in self.groups for r in g.roles)}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def show(self) -> None:
        """Print the plan."""
        print(self.text())

    def text(self) -> str:
        """The plan as a person reads it."""
        from nonet.controller.plan_text import plan_text

        return plan_text(self)


def plan(scenario: Scenario, view: ClusterView, *, threads: int = 0) -> Plan:
    """Place every group of the scenario on the view; `threads` overrides the planned torch threads a worker.

    Raises PlacementError that names group, resource, asked, free, total, who holds it and what to change.
    """
    from nonet.controller.notes import cluster_words, make_notes, pool_words

    capacity = Capacity(view)
    groups = _with_threads(_placed(drafts(scenario), capacity, view, ()), view, threads)
    changes, by_stage = _changes(scenario, groups, capacity, view, threads)
    ledger = make_ledger(scenario, by_stage, view)
    return Plan(
        scenario.name,
        scenario.seed,
        groups,
        tuple(StagePlan(**stage) for stage in make_stages(scenario, by_stage, ledger)),
        pool_words(scenario, groups),
        cluster_words(view),
        tuple(make_notes(scenario, view, groups)),
        changes,
        ledger,
        _left(view, capacity),
        {name: view.node(name).total.get("CPU", 0.0) for name in sorted(_used(groups, changes))},
    )


def replan(scenario: Scenario, view: ClusterView, stage: str | None, before: Iterable[GroupPlan]) -> Change:
    """What must stop and start so that the groups `before` become those of `stage` on the view: nothing moves needlessly.

    A group stays when its draft is the same and its nodes are still there; `view` says what is free beside them.
    """
    return _change(scenario, stage, tuple(before), Capacity(view), view, 0)[0]


def _placed(
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


def _with_threads(groups: tuple[GroupPlan, ...], view: ClusterView, given: int) -> tuple[GroupPlan, ...]:
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
    least = float(_MOST_THREADS)
    for node in {*widest, *evaluators}:
        least = min(least, view.node(node).total.get("CPU", 1.0) / (evaluators[node] + widest[node]))
    return max(1, int(least))


def _changes(
    scenario: Scenario, groups: tuple[GroupPlan, ...], capacity: Capacity, view: ClusterView, threads: int
) -> tuple[tuple[Change, ...], dict[str, tuple[GroupPlan, ...]]]:
    """Re-plans before the stages that name roles of their own, and back after them; and the groups of every stage."""
    found, by_stage, now, own = [], {}, groups, False
    for stage, body in scenario.stages.items():
        if body.roles or own:
            change, now = _change(scenario, stage, now, capacity, view, threads)
            if change.stops or change.starts:
                found.append(change)
        by_stage[stage], own = now, bool(body.roles)
    return tuple(found), by_stage


def _change(
    scenario: Scenario,
    stage: str | None,
    now: tuple[GroupPlan, ...],
    capacity: Capacity,
    view: ClusterView,
    threads: int,
) -> tuple[Change, tuple[GroupPlan, ...]]:
    wanted = drafts(scenario, stage)
    by_name = {draft.name: draft for draft in wanted}
    alive = {node.id for node in view.nodes}
    kept = tuple(g for g in now if _stays(g, by_name.get(g.name), alive))
    kept = tuple(g for g in kept if not g.shares or g.shares in {k.name for k in kept})
    stops = tuple(g for g in now if g not in kept)
    for group in stops:
        for node in (n for n in group.nodes if n in alive):
            for resource, amount in group.bundle.items():
                capacity.take(node, resource, -amount)
    after = _with_threads(_placed(wanted, capacity, view, kept), view, threads)
    names = {group.name for group in kept}
    starts = tuple(group for group in after if group.name not in names)
    return Change(stage or "", tuple(group.name for group in stops), starts), after


def _stays(group: GroupPlan, draft: Draft | None, alive: set[str]) -> bool:
    return (
        draft is not None
        and (draft.roles, draft.pool, draft.shares) == (group.roles, group.pool, group.shares)
        and draft.least <= group.workers <= draft.most
        and draft.asks == (group.cpus or group.devices)
        and set(group.nodes) <= alive
    )


def _used(groups: tuple[GroupPlan, ...], changes: tuple[Change, ...]) -> set[str]:
    every = (*groups, *(group for change in changes for group in change.starts))
    return {node for group in every for node in group.nodes}


def _left(view: ClusterView, capacity: Capacity) -> dict[str, tuple[int, int]]:
    """Nodes whose devices of a kind are all free after the plan, of how many there are."""
    found: dict[str, tuple[int, int]] = {}
    for node in view.nodes:
        for resource in sorted({*node.devices, "GPU", "NPU"} & set(node.total)):
            total = node.total[resource]
            if total:
                whole, of = found.get(resource, (0, 0))
                found[resource] = (whole + (capacity.free(node.id, resource) >= total), of + 1)
    return dict(sorted(found.items()))

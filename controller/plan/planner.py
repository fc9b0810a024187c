"""The planner: scenario + cluster view -> plan. Pure and deterministic: no Ray, no torch, no clock.

Groups are placed hardest first (devices before CPUs, required topology and gangs before the rest, large before small) and
each by best fit, so that what is left of the cluster is whole nodes; then the memory ledger refuses what cannot fit.
1,000 nodes of 8 devices and 50 groups take a fraction of a second and give the same bytes every time
(tests/controller/plan/test_plan_scale.py).

What follows from the global sizes: a stage's groups, what it takes and gives, steps, and sizes a worker and chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nonet.controller.cluster import ClusterView
from nonet.controller.plan.flops import StageWork, arithmetic
from nonet.controller.plan.memory_ledger import Ledger, make_ledger
from nonet.controller.plan.packing import Capacity
from nonet.controller.plan.placement import GroupPlan, StageChange, make_changes, place_groups, with_threads
from nonet.controller.plan.requests import group_requests
from nonet.controller.plan.resolved import ResolvedRun, resolve_run
from nonet.controller.scenario import Scenario, validation_words

__all__ = ["GroupPlan", "Plan", "StageChange", "StagePlan", "plan"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: which groups work, what it takes and gives, sizes derived from the global ones, and in words when it is
    validated and stops."""

    name: str
    kind: str
    groups: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    derived: Mapping[str, Any] = field(default_factory=dict)
    validation: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run where. `show()` prints it, `as_dict()` is `plan.json`.

    pools     each pool in words; cluster: what the view has, in words
    groups    what the run begins with; changes: re-plans between stages that name roles of their own
    left      whole free nodes after the plan, by resource: (whole, of)
    cores     CPUs of every node that the plan uses
    work      flops and bytes of every stage's step, from shapes
    not_run   roles that are planned and that no run starts
    """

    name: str
    seed: int
    groups: tuple[GroupPlan, ...]
    stages: tuple[StagePlan, ...]
    pools: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""
    notes: tuple[str, ...] = ()
    changes: tuple[StageChange, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    left: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cores: Mapping[str, float] = field(default_factory=dict)
    work: tuple[StageWork, ...] = ()
    not_run: tuple[str, ...] = ()

    def group_of(self, role: str) -> GroupPlan:
        """The group that holds a role. Raises KeyError."""
        for group in self.groups:
            if role in group.roles:
                return group
        raise KeyError(
            f"no group holds the role {role!r}; roles: {', '.join(r for g in self.groups for r in g.roles)}"
        )

    def groups_at(self, stage: str) -> tuple[GroupPlan, ...]:
        """The groups of a stage, after its own re-plan and those before it. Raises KeyError."""
        now, changes = self.groups, {change.stage: change for change in self.changes}
        for planned in self.stages:
            if planned.name in changes:
                now = changes[planned.name].after(now)
            if planned.name == stage:
                return now
        raise KeyError(f"no stage {stage!r} in the plan of {self.name}")

    def chunk(self, stage: str, role: str) -> int | None:
        """What a role computes at once in a stage: positions of a supervised step, prompts of an RL one; None: all of it."""
        group = next(group for group in self.groups_at(stage) if role in group.roles)
        return self.ledger.chunks.get(stage, {}).get(f"{group.name}.{role}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def show(self) -> None:
        """Print the plan."""
        print(self.text())

    def text(self) -> str:
        """The plan as a person reads it."""
        from nonet.controller.plan.text import plan_text

        return plan_text(self)


def plan(scenario: Scenario, view: ClusterView, *, threads: int = 0) -> Plan:
    """Place every group of the scenario on the view; `threads` overrides the planned torch threads a worker.

    Raises PlacementError that names group, resource, asked, free, total, who holds it and what to change, and ConfigError
    for a sparse table that cannot be made.
    """
    from nonet.controller.plan.warnings import cluster_words, make_notes, pool_words
    from nonet.controller.scenario import check_tables, roles_not_run

    check_tables(scenario)
    run = resolve_run(scenario)
    capacity = Capacity(view)
    groups = with_threads(place_groups(group_requests(run), capacity, view, ()), view, threads)
    changes, by_stage = make_changes(run, groups, capacity, view, threads)
    for name, body in scenario.stages.items():
        run.kinds[name].check_groups(name, body, by_stage[name])
    ledger = make_ledger(run, by_stage, view)
    return Plan(
        scenario.name,
        scenario.seed,
        groups,
        tuple(StagePlan(**stage) for stage in make_stages(run, by_stage, ledger)),
        pool_words(scenario, groups),
        cluster_words(view),
        tuple(make_notes(run, view, groups)),
        changes,
        ledger,
        _left(view, capacity),
        {name: view.node(name).total.get("CPU", 0.0) for name in sorted(_used(groups, changes))},
        tuple(arithmetic(run, by_stage)),
        roles_not_run(scenario),
    )


def _used(groups: tuple[GroupPlan, ...], changes: tuple[StageChange, ...]) -> set[str]:
    every = (*groups, *(group for change in changes for group in change.starts))
    return {node for group in every for node in group.nodes}


def _left(view: ClusterView, capacity: Capacity) -> dict[str, tuple[int, int]]:
    """Nodes whose devices of a kind are all free after the plan, of how many there are."""
    whole_by_resource: dict[str, tuple[int, int]] = {}
    for node in view.nodes:
        for resource in sorted({*node.devices, "GPU", "NPU"} & set(node.total)):
            total = node.total[resource]
            if total:
                whole, of = whole_by_resource.get(resource, (0, 0))
                whole_by_resource[resource] = (whole + (capacity.free(node.id, resource) >= total), of + 1)
    return dict(sorted(whole_by_resource.items()))


def make_stages(
    run: ResolvedRun, by_stage: Mapping[str, tuple[GroupPlan, ...]], ledger: Ledger
) -> Iterator[dict[str, Any]]:
    """Arguments of a StagePlan for every stage, from tokenise to evaluate."""
    now = next(iter(by_stage.values()))
    yield _stage("tokenise", "data", _on(now, "tokenise"), ("interactions", "items"), _TOKENISED)
    model: tuple[str, ...] = ()
    for name, body in run.scenario.stages.items():
        now, kind = by_stage[name], run.kinds[name]
        holders = {role: group for group in now for role in group.roles}
        chunks = ledger.chunks.get(name, {})
        own = {role: chunks.get(f"{group.name}.{role}", 0) for role, group in holders.items()}
        sizes = kind.derive_sizes(body, {role: group.workers for role, group in holders.items()}, own)
        on = _on(now, *(role.replace("name.", f"{name}.") for role in kind.roles))
        takes = (*kind.takes, *(model or kind.no_model))
        model = ("model:" + name,)
        validation = validation_words(run.scenario, name)
        yield _stage(name, kind.plan_name, on, takes, model, sizes) | {"validation": validation}
    yield _stage(
        "evaluate", "evaluate", _on(now, "evaluator"), ("sequences", "catalogue", "model"), ("metrics",)
    )


_TOKENISED = ("sequences", "items", "sids", "catalogue")


def _stage(
    name: str,
    kind: str,
    groups: tuple[str, ...],
    takes: tuple[str, ...],
    gives: tuple[str, ...],
    derived: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "groups": groups,
        "takes": takes,
        "gives": gives,
        "derived": derived or {},
    }


def _on(groups: tuple[GroupPlan, ...], *roles: str) -> tuple[str, ...]:
    """Groups that hold one of these roles; a name that ends in a dot stands for all that begin so."""
    prefixes = tuple(role for role in roles if role.endswith("."))
    return tuple(
        group.name
        for group in groups
        if any(role in roles or (prefixes and role.startswith(prefixes)) for role in group.roles)
    )

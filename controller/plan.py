"""The planner: scenario + cluster view -> plan. Pure and deterministic: no Ray, no torch, no clock.

Groups are placed hardest first (devices before CPUs, required topology and gangs before the rest, large before small) and
each by best fit, so that what is left of the cluster is whole nodes; then the memory ledger refuses what cannot fit.
1,000 nodes of 8 devices and 50 groups take a fraction of a second and give the same bytes every time
(tests/controller/test_plan_scale.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nonet.controller.arithmetic import Stage as StageWork
from nonet.controller.arithmetic import arithmetic
from nonet.controller.cluster import ClusterView
from nonet.controller.derived import make_stages
from nonet.controller.draft import drafts
from nonet.controller.fit import Capacity
from nonet.controller.groups import GroupPlan, place_groups, with_threads
from nonet.controller.ledger import Ledger, make_ledger
from nonet.controller.replan import Change, make_changes
from nonet.controller.scenario import Scenario

__all__ = ["Change", "GroupPlan", "Plan", "StagePlan", "plan"]


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
    changes: tuple[Change, ...] = ()
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
        from nonet.controller.plan_text import plan_text

        return plan_text(self)


def plan(scenario: Scenario, view: ClusterView, *, threads: int = 0) -> Plan:
    """Place every group of the scenario on the view; `threads` overrides the planned torch threads a worker.

    Raises PlacementError that names group, resource, asked, free, total, who holds it and what to change, and ConfigError
    for a sparse table that cannot be made.
    """
    from nonet.controller.notes import cluster_words, make_notes, pool_words
    from nonet.controller.support import roles_not_run
    from nonet.controller.tables import check_tables

    check_tables(scenario)
    capacity = Capacity(view)
    groups = with_threads(place_groups(drafts(scenario), capacity, view, ()), view, threads)
    changes, by_stage = make_changes(scenario, groups, capacity, view, threads)
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
        tuple(arithmetic(scenario, by_stage)),
        roles_not_run(scenario),
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

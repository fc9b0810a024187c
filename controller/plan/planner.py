"""The planner: computes a plan from a scenario and a cluster view, deterministically and without Ray, torch or a clock.

Groups are placed in order of difficulty and each by best fit, so that whole nodes remain free. Then the memory ledger
rejects a plan whose groups exceed the memory of a device or host. A plan of 50 groups on 1,000 nodes of 8 devices takes a
fraction of a second (tests/controller/plan/test_plan_scale.py). A plan also derives, from the scenario's global sizes, each
stage's groups, inputs, outputs, steps, and sizes per worker and chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nonet.controller.cluster import ClusterView
from nonet.controller.plan.flops import StageWork, estimate_work
from nonet.controller.plan.memory import estimate_worker_memory
from nonet.controller.plan.memory_ledger import MemoryLedger, format_bytes, make_ledger
from nonet.controller.plan.packing import Capacity
from nonet.controller.plan.placement import (
    GroupPlan,
    StageChange,
    assign_threads,
    change_groups,
    make_changes,
    place_groups,
)
from nonet.controller.plan.requests import make_group_requests
from nonet.controller.plan.resolved import ResolvedRun, resolve_run
from nonet.controller.scenario import Scenario, describe_validation

__all__ = ["GroupPlan", "Plan", "StageChange", "StagePlan", "plan"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of one stage.

    Attributes:
        name: The name of the stage.
        kind: The kind of the stage, as plans call it.
        groups: Names of the groups that work in it.
        takes: Names of the artifacts that it reads.
        gives: Names of the artifacts that it writes.
        derived: Sizes that follow from the scenario's global sizes, by description.
        validation: When the stage is validated and when it stops, in words; "" if it is not validated.
    """

    name: str
    kind: str
    groups: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    derived: Mapping[str, Any] = field(default_factory=dict)
    validation: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which groups run on which nodes in which stage. `show()` prints the plan, and `as_dict()` is the content of `plan.json`.

    Attributes:
        name: The name of the scenario.
        seed: The seed of the scenario.
        groups: The groups at the start of the run.
        stages: The stages, from tokenise to evaluate.
        pools: Each pool in words.
        cluster: The cluster in words.
        notes: Warnings and remarks.
        changes: Changes of groups before stages that name roles of their own, and back after them.
        ledger: The memory of devices and hosts in every phase.
        left: By resource, (the number of nodes whose devices are all free after the plan, the number of nodes that have such
            devices).
        cores: CPUs of every node that the plan uses.
        work: FLOPs and bytes per step of every stage, estimated from shapes.
        meshes: By group of trainers whose engine has a device mesh, its axes and what a worker keeps, in words.
    """

    name: str
    seed: int
    groups: tuple[GroupPlan, ...]
    stages: tuple[StagePlan, ...]
    pools: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""
    notes: tuple[str, ...] = ()
    changes: tuple[StageChange, ...] = ()
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    left: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cores: Mapping[str, float] = field(default_factory=dict)
    work: tuple[StageWork, ...] = ()
    meshes: Mapping[str, str] = field(default_factory=dict)

    def find_group(self, role: str) -> GroupPlan:
        """Return the group that holds a role.

        Raises:
            KeyError: No group holds the role.
        """
        for group in self.groups:
            if role in group.roles:
                return group
        raise KeyError(
            f"no group holds the role {role!r}; roles: {', '.join(r for g in self.groups for r in g.roles)}"
        )

    def list_groups(self, stage: str) -> tuple[GroupPlan, ...]:
        """Return the groups that run in a stage, after all changes up to it.

        Raises:
            KeyError: The plan has no such stage.
        """
        groups, changes = self.groups, {change.stage: change for change in self.changes}
        for stage_plan in self.stages:
            if stage_plan.name in changes:
                groups = changes[stage_plan.name].apply_to(groups)
            if stage_plan.name == stage:
                return groups
        raise KeyError(f"no stage {stage!r} in the plan of {self.name}")

    def find_chunk(self, stage: str, role: str) -> int | None:
        """Return how much a role computes at once in a stage.

        Args:
            stage: The name of the stage.
            role: The name of the role.

        Returns:
            Positions of a supervised step, or prompts of an RL step; None if the role computes everything at once.
        """
        group = next(group for group in self.list_groups(stage) if role in group.roles)
        return self.ledger.chunks.get(stage, {}).get(f"{group.name}.{role}")

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, as `plan.json` contains it."""
        return asdict(self)

    def show(self) -> None:
        """Print the plan."""
        print(self.format_text())

    def format_text(self) -> str:
        """Return the plan as the text that `nonet plan` prints."""
        from nonet.controller.plan.text import format_plan

        return format_plan(self)


@dataclass(frozen=True, slots=True)
class RunningGroups:
    """The groups of a run that changes its workers within a stage.

    Attributes:
        stage: The stage in progress.
        groups: The groups that run now. Those whose request is the same stay, as far as their nodes are available.
        grows: Whether elastic groups with fewer workers than they may have are placed again, with as many as now fit.
    """

    stage: str
    groups: tuple[GroupPlan, ...]
    grows: bool = False


def plan(
    scenario: Scenario, view: ClusterView, *, threads: int = 0, running: RunningGroups | None = None
) -> Plan:
    """Place every group of a scenario on a cluster.

    Args:
        scenario: The scenario.
        view: The cluster.
        threads: Torch threads per worker; 0 to derive them from the cores.
        running: The groups of a run in progress, which hold resources of the view; the plan then begins with its stage.

    Raises:
        PlacementError: A group does not fit; the message names the group, the resource, what it needs, what is free, who
            holds the rest, and what to change.
        ConfigError: `check_scenario` refuses the scenario, or a stage cannot run in its groups.
    """
    from nonet.controller.plan.warnings import describe_cluster, describe_pools, make_notes
    from nonet.controller.scenario import check_scenario

    check_scenario(scenario)
    run = resolve_run(scenario)
    capacity = Capacity(view, scenario.placement)
    if running is None:
        groups = assign_threads(place_groups(make_group_requests(run), capacity, view, ()), view, threads)
    else:
        _, groups = change_groups(
            run, running.stage, running.groups, capacity, view, threads, grows=running.grows
        )
    first_stage = running.stage if running else None
    changes, groups_by_stage = make_changes(run, groups, capacity, view, threads, first_stage)
    for name, stage_options in scenario.stages.items():
        run.kinds[name].check_groups(name, stage_options, groups_by_stage[name])
    ledger = make_ledger(run, groups_by_stage, view)
    return Plan(
        name=scenario.name,
        seed=scenario.seed,
        groups=groups,
        stages=tuple(StagePlan(**stage) for stage in make_stages(run, groups_by_stage, ledger)),
        pools=describe_pools(scenario, groups),
        cluster=describe_cluster(view),
        notes=tuple(make_notes(run, view, groups)),
        changes=changes,
        ledger=ledger,
        left=_count_whole_nodes(view, capacity),
        cores={
            name: view.get_node(name).total.get("CPU", 0.0)
            for name in sorted(_list_used_nodes(groups, changes))
        },
        work=tuple(estimate_work(run, groups_by_stage)),
        meshes=_describe_meshes(run, groups),
    )


def _describe_meshes(run: ResolvedRun, groups: tuple[GroupPlan, ...]) -> dict[str, str]:
    """Return, by group of trainers, the axes of the engine's device mesh and what a worker keeps in the fullest stage."""
    engine = run.scenario.roles["trainer"].engine if "trainer" in run.scenario.roles else None
    axes = engine.get_axes() if engine is not None else {}
    described = {}
    for group in groups if axes else ():
        if "trainer" in group.roles and group.workers > 1:
            shards = group.workers // math.prod(axes.values())
            sizes_by_axis = {
                "replicate": 1,
                "shard": shards,
                "tensor": 1,
                **axes,
            }  # Ranks of the last axis are neighbours.
            shape = {axis: size for axis, size in sizes_by_axis.items() if size > 1 or axis == "shard"}
            fixed = max(
                (
                    estimate_worker_memory(run, stage, group.roles, group.workers, 0.0).fixed
                    for stage in run.scenario.stages
                ),
                key=lambda parts: sum(parts.values()),
            )
            sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in fixed.items())
            described[group.name] = (
                f"{' x '.join(f'{axis} {size}' for axis, size in shape.items())}; a worker keeps {sizes}"
            )
    return described


def _list_used_nodes(groups: tuple[GroupPlan, ...], changes: tuple[StageChange, ...]) -> set[str]:
    """Return the nodes that the plan uses at any time."""
    all_groups = (*groups, *(group for change in changes for group in change.starts))
    return {node for group in all_groups for node in group.nodes}


def _count_whole_nodes(view: ClusterView, capacity: Capacity) -> dict[str, tuple[int, int]]:
    """Return, by resource, how many nodes have all their devices free after the plan, and how many nodes have such devices."""
    whole_by_resource: dict[str, tuple[int, int]] = {}
    for node in view.nodes:
        for resource in sorted({*node.devices, "GPU", "NPU"} & set(node.total)):
            total = node.total[resource]
            if total:
                whole_count, node_count = whole_by_resource.get(resource, (0, 0))
                whole_by_resource[resource] = (
                    whole_count + (capacity.get_free(node.id, resource) >= total),
                    node_count + 1,
                )
    return dict(sorted(whole_by_resource.items()))


def make_stages(
    run: ResolvedRun, groups_by_stage: Mapping[str, tuple[GroupPlan, ...]], ledger: MemoryLedger
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a StagePlan for every stage, from tokenise to evaluate.

    Args:
        run: The scenario with everything that follows from it.
        groups_by_stage: The groups of each stage.
        ledger: The memory ledger, for the chunks.
    """
    groups = next(iter(groups_by_stage.values()))
    yield _make_stage_fields(
        name="tokenise",
        kind="data",
        groups=_find_groups(groups, "tokenise"),
        takes=("interactions", "items"),
        gives=(*_TOKENISED_ARTIFACTS, *(("graphs",) if run.scenario.data.graph else ())),
    )
    newest_model: tuple[str, ...] = ()
    for name, stage_options in run.scenario.stages.items():
        groups, kind = groups_by_stage[name], run.kinds[name]
        group_by_role = {role: group for group in groups for role in group.roles}
        chunks = ledger.chunks.get(name, {})
        chunk_by_role = {role: chunks.get(f"{group.name}.{role}", 0) for role, group in group_by_role.items()}
        workers = {role: group.workers for role, group in group_by_role.items()}
        for role, group in group_by_role.items():  # The trainers of a tensor group share their samples.
            if role == "trainer" or (role == "rollout" and "trainer" in group.roles):
                workers[role] //= run.scenario.tensor_ranks
        sizes = kind.derive_sizes(stage_options, workers, chunk_by_role)
        # In the roles of a kind, "name." stands for the roles that belong to the stage of this name, such as its rewards.
        group_names = _find_groups(groups, *(role.replace("name.", f"{name}.") for role in kind.roles))
        takes = (*kind.takes, *(newest_model or kind.no_model))
        newest_model = ("model:" + name,)
        validation = describe_validation(run.scenario, name)
        yield _make_stage_fields(name, kind.plan_name, group_names, takes, newest_model, sizes) | {
            "validation": validation
        }
    yield _make_stage_fields(
        name="evaluate",
        kind="evaluate",
        groups=_find_groups(groups, "evaluator"),
        takes=("sequences", "catalogue", "model"),
        gives=("metrics",),
    )


_TOKENISED_ARTIFACTS = ("sequences", "items", "sids", "catalogue")


def _make_stage_fields(
    name: str,
    kind: str,
    groups: tuple[str, ...],
    takes: tuple[str, ...],
    gives: tuple[str, ...],
    derived: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a StagePlan, all but `validation`."""
    return {
        "name": name,
        "kind": kind,
        "groups": groups,
        "takes": takes,
        "gives": gives,
        "derived": derived or {},
    }


def _find_groups(groups: tuple[GroupPlan, ...], *roles: str) -> tuple[str, ...]:
    """Return the names of groups that hold one of the roles; a role that ends with a dot stands for all that begin with it."""
    prefixes = tuple(role for role in roles if role.endswith("."))
    return tuple(
        group.name
        for group in groups
        if any(role in roles or (prefixes and role.startswith(prefixes)) for role in group.roles)
    )

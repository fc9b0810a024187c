"""The planner: scenario + cluster view -> plan. Pure and deterministic: no Ray, no torch, no clock.

By default trainer, rollout and embedding shards are fused in one process; each reward and the evaluator have one of their
own on cpu. On CPU the groups of a pipeline take turns, so a worker asks Ray for a quarter core and computes with
`threads`; that count is the same for every torch role, so that fused and separate runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nonet.controller.cluster import ClusterView, Node
from nonet.controller.options import BatchSize, Elastic, Pool, Reinforced, Role, Supervised
from nonet.controller.scenario import Scenario
from nonet.errors import PlacementError

_RESOURCES = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}
_TORCH_CPUS, _LIGHT_CPUS = 0.25, 0.05
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group of processes.

    roles      what each process holds (more than one: fused)
    shares     the group whose devices these workers share, "" for bundles of their own (collocate)
    cpus, devices   what one worker asks Ray for
    threads    torch threads a worker, 0 for roles without torch
    nodes      node of each rank
    """

    name: str
    roles: tuple[str, ...]
    pool: str
    device: str
    workers: int
    cpus: float
    devices: float
    threads: int
    nodes: tuple[str, ...]
    shares: str = ""


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
    """What will run where. `show()` prints it, `as_dict()` is `plan.json`."""

    name: str
    seed: int
    groups: tuple[GroupPlan, ...]
    stages: tuple[StagePlan, ...]
    notes: tuple[str, ...] = ()

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
        lines = [f"{self.name} (seed {self.seed})", "", "groups"]
        lines += [f"  {_group_line(group)}" for group in self.groups]
        lines += ["", "stages"]
        for stage in self.stages:
            derived = ", ".join(f"{key} {value}" for key, value in stage.derived.items())
            lines.append(
                f"  {stage.name:<10} {stage.kind:<10} on {', '.join(stage.groups)}"
                + (f": {derived}" if derived else "")
            )
            lines.append(f"  {'':<10} {', '.join(stage.takes)} -> {', '.join(stage.gives)}")
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])


def plan(scenario: Scenario, view: ClusterView) -> Plan:
    """Place every group of the scenario on the view.

    Raises PlacementError that names group, resource, asked, free and total.
    """
    free = {node.id: dict(node.free) for node in view.nodes}
    drafts = list(_drafts(scenario))
    placed = [_place(draft, scenario, view, free) for draft in drafts if not draft.role.collocate]
    by_role = {role: group for group in placed for role in group.roles}
    for draft in drafts:
        if draft.role.collocate:
            placed.append(_beside(draft, by_role[draft.role.collocate]))
    threads = _threads(placed, view)
    groups = tuple(_with_threads(group, threads) for group in placed)
    return Plan(
        scenario.name,
        scenario.seed,
        groups,
        tuple(_stages(scenario, groups)),
        tuple(_notes(scenario, groups)),
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    name: str
    roles: tuple[str, ...]
    role: Role
    light: bool


def _drafts(scenario: Scenario) -> Iterator[_Draft]:
    """Groups in the order they are placed: those that need most first."""
    roles = dict(scenario.roles)
    roles.setdefault("trainer", Role())
    for role in ("rollout", "embedding"):
        roles.setdefault(role, Role(fuse="trainer"))
    roles.setdefault("evaluator", Role())
    fused: dict[str, list[str]] = {}
    for name, role in roles.items():
        if role.fuse:
            fused.setdefault(role.fuse, []).append(name)
    first = ("trainer", "rollout", "embedding", "evaluator")
    order = [*(r for r in first if r in roles), *(r for r in roles if r not in first)]
    for name in order:
        if not roles[name].fuse:
            held = [name, *(r for r in order if r in fused.get(name, ()))]
            if name == "evaluator":
                held.append("tokenise")
            yield _Draft(name, tuple(held), roles[name], light=False)
    for stage, body in scenario.stages.items():
        if isinstance(body, Reinforced):
            for reward, options in body.rewards.items():
                name = f"{stage}.reward.{reward}"
                yield _Draft(name, (name,), Role(pool=options.pool, workers=options.workers), light=True)
            for index, step in enumerate(body.between):
                name = f"{stage}.between.{index}"
                yield _Draft(name, (name,), Role(pool=step.pool, workers=step.workers), light=True)


def _place(
    draft: _Draft, scenario: Scenario, view: ClusterView, free: dict[str, dict[str, float]]
) -> GroupPlan:
    pool_name = draft.role.pool or "cpu"
    pool = scenario.pools.get(pool_name, Pool())
    resource = _RESOURCES.get(pool.device, pool.device.upper())
    each = (_LIGHT_CPUS if draft.light else _TORCH_CPUS) if resource == "CPU" else 1.0
    nodes = [node for node in view.nodes if pool.labels.items() <= node.labels.items()]
    least, most = _range(draft.role.workers)
    chosen: list[str] = []
    while len(chosen) < most:
        node = _best(nodes, free, resource, each)
        if node is None:
            break
        free[node.id][resource] -= each
        chosen.append(node.id)
    if len(chosen) < least:
        raise PlacementError(_short(draft.name, pool_name, pool, resource, each * least, nodes, view))
    cpus, devices = (each, 0.0) if resource == "CPU" else (0.0, each)
    return GroupPlan(
        draft.name,
        draft.roles,
        pool_name,
        pool.device,
        len(chosen),
        cpus,
        devices,
        0 if draft.light else 1,
        tuple(chosen),
    )


def _best(nodes: list[Node], free: dict[str, dict[str, float]], resource: str, each: float) -> Node | None:
    """Best fit: the node with the least free that still fits, so that whole nodes stay whole."""
    fitting = [node for node in nodes if free[node.id].get(resource, 0.0) >= each - 1e-9]
    return min(fitting, key=lambda node: (free[node.id][resource], node.id), default=None)


def _beside(draft: _Draft, host: GroupPlan) -> GroupPlan:
    return GroupPlan(
        draft.name,
        draft.roles,
        host.pool,
        host.device,
        host.workers,
        host.cpus / 2,
        host.devices / 2,
        1,
        host.nodes,
        shares=host.name,
    )


def _threads(groups: list[GroupPlan], view: ClusterView) -> int:
    """Cores of the tightest node over the torch workers busy at once on it: its evaluators beside its widest other group."""
    cpus = {node.id: node.total.get("CPU", 1.0) for node in view.nodes}
    torch = [group for group in groups if group.threads]
    least = float(_MOST_THREADS)
    for node in {node for group in torch for node in group.nodes}:
        counts = {group.name: group.nodes.count(node) for group in torch}
        evaluators = counts.pop("evaluator", 0)
        least = min(least, cpus[node] / (evaluators + max(counts.values(), default=0)))
    return max(1, int(least))


def _with_threads(group: GroupPlan, threads: int) -> GroupPlan:
    fields = {name: getattr(group, name) for name in GroupPlan.__dataclass_fields__}
    return GroupPlan(**(fields | {"threads": threads if group.threads else 0}))


def _stages(scenario: Scenario, groups: tuple[GroupPlan, ...]) -> Iterator[StagePlan]:
    def on(*roles: str) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                g.name
                for g in groups
                for r in g.roles
                if r in roles or any(r.startswith(p) for p in roles if p.endswith("."))
            )
        )

    workers = next(g.workers for g in groups if "trainer" in g.roles)
    yield StagePlan(
        "tokenise",
        "data",
        on("tokenise"),
        ("interactions", "items"),
        ("sequences", "items", "sids", "catalogue"),
    )
    model = "nothing"
    for name, body in scenario.stages.items():
        if isinstance(body, Supervised):
            given = (
                ("sequences", "sids") if model == "nothing" else ("sequences", "sids", model),
                ("model:" + name,),
            )
            yield StagePlan(
                name, "supervised", on("trainer", "embedding"), *given, _supervised_sizes(body, workers)
            )
        else:
            given = (("sequences", "catalogue", model), ("model:" + name,))
            yield StagePlan(
                name,
                "rl",
                on("trainer", "rollout", "embedding", f"{name}."),
                *given,
                _rl_sizes(body, workers),
            )
        model = "model:" + name
    yield StagePlan(
        "evaluate", "evaluate", on("evaluator"), ("sequences", "catalogue", "model"), ("metrics",)
    )


def _supervised_sizes(body: Supervised, workers: int) -> dict[str, Any]:
    length = {"epochs": body.epochs} if body.epochs else {"tokens": f"{body.tokens:g}"}
    return length | _per_worker(body.batch, workers)


def _per_worker(batch: BatchSize, workers: int) -> dict[str, Any]:
    if batch.users:
        return {"users a step": batch.users, "users a trainer": -(-batch.users // workers)}
    return {"tokens a step": f"{batch.tokens:g}", "tokens a trainer": f"{(batch.tokens or 0) / workers:g}"}


def _rl_sizes(body: Reinforced, workers: int) -> dict[str, Any]:
    width = body.rollout.options().get("width", 1)
    return {
        "steps": body.steps,
        "users a step": body.users,
        "beams a step": body.users * width,
        "beams a trainer": -(-body.users // workers) * width,
    }


def _notes(scenario: Scenario, groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    for group in groups:
        wanted = scenario.roles.get(group.roles[0], Role()).workers
        if isinstance(wanted, Elastic):
            yield f"{group.name}: {group.workers} of {wanted.min}..{wanted.max} workers fit"


def _range(workers: int | Elastic) -> tuple[int, int]:
    return (workers.min, workers.max) if isinstance(workers, Elastic) else (workers, workers)


def _short(
    group: str, pool_name: str, pool: Pool, resource: str, asked: float, nodes: list[Node], view: ClusterView
) -> str:
    free, total = (
        sum(n.free.get(resource, 0.0) for n in nodes),
        sum(n.total.get(resource, 0.0) for n in nodes),
    )
    labels = f" with labels {dict(pool.labels)}" if pool.labels else ""
    return (
        f"group {group!r} (pool {pool_name}) needs {asked:g} {resource}{labels}, the cluster has {total:g} in {len(nodes)} "
        f"of {len(view.nodes)} nodes, {free:g} free before this plan. "
        "Lower its workers, add a node, or plan for another cluster with --cluster."
    )


def _group_line(group: GroupPlan) -> str:
    each = (
        f"{group.devices:g} {_RESOURCES.get(group.device, group.device)}"
        if group.devices
        else f"{group.cpus:g} CPU"
    )
    spots: dict[str, int] = {}
    for node in group.nodes:
        spots[node] = spots.get(node, 0) + 1
    where = ", ".join(f"{node} x{count}" for node, count in list(spots.items())[:4]) + (
        f" and {len(spots) - 4} more" if len(spots) > 4 else ""
    )
    roles = f" = {' + '.join(group.roles)}" if len(group.roles) > 1 else ""
    shared = f", on the devices of {group.shares}" if group.shares else ""
    threads = f", {group.threads} threads" if group.threads else ""
    return f"{group.name}{roles}: {group.workers} x {each} ({group.pool}{threads}{shared}) on {where}"

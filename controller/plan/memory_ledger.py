"""The memory ledger: what every device and host holds in every phase of every stage; what cannot fit is refused.

Groups on the same devices (collocate) are all resident when they fit together. Where they don't, those that rest in a phase
are offloaded to host memory and they take turns; then, of a trainer fused with roles that work, what it alone holds. What
works at the same time cannot take turns, so an overlap over the device's memory is a PlacementError that names the numbers,
before anything is allocated. On cpu a bundle is a device when its pool says how much memory one has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nonet.controller.cluster import MEMORY, ClusterView
from nonet.controller.plan.memory import (
    PROCESS_BYTES,
    RUNTIME_BYTES,
    Need,
    need,
    stepped_on_host,
    usual_share,
)
from nonet.controller.plan.placement import GroupPlan
from nonet.controller.plan.resolved import ResolvedRun, shard_bytes
from nonet.controller.scenario import Scenario
from nonet.errors import PlacementError

_WORK = {
    "activations": "trainer",
    "copies": "trainer",
    "buffer": "trainer",
    "beams": "rollout",
}  # whose phases a working part belongs to
_USABLE = 0.92  # of a device's memory; allocators fragment the rest


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One device (or host) in one phase. parts: bytes by "group.part"; capacity 0: not known, so not checked.

    offloaded   groups whose bytes wait in host memory meanwhile; "group/role" for what one fused role alone holds
    """

    stage: str
    phase: str
    place: str
    resource: str
    parts: Mapping[str, int]
    capacity: int
    offloaded: tuple[str, ...] = ()
    example: str = ""

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def counted(self) -> int:
        """Without a host's processes, whose size is a rule of thumb: they alone refuse nothing."""
        return sum(value for part, value in self.parts.items() if not part.endswith(".processes"))


@dataclass(frozen=True, slots=True)
class Ledger:
    """All lines, and by stage what a group's role computes at once: positions of a supervised step, prompts of an RL one."""

    lines: tuple[LedgerLine, ...] = ()
    chunks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def peak(self, stage: str, place: str) -> LedgerLine:
        """The phase of a stage in which a place holds most."""
        return max(
            (line for line in self.lines if (line.stage, line.place) == (stage, place)),
            key=lambda line: line.needed,
        )

    def turns(self) -> tuple[LedgerLine, ...]:
        """The phases in which somebody is offloaded."""
        return tuple(line for line in self.lines if line.offloaded)


def make_ledger(run: ResolvedRun, by_stage: Mapping[str, tuple[GroupPlan, ...]], view: ClusterView) -> Ledger:
    """Account for the groups of every stage. Raises PlacementError where a phase cannot fit."""
    scenario = run.scenario
    lines: list[LedgerLine] = []
    chunks: dict[str, dict[str, int]] = {}
    for stage, groups in by_stage.items():
        aside: dict[str, float] = defaultdict(float)
        for root in (group for group in groups if not group.shares and _is_counted(scenario, group)):
            together = [group for group in groups if root.name in (group.name, group.shares)]
            for line, needs in _device_lines(run, stage, together, view):
                lines.append(line)
                _note(chunks.setdefault(stage, {}), needs, _phases(run, stage).get(line.phase))
                for name in (
                    line.offloaded if root.resource != "CPU" else ()
                ):  # there they go to a mapped file
                    waits = needs[_group(name)].idle_bytes - _kept(line, _group(name))
                    aside[_group(name)] = max(aside[_group(name)], waits)
        line, needs = _host_line(run, stage, groups, view, aside)
        lines.append(line)
        _note(chunks.setdefault(stage, {}), needs, _phases(run, stage).get(line.phase))
    for line in lines:
        if line.capacity and line.counted > line.capacity:
            raise PlacementError(_refusal(line, scenario))
    return Ledger(tuple(lines), chunks)


def _phases(run: ResolvedRun, stage: str) -> dict[str, tuple[str, ...]]:
    """Who works at once in a stage, phase by phase: roles, "reward" for all rewards. Everybody else on the device rests."""
    return run.kinds[stage].list_phases(run.scenario.stages[stage])


def _device_lines(
    run: ResolvedRun, stage: str, groups: list[GroupPlan], view: ClusterView
) -> Iterator[tuple[LedgerLine, dict[str, Need]]]:
    """The phases of one device, each with what its groups need."""
    root = groups[0]
    runtime = 0 if root.resource == "CPU" else RUNTIME_BYTES
    capacity = int(_USABLE * min(_device_bytes(run.scenario, view, node, root) for node in set(root.nodes)))
    for phase, working in _phases(run, stage).items():
        busy = [group for group in groups if _works(group, working)]
        resident = runtime * len(groups)
        budget = max(1.0, (capacity - resident) / max(1, len(busy))) if capacity else 0.0
        needs = _fitting(run, stage, groups, busy, budget)
        active = () if phase == "publish" else working
        parts = _parts(groups, needs, active, runtime)
        resting = [g for g in groups if g not in busy and needs[g.name].idle_bytes]
        resting.sort(key=lambda g: -needs[g.name].idle_bytes)
        halves = [g for g in busy if "trainer" in g.roles and "trainer" not in working]
        offloaded = []
        for group in (*resting, *halves):
            if not capacity or sum(parts.values()) <= capacity:
                break
            parts = {key: value for key, value in parts.items() if not key.startswith(f"{group.name}.")}
            left: dict[str, float] = {"runtime": runtime} if runtime else {}
            if group in halves:
                roles = tuple(role for role in group.roles if role != "trainer")
                rest = need(run, stage, roles, group.workers, budget)
                left |= {**rest.fixed, **rest.working}
            parts |= {f"{group.name}.{part}": int(value) for part, value in left.items()}
            offloaded.append(group.name if group in resting else f"{group.name}/trainer")
        yield (
            LedgerLine(
                stage, phase, root.name, root.resource, parts, capacity, tuple(offloaded), root.nodes[0]
            ),
            needs,
        )


def _fitting(
    run: ResolvedRun,
    stage: str,
    groups: list[GroupPlan],
    busy: list[GroupPlan],
    budget: float,
) -> dict[str, Need]:
    """What the groups of a device need when each that works has `budget` bytes (0: not known).

    Chunks that hold what a step usually has leave those that rest where they are: only such as do not fit beside them send
    them away.
    """

    def needs(bytes_each: float) -> dict[str, Need]:
        return {g.name: need(run, stage, g.roles, g.workers, bytes_each) for g in groups}

    whole = needs(budget)
    rest = sum(whole[g.name].idle_bytes for g in groups if g not in busy)
    if not budget or not rest:
        return whole
    beside = needs(max(1.0, budget - rest / max(1, len(busy))))
    usual = {g.name: usual_share(run, stage, g.workers) for g in busy}
    small = any(chunk < usual[g.name] for g in busy for chunk in beside[g.name].chunks.values())
    return whole if small else beside


def _parts(
    groups: list[GroupPlan], needs: Mapping[str, Need], active: tuple[str, ...], runtime: int
) -> dict[str, int]:
    parts: dict[str, int] = {}
    for group in groups:
        own: dict[str, float] = {"runtime": runtime} if runtime else {}
        own |= needs[group.name].fixed
        own |= {part: value for part, value in needs[group.name].working.items() if _WORK[part] in active}
        parts |= {f"{group.name}.{part}": int(value) for part, value in own.items()}
    return parts


def _host_line(
    run: ResolvedRun,
    stage: str,
    groups: tuple[GroupPlan, ...],
    view: ClusterView,
    aside: Mapping[str, float],
) -> tuple[LedgerLine, dict[str, Need]]:
    """The tightest host: processes, CPU groups' models, shards of the tables, and what was offloaded."""
    by_node: dict[str, dict[str, int]] = defaultdict(dict)
    needs: dict[str, Need] = {}
    for group in groups:
        counts = group.on_nodes()
        each: dict[str, float] = {"processes": PROCESS_BYTES}
        if group.resource == "CPU":
            smallest = min(_host_bytes(view, node) / count for node, count in counts.items())
            needs[group.name] = need(run, stage, group.roles, group.workers, smallest / 4)
            each |= {**needs[group.name].fixed, **needs[group.name].working}
        if "embedding" in group.roles and (rows := shard_bytes(run.scenario, group.workers)):
            each["rows"] = rows
        if stepped := stepped_on_host(run, stage, group.roles, group.workers):
            each["optimizer"] = stepped
        if group.name in aside:
            each["offloaded"] = aside[group.name]
        for node, count in counts.items():
            by_node[node] |= {f"{group.name}.{part}": int(count * value) for part, value in each.items()}
    tightest = max(by_node, key=lambda n: (_pressure(by_node[n], _host_bytes(view, n)), n))
    capacity = int(_USABLE * _host_bytes(view, tightest))
    return LedgerLine(stage, "host", "host", MEMORY, by_node[tightest], capacity, (), tightest), needs


def _pressure(parts: Mapping[str, int], capacity: float) -> float:
    return sum(parts.values()) / capacity if capacity else 0.0


def _works(group: GroupPlan, working: tuple[str, ...]) -> bool:
    return bool(set(group.roles) & set(working)) or (
        "reward" in working and any(".reward." in role or ".between." in role for role in group.roles)
    )


def _is_counted(scenario: Scenario, group: GroupPlan) -> bool:
    return group.resource != "CPU" or bool(_pool_bytes(scenario, group))


def _device_bytes(scenario: Scenario, view: ClusterView, node: str, group: GroupPlan) -> float:
    """What a device of a group has: as its pool says, as the view knows, the smaller of both; 0 where neither does."""
    facts = view.node(node).devices.get(group.resource)
    known = [value for value in (facts.memory_bytes if facts else 0, _pool_bytes(scenario, group)) if value]
    return float(min(known, default=0))


def _pool_bytes(scenario: Scenario, group: GroupPlan) -> int:
    pool = scenario.pools.get(group.pool)
    return (pool.memory or 0) if pool else 0


def _group(unit: str) -> str:
    return unit.partition("/")[0]


def _kept(line: LedgerLine, group: str) -> int:
    """Bytes of a group that stay on the device in a phase, its runtime and what works aside."""
    names = ("weights", "optimizer", "gradients", "reference", "copy")
    return sum(line.parts.get(f"{group}.{name}", 0) for name in names)


def _host_bytes(view: ClusterView, node: str) -> float:
    return view.node(node).total.get(MEMORY, 0.0)


def _note(chunks: dict[str, int], needs: Mapping[str, Need], working: tuple[str, ...] | None) -> None:
    """Keep the smallest chunk of the phases in which a role works; None: of a host, where all do."""
    for group, group_need in needs.items():
        for role, chunk in group_need.chunks.items():
            if working is None or role in working:
                name = f"{group}.{role}"
                chunks[name] = min(chunk, chunks.get(name, chunk))


def _refusal(line: LedgerLine, scenario: Scenario) -> str:
    by_group: dict[str, list[tuple[str, int]]] = {}
    for key, value in line.parts.items():
        group, part = key.rsplit(".", 1)
        by_group.setdefault(group, []).append((part, value))
    shares = "; ".join(
        f"{group} {gigabytes(sum(v for _, v in parts))} ({', '.join(f'{p} {gigabytes(v)}' for p, v in parts)})"
        for group, parts in by_group.items()
    )
    stale = line.phase == "rollout + update" and len(by_group) > 1
    way_out = (
        f"Set stages.{line.stage}.rollout.staleness to 0 so that they take turns, or give one of them devices of its own."
        if stale
        else "Lower the table budgets or processes a node, or spread over more nodes."
        if line.resource == MEMORY
        else "Raise pools.X.memory of its pool, or give a group that shares the bundle one of its own."
        if line.resource == "CPU"
        else "More workers with engine {use: deepspeed, zero: 3}, a shorter history, or devices with more memory."
    )
    each = "bundle" if line.resource == "CPU" else line.resource
    what = f"node {line.example}" if line.resource == MEMORY else f"each {each} of group {line.place!r}"
    return (
        f"stage {line.stage}, {line.phase}: {what} would hold {gigabytes(line.needed)}, "
        f"{gigabytes(line.capacity)} can be used: {shares}. {way_out}"
    )


def gigabytes(value: float) -> str:
    """Bytes as a person reads them."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} KB"

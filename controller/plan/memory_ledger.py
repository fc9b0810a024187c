"""The memory ledger: the bytes that every device and host holds in every phase of every stage.

Groups on the same devices (`collocate`) all stay resident if they fit together. If they do not, groups that rest in a phase
are offloaded to host memory, and after them the trainer's part of a group whose other roles work. Groups that work at the
same time cannot be offloaded, so a phase that exceeds the memory of the device is a PlacementError with the numbers, raised
before anything is allocated. On cpu, a bundle is treated as a device if its pool states `memory`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nonet.controller.cluster import MEMORY, ClusterView
from nonet.controller.plan.memory import (
    PROCESS_BYTES,
    RUNTIME_BYTES,
    WorkerMemory,
    estimate_host_optimizer_bytes,
    estimate_usual_share,
    estimate_worker_memory,
)
from nonet.controller.plan.placement import GroupPlan
from nonet.controller.plan.resolved import ResolvedRun, count_shard_bytes
from nonet.controller.scenario import Scenario
from nonet.errors import PlacementError

_WORK = {
    "activations": "trainer",
    "copies": "trainer",
    "buffer": "trainer",
    "beams": "rollout",
}  # the role in whose phases the part is held
_USABLE = 0.92  # share of a device's memory; the rest is lost to fragmentation


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Memory of one device or host in one phase.

    Attributes:
        stage: The name of the stage.
        phase: The name of the phase; "host" for a host.
        place: The group whose devices are meant; "host" for a host.
        resource: Ray's name of the device, or "memory" for a host.
        parts: Bytes by "group.part".
        capacity: Usable bytes; 0 if unknown, in which case nothing is checked.
        offloaded: Groups whose bytes are in host memory during the phase; "group/role" for the bytes of one fused role.
        example: One node for which the line holds.
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
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def counted(self) -> int:
        """Bytes that are compared with the capacity.

        They exclude the processes of a host, whose size is only a rule of thumb and must not cause an error on its own.
        """
        return sum(value for part, value in self.parts.items() if not part.endswith(".processes"))


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Memory of all devices and hosts in all phases, and the planned chunk sizes.

    Attributes:
        lines: One line per device or host and phase.
        chunks: By stage and "group.role", how much is computed at once: positions of a supervised step, or prompts of an RL
            step.
    """

    lines: tuple[LedgerLine, ...] = ()
    chunks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def find_peak(self, stage: str, place: str) -> LedgerLine:
        """Return the line of the phase in which a place needs most memory.

        Args:
            stage: The name of the stage.
            place: The name of the group whose devices are meant; "host" for the fullest host.
        """
        return max(
            (line for line in self.lines if (line.stage, line.place) == (stage, place)),
            key=lambda line: line.needed,
        )

    def list_offloading_lines(self) -> tuple[LedgerLine, ...]:
        """Return the lines of phases in which something is offloaded."""
        return tuple(line for line in self.lines if line.offloaded)


def make_ledger(
    run: ResolvedRun, by_stage: Mapping[str, tuple[GroupPlan, ...]], view: ClusterView
) -> MemoryLedger:
    """Account for the memory of the groups of every stage.

    Args:
        run: The scenario with everything that follows from it.
        by_stage: The groups of each stage.
        view: The cluster, for the memory of devices and hosts.

    Raises:
        PlacementError: The groups that work in a phase exceed the memory of a device or host.
    """
    scenario = run.scenario
    lines: list[LedgerLine] = []
    chunks: dict[str, dict[str, int]] = {}
    for stage, groups in by_stage.items():
        aside: dict[str, float] = defaultdict(float)
        for root in (group for group in groups if not group.shares and _is_counted(scenario, group)):
            together = [group for group in groups if root.name in (group.name, group.shares)]
            for line, needs in _make_device_lines(run, stage, together, view):
                lines.append(line)
                _record_chunks(chunks.setdefault(stage, {}), needs, _list_phases(run, stage).get(line.phase))
                for name in (
                    line.offloaded if root.resource != "CPU" else ()
                ):  # on cpu they are moved to a mapped file
                    waits = needs[_parse_group(name)].idle_bytes - _count_kept_bytes(line, _parse_group(name))
                    aside[_parse_group(name)] = max(aside[_parse_group(name)], waits)
        line, needs = _make_host_line(run, stage, groups, view, aside)
        lines.append(line)
        _record_chunks(chunks.setdefault(stage, {}), needs, _list_phases(run, stage).get(line.phase))
    for line in lines:
        if line.capacity and line.counted > line.capacity:
            raise PlacementError(_format_refusal(line, scenario))
    return MemoryLedger(tuple(lines), chunks)


def _list_phases(run: ResolvedRun, stage: str) -> dict[str, tuple[str, ...]]:
    """Return which roles work at the same time in each phase of a stage; "reward" stands for all rewards."""
    return run.kinds[stage].list_phases(run.scenario.stages[stage])


def _make_device_lines(
    run: ResolvedRun, stage: str, groups: list[GroupPlan], view: ClusterView
) -> Iterator[tuple[LedgerLine, dict[str, WorkerMemory]]]:
    """Yield one ledger line per phase for the devices that `groups` share, with the memory that each group needs."""
    root = groups[0]
    runtime = 0 if root.resource == "CPU" else RUNTIME_BYTES
    capacity = int(
        _USABLE * min(_get_device_bytes(run.scenario, view, node, root) for node in set(root.nodes))
    )
    for phase, working in _list_phases(run, stage).items():
        busy = [group for group in groups if _is_working(group, working)]
        resident = runtime * len(groups)
        budget = max(1.0, (capacity - resident) / max(1, len(busy))) if capacity else 0.0
        needs = _fit_chunks(run, stage, groups, busy, budget)
        active = () if phase == "publish" else working
        parts = _collect_parts(groups, needs, active, runtime)
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
                rest = estimate_worker_memory(run, stage, roles, group.workers, budget)
                left |= {**rest.fixed, **rest.working}
            parts |= {f"{group.name}.{part}": int(value) for part, value in left.items()}
            offloaded.append(group.name if group in resting else f"{group.name}/trainer")
        yield (
            LedgerLine(
                stage, phase, root.name, root.resource, parts, capacity, tuple(offloaded), root.nodes[0]
            ),
            needs,
        )


def _fit_chunks(
    run: ResolvedRun,
    stage: str,
    groups: list[GroupPlan],
    busy: list[GroupPlan],
    budget: float,
) -> dict[str, WorkerMemory]:
    """Estimate the memory of the groups on one device, and choose their chunks.

    Chunks are reduced so that resting groups stay resident, unless the chunks would become smaller than a usual step. In
    that case the working groups get the whole budget, and resting groups are offloaded.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage.
        groups: All groups on the device.
        busy: Those that work in the phase.
        budget: Bytes for each working group; 0 if unknown.
    """

    def estimate_needs(bytes_each: float) -> dict[str, WorkerMemory]:
        return {g.name: estimate_worker_memory(run, stage, g.roles, g.workers, bytes_each) for g in groups}

    whole = estimate_needs(budget)
    rest = sum(whole[g.name].idle_bytes for g in groups if g not in busy)
    if not budget or not rest:
        return whole
    beside = estimate_needs(max(1.0, budget - rest / max(1, len(busy))))
    usual = {g.name: estimate_usual_share(run, stage, g.workers) for g in busy}
    small = any(chunk < usual[g.name] for g in busy for chunk in beside[g.name].chunks.values())
    return whole if small else beside


def _collect_parts(
    groups: list[GroupPlan], needs: Mapping[str, WorkerMemory], active: tuple[str, ...], runtime: int
) -> dict[str, int]:
    """Return bytes by "group.part" for the groups of a device, with working memory only for `active` roles."""
    parts: dict[str, int] = {}
    for group in groups:
        own: dict[str, float] = {"runtime": runtime} if runtime else {}
        own |= needs[group.name].fixed
        own |= {part: value for part, value in needs[group.name].working.items() if _WORK[part] in active}
        parts |= {f"{group.name}.{part}": int(value) for part, value in own.items()}
    return parts


def _make_host_line(
    run: ResolvedRun,
    stage: str,
    groups: tuple[GroupPlan, ...],
    view: ClusterView,
    aside: Mapping[str, float],
) -> tuple[LedgerLine, dict[str, WorkerMemory]]:
    """Return the ledger line of the fullest host: processes, models of CPU groups, table shards and offloaded bytes."""
    by_node: dict[str, dict[str, int]] = defaultdict(dict)
    needs: dict[str, WorkerMemory] = {}
    for group in groups:
        counts = group.count_by_node()
        each: dict[str, float] = {"processes": PROCESS_BYTES}
        if group.resource == "CPU":
            smallest = min(_get_host_bytes(view, node) / count for node, count in counts.items())
            needs[group.name] = estimate_worker_memory(run, stage, group.roles, group.workers, smallest / 4)
            each |= {**needs[group.name].fixed, **needs[group.name].working}
        if "embedding" in group.roles and (rows := count_shard_bytes(run.scenario, group.workers)):
            each["rows"] = rows
        if stepped := estimate_host_optimizer_bytes(run, stage, group.roles, group.workers):
            each["optimizer"] = stepped
        if group.name in aside:
            each["offloaded"] = aside[group.name]
        for node, count in counts.items():
            by_node[node] |= {f"{group.name}.{part}": int(count * value) for part, value in each.items()}
    tightest = max(by_node, key=lambda n: (_compute_pressure(by_node[n], _get_host_bytes(view, n)), n))
    capacity = int(_USABLE * _get_host_bytes(view, tightest))
    return LedgerLine(stage, "host", "host", MEMORY, by_node[tightest], capacity, (), tightest), needs


def _compute_pressure(parts: Mapping[str, int], capacity: float) -> float:
    """Return the used share of a host's memory; 0 if the memory is unknown."""
    return sum(parts.values()) / capacity if capacity else 0.0


def _is_working(group: GroupPlan, working: tuple[str, ...]) -> bool:
    """Return whether a group holds one of the working roles; "reward" stands for rewards and steps between."""
    return bool(set(group.roles) & set(working)) or (
        "reward" in working and any(".reward." in role or ".between." in role for role in group.roles)
    )


def _is_counted(scenario: Scenario, group: GroupPlan) -> bool:
    """Return whether the memory of a group's devices is checked: always on accelerators, on cpu if the pool states it."""
    return group.resource != "CPU" or bool(_get_pool_bytes(scenario, group))


def _get_device_bytes(scenario: Scenario, view: ClusterView, node: str, group: GroupPlan) -> float:
    """Return the memory of one device of a group.

    It is the smaller of what the pool states and what the cluster view knows; 0 if both are unknown.
    """
    facts = view.get_node(node).devices.get(group.resource)
    known = [
        value for value in (facts.memory_bytes if facts else 0, _get_pool_bytes(scenario, group)) if value
    ]
    return float(min(known, default=0))


def _get_pool_bytes(scenario: Scenario, group: GroupPlan) -> int:
    """Return the memory per device that the group's pool states; 0 if it states none."""
    pool = scenario.pools.get(group.pool)
    return (pool.memory or 0) if pool else 0


def _parse_group(unit: str) -> str:
    """Return the group of a unit such as "group/role"."""
    return unit.partition("/")[0]


def _count_kept_bytes(line: LedgerLine, group: str) -> int:
    """Return the bytes of a group that stay on the device in a phase, without its runtime and working memory."""
    names = ("weights", "optimizer", "gradients", "reference", "copy")
    return sum(line.parts.get(f"{group}.{name}", 0) for name in names)


def _get_host_bytes(view: ClusterView, node: str) -> float:
    """Return the memory of a node in bytes; 0 if unknown."""
    return view.get_node(node).total.get(MEMORY, 0.0)


def _record_chunks(
    chunks: dict[str, int], needs: Mapping[str, WorkerMemory], working: tuple[str, ...] | None
) -> None:
    """Record the smallest chunk over the phases in which a role works.

    Args:
        chunks: Chunks by "group.role"; updated in place.
        needs: The memory of each group.
        working: The roles that work in the phase; None on a host, where all of them do.
    """
    for group, group_need in needs.items():
        for role, chunk in group_need.chunks.items():
            if working is None or role in working:
                name = f"{group}.{role}"
                chunks[name] = min(chunk, chunks.get(name, chunk))


def _format_refusal(line: LedgerLine, scenario: Scenario) -> str:
    """Format the message for a line that exceeds its capacity: stage, place, bytes by group, and what to change."""
    by_group: dict[str, list[tuple[str, int]]] = {}
    for key, value in line.parts.items():
        group, part = key.rsplit(".", 1)
        by_group.setdefault(group, []).append((part, value))
    shares = "; ".join(
        f"{group} {format_bytes(sum(v for _, v in parts))} ({', '.join(f'{p} {format_bytes(v)}' for p, v in parts)})"
        for group, parts in by_group.items()
    )
    stale = line.phase == "rollout + update" and len(by_group) > 1
    way_out = (
        f"Set stages.{line.stage}.rollout.staleness to 0 so that they take turns, or give one of them devices of its own."
        if stale
        else "Lower the table budgets or the processes per node, or use more nodes."
        if line.resource == MEMORY
        else "Raise pools.X.memory of its pool, or give a group that shares the bundle one of its own."
        if line.resource == "CPU"
        else "More workers with engine {use: deepspeed, zero: 3}, a shorter history, or devices with more memory."
    )
    each = "bundle" if line.resource == "CPU" else line.resource
    what = f"node {line.example}" if line.resource == MEMORY else f"each {each} of group {line.place!r}"
    return (
        f"stage {line.stage}, {line.phase}: {what} would hold {format_bytes(line.needed)}, "
        f"{format_bytes(line.capacity)} can be used: {shares}. {way_out}"
    )


def format_bytes(value: float) -> str:
    """Format a number of bytes with three significant digits in TB, GB, MB or KB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} KB"

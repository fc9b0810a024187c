"""The memory ledger: the bytes that every device and host holds in every phase of every stage.

Groups on the same devices (`collocate`) all stay resident if they fit together. If they do not, groups without work in a
phase are offloaded to host memory first. If that is not enough, groups whose trainer has no work in the phase, while their
other roles have, offload the trainer's part. Groups that work at the
same time cannot be offloaded, so a phase that exceeds the memory of the device is a PlacementError with the numbers, raised
before anything is allocated. On cpu, a bundle is treated as a device if its pool states `memory`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
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

_ROLES_BY_PART = {
    "activations": {"trainer"},
    "copies": {"trainer"},
    "buffer": {"trainer"},
    "gathered weights": {"trainer", "rollout"},
    "beams": {"rollout"},
}  # by part of a worker's working memory: the roles that hold the part while they compute
_CHUNK_SHARE = 0.25  # of a cpu worker's share of its host; processes, rows and offloaded groups take the rest
_USABLE_SHARE = 0.92  # of the memory of a device or host; fragmentation takes the rest


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Memory of one device or host in one phase.

    Attributes:
        stage: The name of the stage.
        phase: The name of the phase; "host" for a host.
        place: The group whose devices are meant; "host" for a host.
        resource: Ray's name of the device, or "memory" for a host.
        parts: Bytes by "group.part", such as "trainer.weights".
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
    run: ResolvedRun, groups_by_stage: Mapping[str, tuple[GroupPlan, ...]], view: ClusterView
) -> MemoryLedger:
    """Account for the memory of the groups of every stage.

    Args:
        run: The scenario with everything that follows from it.
        groups_by_stage: The groups of each stage.
        view: The cluster, for the memory of devices and hosts.

    Raises:
        PlacementError: The groups that work in a phase exceed the memory of a device or host.
    """
    scenario = run.scenario
    lines: list[LedgerLine] = []
    chunks: dict[str, dict[str, int]] = {}
    for stage, groups in groups_by_stage.items():
        offloaded_by_group: dict[str, float] = defaultdict(float)
        for owner in (group for group in groups if not group.shares and _is_counted(scenario, group)):
            sharers = [group for group in groups if owner.name in (group.name, group.shares)]
            for line, memory in _make_device_lines(run, stage, sharers, view):
                lines.append(line)
                _record_chunks(chunks.setdefault(stage, {}), memory, _list_phases(run, stage).get(line.phase))
                # On cpu, offloaded bytes go to a mapped file, which takes no host memory.
                for unit in line.offloaded if owner.resource != "CPU" else ():
                    name = unit.partition("/")[0]  # a unit is "group" or "group/role"
                    moved = memory[name].idle_bytes - _count_kept_bytes(line, name)
                    offloaded_by_group[name] = max(offloaded_by_group[name], moved)
        line, memory = _make_host_line(run, stage, groups, view, offloaded_by_group)
        lines.append(line)
        _record_chunks(chunks.setdefault(stage, {}), memory, _list_phases(run, stage).get(line.phase))
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
    """Yield (ledger line, memory by group) per phase for the devices that `groups` share.

    The first of the groups owns the devices. The memory is that of one worker of each group, with everything resident.
    """
    owner = groups[0]
    runtime_bytes = 0 if owner.resource == "CPU" else RUNTIME_BYTES
    capacity = int(
        _USABLE_SHARE * min(_get_device_bytes(run.scenario, view, node, owner) for node in set(owner.nodes))
    )
    for phase, working_roles in _list_phases(run, stage).items():
        busy_groups = [group for group in groups if _is_working(group, working_roles)]
        runtime_sum = runtime_bytes * len(groups)
        budget_bytes = max(1.0, (capacity - runtime_sum) / max(1, len(busy_groups))) if capacity else 0.0
        memory = _fit_chunks(run, stage, groups, busy_groups, budget_bytes)
        computing_roles = () if phase == "publish" else working_roles  # publishing needs no working memory
        parts = _collect_parts(groups, memory, computing_roles, runtime_bytes)
        resting_groups = [g for g in groups if g not in busy_groups and memory[g.name].idle_bytes]
        resting_groups.sort(key=lambda g: -memory[g.name].idle_bytes)
        # Groups that work in the phase, but not as trainers.
        idle_trainers = [g for g in busy_groups if "trainer" in g.roles and "trainer" not in working_roles]
        offloaded = []
        for group in (*resting_groups, *idle_trainers):
            if not capacity or sum(parts.values()) <= capacity:
                break
            parts = {key: value for key, value in parts.items() if not key.startswith(f"{group.name}.")}
            # The parts of the group that stay on the device: all of its other roles, if only its trainer rests.
            parts_left: dict[str, float] = {"runtime": runtime_bytes} if runtime_bytes else {}
            if group in idle_trainers:
                other_roles = tuple(role for role in group.roles if role != "trainer")
                other_memory = estimate_worker_memory(run, stage, other_roles, group.workers, budget_bytes)
                parts_left |= {**other_memory.fixed, **other_memory.working}
            parts |= {f"{group.name}.{part}": int(value) for part, value in parts_left.items()}
            offloaded.append(group.name if group in resting_groups else f"{group.name}/trainer")
        yield (
            LedgerLine(
                stage=stage,
                phase=phase,
                place=owner.name,
                resource=owner.resource,
                parts=parts,
                capacity=capacity,
                offloaded=tuple(offloaded),
                example=owner.nodes[0],
            ),
            memory,
        )


def _fit_chunks(
    run: ResolvedRun,
    stage: str,
    groups: list[GroupPlan],
    busy_groups: list[GroupPlan],
    budget_bytes: float,
) -> dict[str, WorkerMemory]:
    """Return the memory of one worker of each group on a device, with the chunks that fit beside the other groups.

    Chunks are reduced so that groups without work stay resident, unless a chunk would become smaller than a worker's usual
    share of a step. In that case the working groups get the full budget, and the caller offloads the other groups.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage.
        groups: All groups on the device.
        busy_groups: The groups that work in the phase.
        budget_bytes: Bytes for each working group; 0 if unknown.
    """

    def estimate_memory(budget: float) -> dict[str, WorkerMemory]:
        return {g.name: estimate_worker_memory(run, stage, g.roles, g.workers, budget) for g in groups}

    full = estimate_memory(budget_bytes)
    resting_bytes = sum(full[g.name].idle_bytes for g in groups if g not in busy_groups)
    if not budget_bytes or not resting_bytes:
        return full
    reduced = estimate_memory(max(1.0, budget_bytes - resting_bytes / max(1, len(busy_groups))))
    usual_chunks = {g.name: estimate_usual_share(run, stage, g.workers) for g in busy_groups}
    too_small = any(
        chunk < usual_chunks[g.name] for g in busy_groups for chunk in reduced[g.name].chunks.values()
    )
    return full if too_small else reduced


def _collect_parts(
    groups: list[GroupPlan], memory: Mapping[str, WorkerMemory], computing: tuple[str, ...], runtime: int
) -> dict[str, int]:
    """Return bytes by "group.part" for one worker of each group on a device, with working memory only for `computing` roles."""
    parts: dict[str, int] = {}
    for group in groups:
        own_parts: dict[str, float] = {"runtime": runtime} if runtime else {}
        own_parts |= memory[group.name].fixed
        own_parts |= {
            part: value
            for part, value in memory[group.name].working.items()
            if _ROLES_BY_PART[part] & set(computing)
        }
        parts |= {f"{group.name}.{part}": int(value) for part, value in own_parts.items()}
    return parts


def _make_host_line(
    run: ResolvedRun,
    stage: str,
    groups: tuple[GroupPlan, ...],
    view: ClusterView,
    offloaded_by_group: Mapping[str, float],
) -> tuple[LedgerLine, dict[str, WorkerMemory]]:
    """Return the ledger line of the fullest host, and the memory of one worker of each CPU group.

    The line counts processes, models of CPU groups, table shards, optimizers in host memory, and offloaded bytes.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage.
        groups: The groups of the stage.
        view: The cluster.
        offloaded_by_group: Bytes that one worker of a group has offloaded at most.
    """
    by_node: dict[str, dict[str, int]] = defaultdict(dict)
    memory: dict[str, WorkerMemory] = {}
    for group in groups:
        counts = group.count_by_node()
        parts: dict[str, float] = {"processes": PROCESS_BYTES}
        if group.resource == "CPU":
            share_bytes = min(_get_host_bytes(view, node) / count for node, count in counts.items())
            memory[group.name] = estimate_worker_memory(
                run, stage, group.roles, group.workers, _CHUNK_SHARE * share_bytes
            )
            parts |= {**memory[group.name].fixed, **memory[group.name].working}
        if "embedding" in group.roles and (row_bytes := count_shard_bytes(run.scenario, group.workers)):
            parts["rows"] = row_bytes
        if optimizer_bytes := estimate_host_optimizer_bytes(run, stage, group.roles, group.workers):
            parts["optimizer"] = optimizer_bytes
        if group.name in offloaded_by_group:
            parts["offloaded"] = offloaded_by_group[group.name]
        for node, count in counts.items():
            by_node[node] |= {f"{group.name}.{part}": int(count * value) for part, value in parts.items()}
    fullest = max(by_node, key=lambda n: (_compute_pressure(by_node[n], _get_host_bytes(view, n)), n))
    capacity = int(_USABLE_SHARE * _get_host_bytes(view, fullest))
    line = LedgerLine(
        stage,
        phase="host",
        place="host",
        resource=MEMORY,
        parts=by_node[fullest],
        capacity=capacity,
        example=fullest,
    )
    return line, memory


def _compute_pressure(parts: Mapping[str, int], capacity: float) -> float:
    """Return the used share of a host's memory; 0 if the memory is unknown."""
    return sum(parts.values()) / capacity if capacity else 0.0


def _is_working(group: GroupPlan, working_roles: tuple[str, ...]) -> bool:
    """Return whether a group holds one of the working roles; "reward" stands for rewards and steps between."""
    return bool(set(group.roles) & set(working_roles)) or (
        "reward" in working_roles and any(".reward." in role or ".between." in role for role in group.roles)
    )


def _is_counted(scenario: Scenario, group: GroupPlan) -> bool:
    """Return whether the memory of a group's devices is checked: always on accelerators, on cpu if the pool states it."""
    return group.resource != "CPU" or bool(_get_pool_bytes(scenario, group))


def _get_device_bytes(scenario: Scenario, view: ClusterView, node: str, group: GroupPlan) -> float:
    """Return the memory of one device of a group.

    It is the smaller of what the pool states and what the cluster view knows; 0 if both are unknown.
    """
    facts = view.get_node(node).devices.get(group.resource)
    known_bytes = filter(None, (facts.memory_bytes if facts else 0, _get_pool_bytes(scenario, group)))
    return float(min(known_bytes, default=0))


def _get_pool_bytes(scenario: Scenario, group: GroupPlan) -> int:
    """Return the memory per device that the group's pool states; 0 if it states none."""
    pool = scenario.pools.get(group.pool)
    return (pool.memory or 0) if pool else 0


def _count_kept_bytes(line: LedgerLine, group: str) -> int:
    """Return the bytes that a partly offloaded group keeps on the device, without its runtime and working memory."""
    kept_parts = ("weights", "optimizer", "gradients", "reference", "copy")
    return sum(line.parts.get(f"{group}.{name}", 0) for name in kept_parts)


def _get_host_bytes(view: ClusterView, node: str) -> float:
    """Return the memory of a node in bytes; 0 if unknown."""
    return view.get_node(node).total.get(MEMORY, 0.0)


def _record_chunks(
    chunks: dict[str, int], memory: Mapping[str, WorkerMemory], working_roles: tuple[str, ...] | None
) -> None:
    """Record the smallest chunk over the phases in which a role works.

    Args:
        chunks: Chunks by "group.role"; updated in place.
        memory: The memory of one worker of each group.
        working_roles: The roles that work in the phase; None on a host, where all of them do.
    """
    for group, worker_memory in memory.items():
        for role, chunk in worker_memory.chunks.items():
            if working_roles is None or role in working_roles:
                key = f"{group}.{role}"
                chunks[key] = min(chunk, chunks.get(key, chunk))


def _format_refusal(line: LedgerLine, scenario: Scenario) -> str:
    """Format the message for a line that exceeds its capacity: stage, place, bytes by group, and what to change."""
    by_group: dict[str, list[tuple[str, int]]] = {}
    for key, value in line.parts.items():
        group, part = key.rsplit(".", 1)
        by_group.setdefault(group, []).append((part, value))
    bytes_by_group = "; ".join(
        f"{group} {format_bytes(sum(v for _, v in parts))} ({', '.join(f'{p} {format_bytes(v)}' for p, v in parts)})"
        for group, parts in by_group.items()
    )
    way_out = _describe_way_out(line, by_group)
    device = "bundle" if line.resource == "CPU" else line.resource
    holder = f"node {line.example}" if line.resource == MEMORY else f"each {device} of group {line.place!r}"
    return (
        f"stage {line.stage}, {line.phase}: {holder} would hold {format_bytes(line.needed)}, "
        f"{format_bytes(line.capacity)} can be used: {bytes_by_group}. {way_out}"
    )


def _describe_way_out(line: LedgerLine, groups: Collection[str]) -> str:
    """Return what to change so that a line fits; `groups` are those that hold its bytes."""
    if line.phase == "rollout + update" and len(groups) > 1:
        return f"Set stages.{line.stage}.rollout.staleness to 0 so that they take turns, or give one of them devices of its own."
    if line.resource == MEMORY:
        return "Lower the table budgets or the processes per node, or use more nodes."
    if line.place == "evaluator":
        return "Give roles.evaluator more workers: with roles.trainer.engine {use: fsdp2} they divide the weights."
    if line.place == "rollout":
        return "Set roles.rollout: {fuse: trainer} and roles.trainer.engine: {use: fsdp2}, which divides the weights."
    if line.resource == "CPU":
        return "Raise pools.X.memory of its pool, or give a group that shares the bundle one of its own."
    return "More workers with engine {use: fsdp2}, a shorter history, or devices with more memory."


def format_bytes(value: float) -> str:
    """Format a number of bytes with three significant digits in TB, GB, MB or KB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} KB"

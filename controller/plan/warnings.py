"""The notes of a plan: warnings, elastic groups, sizes of checkpoints, assumptions and unknown values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from nonet.controller.cluster import MEMORY, ClusterView, Elastic
from nonet.controller.plan.memory_ledger import format_bytes
from nonet.controller.plan.placement import GroupPlan
from nonet.controller.plan.resolved import ResolvedRun
from nonet.controller.scenario import (
    Scenario,
    list_missing_verbs,
    make_validation_rule,
)

_MAX_CPU_PARAMETERS = 100e6  # with more, ranking a catalogue on cpu takes hours rather than minutes


def make_notes(run: ResolvedRun, view: ClusterView, groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """Yield the sentences of a plan's notes, warnings first.

    Args:
        run: The scenario with the values derived from it.
        view: The cluster.
        groups: The groups at the start of the run.
    """
    scenario = run.scenario
    yield from _warn_about_devices(groups)
    yield from _list_warnings(run, view, groups)
    yield from _warn_about_wide_tensor_groups(run, groups)
    yield from _describe_placements(scenario, groups)
    yield from _describe_checkpoint_size(run)
    yield from _describe_shared_folder(groups)
    yield from _list_unknowns(run, view, groups)
    yield from _list_derived_settings(scenario)


def _warn_about_wide_tensor_groups(run: ResolvedRun, groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """Yield a warning for trainers of which a tensor group is on several nodes, so that each block waits for the network."""
    ranks = run.scenario.tensor_ranks
    for group in groups if ranks > 1 else ():
        lines = [group.nodes[first : first + ranks] for first in range(0, group.workers, ranks)]
        if "trainer" in group.roles and (wide := next((line for line in lines if len(set(line)) > 1), None)):
            yield (
                f"warning: {group.name} has tensor groups on several nodes ({', '.join(dict.fromkeys(wide))}), and every block "
                f"waits for the network; free {ranks} places, or a multiple of it, on each of its nodes"
            )


def describe_cluster(view: ClusterView) -> str:
    """Describe a cluster, such as "70 nodes, 384 GPU (200 free), 6720 CPU"."""
    node_counts: Counter[str] = Counter()
    for node in view.nodes:
        for resource in node.total:
            if ":" not in resource and "memory" not in resource:  # neither node addresses nor memory
                node_counts[resource] += 1
    resources = []
    for resource in sorted(node_counts, key=lambda name: (name == "CPU", name)):
        total, free = view.get_total(resource), view.get_free(resource)
        resources.append(f"{total:g} {resource}" + (f" ({free:g} free)" if free < total else ""))
    memory_bytes = view.get_total(MEMORY)
    return ", ".join([f"{len(view.nodes)} node{'s' if len(view.nodes) > 1 else ''}", *resources]) + (
        f", {format_bytes(memory_bytes)}" if memory_bytes else ""
    )


def describe_pools(scenario: Scenario, groups: tuple[GroupPlan, ...]) -> dict[str, str]:
    """Return a description of each pool that is used: its device, labels and environment.

    Args:
        scenario: The scenario.
        groups: The groups at the start of the run.
    """
    words_by_pool = {}
    for name, pool in scenario.pools.items():
        if name in {group.pool for group in groups}:
            words = [pool.device, *(f"{key}={value}" for key, value in pool.labels.items())]
            env = pool.env.model_dump(exclude_none=True) if pool.env else {}
            if names := env.pop("vars", None):
                words.append(f"vars {', '.join(names)}")  # values are never shown
            words += [f"{key} {value}" for key, value in env.items() if value]
            words_by_pool[name] = ", ".join(words)
    return words_by_pool


def _warn_about_devices(groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """Yield a warning about devices on which Nonet was not tested."""
    if any(group.device == "npu" for group in groups):
        yield "warning: Nonet has never been run on Ascend devices; docs/how-to/devices.md says what was tested"


def _describe_row_copies(run: ResolvedRun, view: ClusterView, groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """Yield a warning if rollouts in other processes lack memory for copies of the sparse rows."""
    scenario = run.scenario
    rollout = next((group for group in groups if "rollout" in group.roles), None)
    table_bytes = run.budgeted_bytes
    has_rl_stage = any(kind.rolls_out for kind in run.kinds.values())
    if rollout is None or not has_rl_stage or "embedding" in rollout.roles or not table_bytes:
        return
    if table_bytes > scenario.sparse.replica_bytes:  # rollouts read by key from the shards then
        return
    node, worker_count = max(rollout.count_by_node().items(), key=lambda item: item[1])
    memory_bytes = view.get_node(node).total.get(MEMORY, 0.0)
    if memory_bytes and worker_count * table_bytes > memory_bytes:
        yield (
            f"warning: each rollout worker keeps a copy of all sparse rows, up to {format_bytes(table_bytes)}, "
            f"{worker_count} of them on {node}, "
            f"which has {format_bytes(memory_bytes)}; lower sparse.replica_bytes and they read by key from the shards"
        )


def _list_warnings(run: ResolvedRun, view: ClusterView, groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """Yield warnings about copies of rows, idle trainers, and evaluators on CPU."""
    scenario = run.scenario
    yield from _describe_row_copies(run, view, groups)
    for limit, verbs in list_missing_verbs(scenario).items():
        if verbs != ["items add"]:  # who makes semantic ids gives them to new items too
            yield f"warning: a run of {scenario.name} will not have {', '.join(verbs)}: it {limit}"
    for name, join in scenario.data.join.items():
        if join.as_of == "newest":
            yield (
                f"warning: data.join.{name} reads the newest values in training too, so that offline metrics see the future; "
                "as_of: time reads those of each event's time"
            )
    trainer = next(group for group in groups if "trainer" in group.roles)
    for name, stage_options in scenario.stages.items():
        step_users, users_key = run.kinds[name].find_least_users(stage_options)
        if step_users and step_users * scenario.tensor_ranks < trainer.workers:
            idle_trainers = trainer.workers - step_users * scenario.tensor_ranks
            yield (
                f"warning: {name} trains on {step_users} users per step, so {idle_trainers} of {trainer.workers} trainers "
                f"have nothing to do; raise stages.{name}.{users_key}"
            )
    evaluator = next((group for group in groups if "evaluator" in group.roles), None)
    if evaluator and evaluator.resource == "CPU" and run.size.parameters >= _MAX_CPU_PARAMETERS:
        yield (
            f"warning: the evaluator ranks with {run.size.parameters / 1e9:.2g} B parameters on cpu; "
            "give roles.evaluator a pool with devices"
        )


def _describe_checkpoint_size(run: ResolvedRun) -> Iterator[str]:
    """Yield a note on the size of checkpoints, if tables have budgets."""
    scenario = run.scenario
    row_bytes, keep = run.budgeted_bytes, scenario.checkpoint.keep
    if row_bytes:
        size = run.size
        # Per parameter: the weight, two fp32 moments, and an fp32 master copy if the weight has reduced precision.
        dense_bytes = size.parameters * (size.weight_bytes + 8 + (4 if size.weight_bytes < 4 else 0))
        total_bytes = row_bytes + dense_bytes
        count = keep.last + any(make_validation_rule(scenario, name) for name in scenario.stages)
        yield (
            f"a checkpoint every {scenario.checkpoint.every} steps writes up to {format_bytes(total_bytes)} "
            f"({format_bytes(row_bytes)} of it rows); {count} kept checkpoints take {format_bytes(count * total_bytes)}"
        )


def _describe_shared_folder(groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """Yield a note that the run's folder must be shared, if the plan uses more than one node."""
    nodes = {node for group in groups for node in group.nodes}
    if len(nodes) > 1:
        yield (
            f"the run's folder (--run-dir, NONET_RUNS) must be one that all {len(nodes)} nodes reach; "
            "a run checks this before it starts"
        )


def _describe_placements(scenario: Scenario, groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """Yield a note for each group that is elastic or asks for a topology level."""
    for group in groups:
        role = scenario.roles.get(group.roles[0])
        if role is None or group.shares:
            continue
        if isinstance(role.workers, Elastic):
            yield f"{group.name}: {group.workers} of {role.workers.min}..{role.workers.max} workers fit"
        levels = [*role.topology.require, *role.topology.prefer]
        if levels and group.level not in levels:
            place = f"within one {group.level}" if group.level else "without a common level"
            yield f"{group.name}: no {' or '.join(levels)} holds {group.workers} workers now; placed {place}"
        elif levels:
            yield f"{group.name}: all in one {group.level.replace('_', ' ')}"


def _list_unknowns(run: ResolvedRun, view: ClusterView, groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """Yield a note for everything that the plan assumes, does not know or does not count."""
    if run.size.assumed:
        yield f"assumed: {run.size.assumed}"
    unknown_resources = sorted(
        {
            g.resource
            for g in groups
            if g.resource != "CPU" and not _is_memory_known(view, g.nodes[0], g.resource)
        }
    )
    if unknown_resources:
        names = ", ".join(unknown_resources)
        yield f"not known: memory of {names} devices (devices: in the view); nothing was checked against it"
    unbudgeted = [name for name, size in run.table_budgets.items() if size is None]
    if unbudgeted and run.budgeted_bytes:
        yield f"not counted: rows of {', '.join(unbudgeted)} (no budget: they grow with the data)"
    user_groups = [g.name for g in groups if not g.threads and g.resource != "CPU"]
    if user_groups:
        yield f"not counted: what {', '.join(user_groups)} keep on their devices (your own code)"


def _list_derived_settings(scenario: Scenario) -> Iterator[str]:
    """Yield the settings that were derived from the data, with their reasons."""
    if not scenario.settings or isinstance(scenario.settings, str):
        return
    document = scenario.model_dump(mode="python", exclude_none=True, by_alias=True)
    yield f"settings: {len(scenario.settings)} from the data"
    for path, reason in scenario.settings.items():
        value: Any = document
        for part in path.split("."):
            value = value[part]
        yield f"  {path}: {_format_value(value)} ({reason})"


def _format_value(value: Any) -> str:
    """Format a value in YAML flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_format_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_memory_known(view: ClusterView, node: str, resource: str) -> bool:
    """Return whether the memory of a node's devices is known."""
    facts = view.get_node(node).devices.get(resource)
    return bool(facts and facts.memory_bytes)

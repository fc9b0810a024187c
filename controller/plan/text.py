"""Text of a plan for `nonet plan`: groups with their nodes, stages with their sizes, memory, and what is left free."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from nonet.controller.cluster import MEMORY
from nonet.controller.plan.memory_ledger import LedgerLine, MemoryLedger, format_bytes

_MAX_RUNS = 4  # runs of nodes that a group's row names
_TFLOPS = 100  # a round reference value; accelerators reach 50 to 400 TFLOP/s in training


def format_plan(plan: Any) -> str:
    """Format a whole plan."""
    lines = [f"{plan.name} (seed {plan.seed}) on {plan.cluster}", ""]
    if plan.pools:
        lines += ["pools", *_format_table([(name, words) for name, words in plan.pools.items()]), ""]
    lines += ["groups"]
    lines += _format_table([_format_group(group) for group in plan.groups])
    lines += [f"  mesh of {name}: {mesh}" for name, mesh in plan.meshes.items()]
    for change in plan.changes:
        lines += ["", f"before {change.stage}: stop {', '.join(change.stops) or 'nothing'}; start"]
        lines += _format_table([_format_group(group) for group in change.starts]) or ["  nothing"]
    lines += ["", "stages"]
    for stage in plan.stages:
        derived = ", ".join(f"{key} {_format_count(value)}" for key, value in stage.derived.items())
        lines.append(
            f"  {stage.name:<10} {stage.kind:<10} on {', '.join(stage.groups)}"
            + (f": {derived}" if derived else "")
        )
        lines.append(f"  {'':<10} {', '.join(stage.takes)} -> {', '.join(stage.gives)}")
        lines += [f"  {'':<10} {stage.validation}"] if stage.validation else []
    memory = list(_format_memory(plan.ledger))
    lines += ["", "memory, the fullest phase of each stage", *memory] if memory else []
    lines += _format_work(plan)
    if plan.left:
        whole_nodes = ", ".join(
            f"{whole} of {total} {resource} nodes" for resource, (whole, total) in plan.left.items()
        )
        lines += ["", f"left whole for others: {whole_nodes}"]
    return "\n".join([*lines, *(["", *plan.notes] if plan.notes else [])])


def _format_work(plan: Any) -> list[str]:
    """Return the lines on FLOPs and bytes per step; none if no devices work."""
    if not any(part.resource != "CPU" for stage in plan.work for part in stage.flops):
        return []
    title = (
        f"work per step, an upper bound from shapes and no prediction (time at {_TFLOPS} TFLOP/s per device)"
    )
    return ["", title, *(line for stage in plan.work for line in _format_stage_work(stage))]


def _format_stage_work(stage: Any) -> Iterator[str]:
    """Yield the lines on one stage's FLOPs and traffic."""
    label = stage.name
    for part in stage.flops:
        decimals = 0 if part.count >= 1e13 else 2
        line = f"{part.group} {part.count / 1e12:,.{decimals}f} TFLOP"
        if part.resource != "CPU":
            step_s = part.count / (_TFLOPS * 1e12 * part.devices)
            steps = f", {_format_count(stage.steps)} steps {step_s * stage.steps / 3600:.2g} h"
            total_time = steps if stage.steps else ""
            line += f" on {part.devices:g} {part.resource}: {step_s:.2g} s{total_time}"
        yield f"  {label:<10} {line}"
        label = ""
    for description, moved, route in stage.moves:
        yield f"  {'':<10} moves {description}: {format_bytes(moved)} {route}"


def _format_count(value: Any) -> str:
    """Format a number as "40 B", "2 M" or "62,500"; anything but a number is returned as it is."""
    if not isinstance(value, int | float) or value < 1e4:
        return str(value)
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}"


def _format_group(group: Any) -> tuple[str, ...]:
    """Return the cells of a group's row: name, workers, pool, threads and nodes."""
    resources = f"{group.devices:g} {group.resource}" if group.devices else f"{group.cpus:g} CPU"
    roles = f" = {' + '.join(group.roles)}" if len(group.roles) > 1 else ""
    threads = f"{group.threads} thread{'s' if group.threads > 1 else ''}" if group.threads else ""
    place = f"with {group.shares}" if group.shares else _format_nodes(group.count_by_node())
    return (group.name + roles, f"{group.workers} x {resources}", f"pool {group.pool}", threads, place)


def _format_nodes(counts: Counter[str]) -> str:
    """Format nodes as "gpu-00..gpu-03 x8": runs of nodes with the same number of workers, in the order of ranks."""
    runs = []
    for count, run in groupby(counts, key=lambda node: counts[node]):
        nodes = list(run)
        name = (
            nodes[0]
            if len(nodes) == 1
            else f"{nodes[0]}..{nodes[-1]}"
            if len(nodes) > 2
            else ", ".join(nodes)
        )
        total = f" ({len(nodes)} nodes)" if len(nodes) > 2 else ""
        runs.append(f"{name} x{count}{total}")
    return ", ".join(runs[:_MAX_RUNS]) + (
        f" and {len(runs) - _MAX_RUNS} more" if len(runs) > _MAX_RUNS else ""
    )


def _format_table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _format_memory(ledger: MemoryLedger) -> Iterator[str]:
    """Yield one line per place for all stages whose fullest phases have the same text, then the phases with offloading."""
    lines_by_place: dict[str, dict[str, LedgerLine]] = defaultdict(dict)
    for line in ledger.lines:
        lines_by_place[line.place].setdefault(line.stage, ledger.find_peak(line.stage, line.place))
    for place, peak_by_stage in lines_by_place.items():
        stages_by_line: dict[str, list[str]] = defaultdict(list)
        for stage, line in peak_by_stage.items():
            stages_by_line[_format_line(place, line)].append(
                stage if line.phase in ("host", "train") else f"{stage} ({line.phase})"
            )
        for text, stages in stages_by_line.items():
            yield f"  {', '.join(stages)}: {text}"
    for line in ledger.list_offloading_lines():
        yield f"  {line.stage} ({line.phase}): {', '.join(line.offloaded)} are offloaded to host memory, groups take turns"


def _format_line(place: str, line: LedgerLine) -> str:
    """Format the fullest phase of a place: its bytes, the limit, and up to six parts that are at least 1 % of them."""
    article = "an" if line.resource.startswith("N") else "a"  # an NPU
    device = f"{article} {'bundle' if line.resource == 'CPU' else line.resource} of {place}"
    holder = f"node {line.example}" if line.resource == MEMORY else device
    limit = (
        f" of {format_bytes(line.capacity)} usable" if line.capacity else ", the device's memory is not known"
    )
    sizes = sorted(line.parts.items(), key=lambda part: -part[1])
    parts = [f"{name} {format_bytes(value)}" for name, value in sizes if value >= 0.01 * line.needed][:6]
    return f"{holder} holds {format_bytes(line.needed)}{limit}: {', '.join(parts)}"

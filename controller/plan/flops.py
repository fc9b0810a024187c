"""Estimates of the work of a stage on any hardware: floating-point operations per step, and bytes sent between processes.

All numbers are upper bounds that follow from shapes (every history full, no key twice). They are no prediction of time;
they show which link or group a plan depends on before anything is measured. The model counts 2 FLOPs per parameter and
position for the forward pass and 4 more for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from nonet.controller.plan.resolved import ResolvedRun
from nonet.controller.scenario import StepWork
from nonet.controller.scenario.parts import PlannedGroup

# By the encoding with which rows are sent: the bytes of a row of the given width. An int8 row has an fp32 scale
# (embedding/exchange/codecs.py).
_WIRE: dict[str, Callable[[int], int]] = {
    "fp32": lambda dim: 4 * dim,
    "fp16": lambda dim: 2 * dim,
    "bf16": lambda dim: 2 * dim,
    "int8": lambda dim: dim + 4,
}


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one group in one step.

    Attributes:
        group: The name of the group.
        resource: Ray's name of the resource that computes ("CPU" for workers on cpu).
        devices: The number of devices, or of workers on cpu.
        count: Floating-point operations per step, summed over the devices.
    """

    group: str
    resource: str
    devices: float
    count: float


@dataclass(frozen=True, slots=True)
class StageWork:
    """Estimated work of one stage.

    Attributes:
        name: The name of the stage.
        steps: The number of steps; 0 if it is known only after the data are read.
        flops: Floating-point operations per step, one entry per group.
        moves: Traffic per step as (description, bytes, route) tuples.
    """

    name: str
    steps: int
    flops: tuple[Flops, ...]
    moves: tuple[tuple[str, float, str], ...]


def estimate_work(
    run: ResolvedRun, groups_by_stage: Mapping[str, tuple[PlannedGroup, ...]]
) -> Iterator[StageWork]:
    """Yield the estimated work of every stage.

    Args:
        run: The scenario with everything that follows from it.
        groups_by_stage: The groups of each stage.
    """
    for name, stage_options in run.scenario.stages.items():
        step = run.kinds[name].estimate_work(run.scenario, stage_options, run.size)
        groups = groups_by_stage[name]
        moves = (
            *_estimate_beam_moves(run, groups, step),
            *_estimate_row_moves(run, groups, step),
            *_estimate_gradient_moves(run, _find_holder(groups, "trainer")),
            *_estimate_state_moves(run, _find_holder(groups, "trainer"), step),
        )
        flops = tuple(_sum_flops(groups, step.flops))
        yield StageWork(name, step.steps, flops, tuple(move for move in moves if move[1]))


def _sum_flops(groups: tuple[PlannedGroup, ...], flops_by_role: Mapping[str, float]) -> Iterator[Flops]:
    """Yield the operations of each group, summed over its roles and devices."""
    counts: dict[str, float] = {}
    for role, count in flops_by_role.items():
        name = _find_holder(groups, role).name
        counts[name] = counts.get(name, 0.0) + count
    by_name = {group.name: group for group in groups}
    for name, count in counts.items():
        group = by_name[name]
        yield Flops(name, group.resource, group.workers * (group.devices or 1), count)


def _estimate_beam_moves(
    run: ResolvedRun, groups: tuple[PlannedGroup, ...], step: StepWork
) -> Iterator[tuple[str, float, str]]:
    """Yield the traffic of beams, and of the weights and rows that rollouts in other processes receive.

    Yields:
        (description, bytes per step, route).
    """
    if "rollout" not in step.flops:
        return
    trainer, rollout = _find_holder(groups, "trainer"), _find_holder(groups, "rollout")
    yield "beams", step.beam_bytes, f"{rollout.name} -> rewards, {trainer.name}"
    if rollout.name == trainer.name:
        return
    weights = float(run.size.parameters * run.size.weight_bytes * rollout.workers)
    yield "dense weights", weights, f"{trainer.name} -> {rollout.workers} {rollout.name} workers"
    yield "sparse rows read", step.events * sum(run.feature_dims.values()) * 4.0, f"-> {rollout.name}"


def _estimate_row_moves(
    run: ResolvedRun, groups: tuple[PlannedGroup, ...], step: StepWork
) -> Iterator[tuple[str, float, str]]:
    """Yield the traffic of sparse rows between trainers and shards in other processes.

    Yields:
        (description, bytes per step, route).
    """
    trainer, shards = _find_holder(groups, "trainer"), _find_holder(groups, "embedding")
    are_fused = shards.name == trainer.name
    # Fused shards hold an equal share of the rows each, so a trainer finds one share in its own process.
    remote_share = 1 - 1 / trainer.workers if are_fused else 1.0
    row_bytes = sum(map(_WIRE[run.scenario.sparse.wire], run.feature_dims.values()))
    description = "sparse rows and gradients" if step.row_directions == 2 else "sparse rows"
    route = f"among {trainer.name}" if are_fused else f"{shards.name} <-> {trainer.name}"
    yield description, step.events * row_bytes * float(step.row_directions) * remote_share, route


def _estimate_gradient_moves(run: ResolvedRun, trainer: PlannedGroup) -> Iterator[tuple[str, float, str]]:
    """Yield the traffic of dense gradients between the ranks of a trainer.

    A ring sends each gradient twice, except for one rank's share. This holds for one all-reduce and for a reduce-scatter
    with an all-gather.

    Yields:
        (description, bytes per step, route).
    """
    if trainer.workers > 1:
        bytes_per_rank = 2.0 * run.size.parameters * run.size.weight_bytes * (1 - 1 / trainer.workers)
        yield "dense gradients", bytes_per_rank * trainer.workers, f"among {trainer.name}"


def _estimate_state_moves(
    run: ResolvedRun, trainer: PlannedGroup, step: StepWork
) -> Iterator[tuple[str, float, str]]:
    """Yield the traffic of states inside tensor groups: each block sums them twice in the forward and the backward pass.

    Yields:
        (description, bytes per step, route).
    """
    if (ranks := run.scenario.tensor_ranks) > 1:
        bytes_per_position = 4 * run.size.layers * run.size.width * 4.0
        moved = 2 * (ranks - 1) * step.events * run.size.positions_an_event * bytes_per_position
        yield "states", moved, f"inside groups of {ranks} {trainer.name} workers"


def _find_holder(groups: tuple[PlannedGroup, ...], role: str) -> PlannedGroup:
    """Return the group that holds a role.

    Raises:
        StopIteration: No group holds the role.
    """
    return next(group for group in groups if role in group.roles)

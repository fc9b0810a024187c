"""Estimates of the work of a stage on any hardware: floating-point operations per step, and bytes sent between processes.

All numbers are upper bounds that follow from shapes (every history full, no key twice). They are no prediction of time;
they show which link or group a plan depends on before anything is measured. The model counts 2 FLOPs per parameter and
position for the forward pass and 4 more for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from nonet.controller.plan.resolved import ResolvedRun, get_feature_dims
from nonet.controller.scenario import PlannedGroup, Scenario
from nonet.models import ModelSize

# Bytes of a row of the given width when it is sent; int8 adds one scale per row (embedding/exchange/codecs.py).
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


def estimate_work(run: ResolvedRun, by_stage: Mapping[str, tuple[PlannedGroup, ...]]) -> Iterator[StageWork]:
    """Yield the estimated work of every stage.

    Args:
        run: The scenario with everything that follows from it.
        by_stage: The groups of each stage.
    """
    for name, body in run.scenario.stages.items():
        yield run.kinds[name].estimate_work(run.scenario, name, body, by_stage[name], run.size)


def make_group_flops(group: PlannedGroup, count: float) -> Flops:
    """Describe the floating-point operations of a group in one step.

    Args:
        group: The group that computes.
        count: Floating-point operations per step, summed over the group's devices.
    """
    return Flops(group.name, group.resource, group.workers * (group.devices or 1), count)


def estimate_row_moves(
    scenario: Scenario, groups: tuple[PlannedGroup, ...], events: float, directions: int
) -> Iterator[tuple[str, float, str]]:
    """Yield the traffic of sparse rows between trainers and shards in other processes.

    Args:
        scenario: The scenario, for the width of rows and their encoding between processes.
        groups: The groups of the stage.
        events: Events per global step.
        directions: 1 if rows are only pulled; 2 if gradients are also pushed back.

    Yields:
        (description, bytes per step, route).
    """
    trainer, shards = find_holder(groups, "trainer"), find_holder(groups, "embedding")
    fused = shards.name == trainer.name
    elsewhere = 1 - 1 / trainer.workers if fused else 1.0
    row_bytes = _WIRE[scenario.sparse.wire]
    count = events * sum(map(row_bytes, get_feature_dims(scenario).values())) * float(directions) * elsewhere
    if count:
        what = "sparse rows and gradients" if directions == 2 else "sparse rows"
        yield what, count, f"among {trainer.name}" if fused else f"{shards.name} <-> {trainer.name}"


def estimate_gradient_moves(trainer: PlannedGroup, size: ModelSize) -> Iterator[tuple[str, float, str]]:
    """Yield the traffic of dense gradients between the ranks of a trainer.

    A ring sends each gradient twice, except for one rank's share. This holds for one all-reduce and for a reduce-scatter
    with an all-gather.

    Args:
        trainer: The trainers' group.
        size: The shape of the model.

    Yields:
        (description, bytes per step, route).
    """
    if trainer.workers > 1:
        each = 2.0 * size.parameters * size.weight_bytes * (1 - 1 / trainer.workers)
        yield "dense gradients", each * trainer.workers, f"among {trainer.name}"


def find_holder(groups: tuple[PlannedGroup, ...], role: str) -> PlannedGroup:
    """Return the group that holds a role.

    Raises:
        StopIteration: No group holds the role.
    """
    return next(group for group in groups if role in group.roles)

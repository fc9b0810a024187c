"""What a stage costs on any hardware: floating-point operations of its steps, and the bytes that cross between processes.

From shapes alone, at most (every history full, no key twice), so it is no prediction: it says which link or group a plan leans
on before anything is measured. Two flops a parameter and position forward, four more backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from nonet.controller.plan.resolved import ResolvedRun, feature_dims
from nonet.controller.scenario import PlannedGroup, Scenario
from nonet.models import ModelSize

# Bytes of a row of this width between processes; int8 has a scale a row (embedding/exchange/codecs.py).
_WIRE: dict[str, Callable[[int], int]] = {
    "fp32": lambda dim: 4 * dim,
    "fp16": lambda dim: 2 * dim,
    "bf16": lambda dim: 2 * dim,
    "int8": lambda dim: dim + 4,
}


@dataclass(frozen=True, slots=True)
class Flops:
    """What a group computes in a step, on so many devices ("CPU" workers on cpu)."""

    group: str
    resource: str
    devices: float
    count: float


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage. moves: (what, bytes a step, from where to where); steps 0: the data will tell."""

    name: str
    steps: int
    flops: tuple[Flops, ...]
    moves: tuple[tuple[str, float, str], ...]


def arithmetic(run: ResolvedRun, by_stage: Mapping[str, tuple[PlannedGroup, ...]]) -> Iterator[StageWork]:
    """Yield the work of every stage on the groups that it has."""
    for name, body in run.scenario.stages.items():
        yield run.kinds[name].work(run.scenario, name, body, by_stage[name], run.size)


def group_flops(group: PlannedGroup, count: float) -> Flops:
    """What a group computes in a step."""
    return Flops(group.name, group.resource, group.workers * (group.devices or 1), count)


def row_moves(
    scenario: Scenario, groups: tuple[PlannedGroup, ...], events: float, ways: int
) -> Iterator[tuple[str, float, str]]:
    """Rows that trainers pull from shards in other processes, and the gradients they push back."""
    trainer, shards = holder(groups, "trainer"), holder(groups, "embedding")
    fused = shards.name == trainer.name
    elsewhere = 1 - 1 / trainer.workers if fused else 1.0
    row_bytes = _WIRE[scenario.sparse.wire]
    count = events * sum(map(row_bytes, feature_dims(scenario).values())) * float(ways) * elsewhere
    if count:
        what = "sparse rows and gradients" if ways == 2 else "sparse rows"
        yield what, count, f"among {trainer.name}" if fused else f"{shards.name} <-> {trainer.name}"


def gradient_moves(trainer: PlannedGroup, size: ModelSize) -> Iterator[tuple[str, float, str]]:
    """A ring sends every gradient twice but for one rank's share, whether it is one all-reduce or scatter and gather."""
    if trainer.workers > 1:
        each = 2.0 * size.parameters * size.weight_bytes * (1 - 1 / trainer.workers)
        yield "dense gradients", each * trainer.workers, f"among {trainer.name}"


def holder(groups: tuple[PlannedGroup, ...], role: str) -> PlannedGroup:
    """The group that holds a role. Raises StopIteration."""
    return next(group for group in groups if role in group.roles)

"""What a stage costs on any hardware: floating-point operations of its steps, and the bytes that cross between processes.

From shapes alone, at most (every history full, no key twice), so it is no prediction: it says which link or group a plan leans
on before anything is measured. Two flops a parameter and position forward, four more backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nonet.controller.plan.memory import sequence, step_tokens
from nonet.controller.plan.sizes import ModelSize, feature_dims, model_size
from nonet.controller.scenario import Reinforced, Scenario, Supervised

_FORWARD, _TRAINED = 2.0, 6.0
_BEAM_BYTES = 8  # a code of a level and its log-probability
_ITEM_BYTES = 30  # item, validity and what else a beam carries


@dataclass(frozen=True, slots=True)
class Flops:
    """What a group computes in a step, on so many devices ("CPU" workers on cpu)."""

    group: str
    resource: str
    devices: float
    count: float


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. moves: (what, bytes a step, from where to where); steps 0: the data will tell."""

    name: str
    steps: int
    flops: tuple[Flops, ...]
    moves: tuple[tuple[str, float, str], ...]


def arithmetic(scenario: Scenario, by_stage: Mapping[str, tuple[Any, ...]]) -> Iterator[Stage]:
    """Every stage, with the groups that it has."""
    size = model_size(scenario)
    for name, body in scenario.stages.items():
        groups = by_stage[name]
        if isinstance(body, Supervised):
            yield _supervised(scenario, name, body, groups, size)
        else:
            yield _reinforced(scenario, name, body, groups, size)


def _supervised(
    scenario: Scenario, name: str, body: Supervised, groups: tuple[Any, ...], size: ModelSize
) -> Stage:
    trainer = _holder(groups, "trainer")
    tokens = step_tokens(scenario, body, size)
    steps = (
        -(-int(body.tokens) // int(body.batch.tokens or tokens)) if body.tokens and body.batch.tokens else 0
    )
    moves = [*_rows(scenario, groups, tokens / size.positions_an_event, 2), *_gradients(trainer, size)]
    return Stage(name, steps, (_flops(trainer, _TRAINED * size.parameters * tokens),), tuple(moves))


def _reinforced(
    scenario: Scenario, name: str, body: Reinforced, groups: tuple[Any, ...], size: ModelSize
) -> Stage:
    trainer, rollout = _holder(groups, "trainer"), _holder(groups, "rollout")
    width = int(body.rollout.options().get("width", 16))
    tokens, histories = step_tokens(scenario, body, size), body.users * sequence(scenario, size)
    update = (_TRAINED + _FORWARD) * size.parameters * tokens  # the policy both ways, the reference forward
    decode = _FORWARD * size.parameters * tokens
    fused = rollout.name == trainer.name
    flops = (
        (_flops(trainer, update + decode),) if fused else (_flops(trainer, update), _flops(rollout, decode))
    )
    beams = float(body.users * width * (size.levels * _BEAM_BYTES + _ITEM_BYTES))
    events = histories / size.positions_an_event
    moves = [("beams", beams, f"{rollout.name} -> rewards, {trainer.name}")]
    if not fused:
        weights = float(size.parameters * size.weight_bytes * rollout.workers)
        moves.append(
            ("dense weights", weights, f"{trainer.name} -> {rollout.workers} {rollout.name} workers")
        )
        read = events * sum(feature_dims(scenario).values()) * 4.0
        moves.append(("sparse rows read", read, f"-> {rollout.name}"))
    moves += [*_rows(scenario, groups, events, 1), *_gradients(trainer, size)]
    return Stage(name, body.steps, flops, tuple((what, count, way) for what, count, way in moves if count))


def _flops(group: Any, count: float) -> Flops:
    return Flops(group.name, group.resource, group.workers * (group.devices or 1), count)


def _rows(
    scenario: Scenario, groups: tuple[Any, ...], events: float, ways: int
) -> Iterator[tuple[str, float, str]]:
    """Rows that trainers pull from shards in other processes, and the gradients they push back."""
    trainer, shards = _holder(groups, "trainer"), _holder(groups, "embedding")
    fused = shards.name == trainer.name
    elsewhere = 1 - 1 / trainer.workers if fused else 1.0
    count = events * sum(feature_dims(scenario).values()) * 4.0 * ways * elsewhere
    if count:
        what = "sparse rows and gradients" if ways == 2 else "sparse rows"
        yield what, count, f"among {trainer.name}" if fused else f"{shards.name} <-> {trainer.name}"


def _gradients(trainer: Any, size: ModelSize) -> Iterator[tuple[str, float, str]]:
    """A ring sends every gradient twice but for one rank's share, whether it is one all-reduce or scatter and gather."""
    if trainer.workers > 1:
        each = 2.0 * size.parameters * size.weight_bytes * (1 - 1 / trainer.workers)
        yield "dense gradients", each * trainer.workers, f"among {trainer.name}"


def _holder(groups: tuple[Any, ...], role: str) -> Any:
    return next(group for group in groups if role in group.roles)

"""How much arithmetic and memory traffic a step of the SID decoder is: counted from shapes, nothing measured.

StepCost has four numbers: one a step, kernel launches that cost the same at any size, floating-point operations, and bytes
moved. A calibration says what each costs here; predicted seconds are their sum of products, so every prediction can be
taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Shapes: T positions, M targets, A distances asked, D width, L levels, K codes of a level, U users, W beams.
_BACKWARD = 3.0  # forward and backward over forward
_RANK = 16  # of the depth decoder's path vectors
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """A SID decoder's shape."""

    width: int
    layers: int
    levels: int
    codes: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """steps (1, or 0 for a part of one), launches, flops and bytes."""

    steps: float = 0.0
    launches: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.steps + other.steps,
            self.launches + other.launches,
            self.flops + other.flops,
            self.bytes + other.bytes,
        )

    def times(self, factor: float) -> StepCost:
        """So many times the arithmetic and traffic; launches stay."""
        return StepCost(self.steps, self.launches, self.flops * factor, self.bytes * factor)

    def columns(self) -> list[float]:
        return [self.steps, self.launches, self.flops, self.bytes]


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Seconds that each number of a StepCost takes: a step, a launch, a flop, a byte."""

    step_s: float = 0.0
    launch_s: float = 0.0
    flop_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, work: StepCost) -> float:
        return sum(a * b for a, b in zip(work.columns(), self.columns(), strict=True))

    def columns(self) -> list[float]:
        return [self.step_s, self.launch_s, self.flop_s, self.byte_s]


def train_cost(shape: Shape, positions: float, targets: float, ahead: int) -> StepCost:
    """A supervised step of one rank: history decoder and depth decoder, forward and backward, and the optimizer."""
    forward = history_cost(shape, positions) + depth_cost(shape, targets * ahead, targets)
    return StepCost(1, 3 * (shape.layers + shape.levels)) + forward.times(_BACKWARD) + optimizer_cost(shape)


def update_cost(shape: Shape, users: float, history: float, width: int) -> StepCost:
    """An RL step of one trainer: the policy forward and backward, the reference forward, and the optimizer."""
    forward = history_cost(shape, users * (history + 1)) + depth_cost(shape, users * width, users * width)
    return (
        StepCost(1, 4 * (shape.layers + shape.levels)) + forward.times(_BACKWARD + 1) + optimizer_cost(shape)
    )


def decode_cost(shape: Shape, users: float, history: float, width: int) -> StepCost:
    """A rollout of one rank: histories once, then every beam a level; the choice of the best of W x K a user."""
    choice = StepCost(bytes=users * width * shape.codes * shape.levels * 6 * _FLOAT)
    launches = StepCost(1, shape.layers + 2 * shape.levels)
    beams = depth_cost(shape, users * width, users * width)
    return launches + history_cost(shape, users * (history + 1)) + beams + choice


def history_cost(shape: Shape, positions: float) -> StepCost:
    """Forward of the blocks: 24 D^2 flops a position and layer; about 40 vectors of the width read or written."""
    d = shape.width
    return StepCost(
        flops=positions * shape.layers * 24 * d * d, bytes=positions * (shape.layers * 40 + 12) * d * _FLOAT
    )


def depth_cost(shape: Shape, states: float, prefixes: float) -> StepCost:
    """Forward of the depth decoder: so many (state, prefix) pairs, whose path vectors are read once a prefix."""
    d, k = shape.width, shape.codes
    flops = states * shape.levels * (10 * d * d + 2 * d * k) + states * (shape.levels - 1) * 2 * k * _RANK
    traffic = states * shape.levels * (14 * d + 6 * k) + prefixes * (shape.levels - 1) * k * (_RANK + 8)
    return StepCost(flops=flops, bytes=traffic * _FLOAT)


def optimizer_cost(shape: Shape) -> StepCost:
    """Muon's five Newton-Schulz steps of the hidden matrices, and a pass over all parameters."""
    d = shape.width
    parameters = shape.layers * 12 * d * d + shape.levels * (5 * d * d + shape.codes * d * 3) + (1 << 18)
    return StepCost(flops=shape.layers * 280 * d**3, bytes=12 * parameters * _FLOAT)


def fit(probes: Sequence[tuple[StepCost, float]]) -> UnitCosts:
    """Rates that explain measured seconds best, none below zero; relative errors count, so small probes matter as well."""
    import numpy as np

    matrix = np.array([work.columns() for work, _ in probes])
    seconds = np.array([measured for _, measured in probes])
    scale = np.maximum(np.abs(matrix).max(0), 1e-30)
    rows, ones = matrix / scale / seconds[:, None], np.ones(len(probes))
    active = [column for column in range(4) if np.abs(matrix[:, column]).max() > 0]
    while active:
        costs, *_ = np.linalg.lstsq(rows[:, active], ones, rcond=None)
        if (costs >= 0).all():
            answer = np.zeros(4)
            answer[active] = costs / scale[active]
            return UnitCosts(*answer.tolist())
        active.pop(int(costs.argmin()))
    return UnitCosts()

"""Objectives: what each reward of a stage counts, step by step: weights, their schedules, and multipliers of floors.

A floor `at_least` is a constraint of a Lagrangian: its multiplier is added to the reward's weight. It grows by what is missing to
the floor, as a share of the floor, and shrinks by what is above it; what is missing now counts at once too, so that it does
not swing (a PI controller: Stooke et al., arXiv 2007.03964). What is missing now is a mean over about five steps, since users
differ from step to step. It is never below zero, and in units of what the other rewards count. A resumed stage has it from
the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.controller.scenario import RewardOptions

RATE, AT_ONCE = (
    0.05,
    3.0,
)  # of the share that is missing: what the multiplier gains a step, what counts at once
_KEPT = 0.8  # of the mean of what is missing, a step


class Objectives:
    """rewards: of a stage, by name."""

    def __init__(self, rewards: Mapping[str, RewardOptions]):
        self.rewards = dict(rewards)
        self._sums = {name: 0.0 for name, each in self.rewards.items() if each.at_least is not None}
        self._missing: dict[str, float | None] = dict.fromkeys(self._sums)  # None before the first step

    def weights(self, step: int) -> dict[str, float]:
        """What each reward counts at a step, multipliers and all."""
        more = self.multipliers(step)
        return {name: each.weight_at(step) + more.get(name, 0.0) for name, each in self.rewards.items()}

    def multipliers(self, step: int) -> dict[str, float]:
        """Of each floor."""
        counts = [max(0.0, self._sums[name] + AT_ONCE * (self._missing[name] or 0.0)) for name in self._sums]
        return {name: self._unit(name, step) * count for name, count in zip(self._sums, counts, strict=True)}

    def learn(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Move multipliers by a step's mean rewards; what to show of it."""
        weights, used = self.weights(step), self.multipliers(step)
        for name in self._sums:
            mean = record.get(f"reward.{name}")
            if mean is None:
                continue
            missing, before = self._short(name, mean), self._missing[name]
            self._missing[name] = missing if before is None else _KEPT * before + (1 - _KEPT) * missing
            self._sums[name] = max(0.0, self._sums[name] + RATE * missing)
        shown = {f"weight.{name}": weights[name] for name in weights if self._moves(name)}
        return shown | {f"multiplier.{name}": value for name, value in used.items()}

    def missing(self, means: Mapping[str, float]) -> float:
        """How far the means are below the floor that is missed most, as a share of it; 0 where all hold."""
        return max([0.0, *(self._short(name, means[name]) for name in self._sums if name in means)])

    def _short(self, name: str, mean: float) -> float:
        floor = self.rewards[name].at_least
        assert floor is not None
        return (floor - mean) / (abs(floor) or 1.0)

    def _unit(self, name: str, step: int) -> float:
        """What the other rewards count together at a step; 1 where they count nothing."""
        return sum(abs(each.weight_at(step)) for other, each in self.rewards.items() if other != name) or 1.0

    def _moves(self, name: str) -> bool:
        return name in self._sums or not isinstance(self.rewards[name].weight, float | int)

    def put(self, name: str, options: RewardOptions) -> None:
        """A reward with other options, or one more. A multiplier begins at zero where a floor is new."""
        self.rewards[name] = options
        if options.at_least is None:
            self._sums.pop(name, None)
            self._missing.pop(name, None)
        elif name not in self._sums:
            self._sums[name], self._missing[name] = 0.0, None

    def remove(self, name: str) -> None:
        """A reward less."""
        del self.rewards[name]
        self._sums.pop(name, None)
        self._missing.pop(name, None)

    def state(self) -> dict[str, Any]:
        """What a resumed stage must know, nothing without floors."""
        return (
            {"floors": {name: [self._sums[name], self._missing[name]] for name in self._sums}}
            if self._sums
            else {}
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        for name, (total, missing) in state.get("floors", {}).items():
            if name in self._sums:
                self._sums[name], self._missing[name] = total, missing

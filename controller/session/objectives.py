"""Objectives: what each reward of a stage counts, step by step: weights, their schedules, and multipliers of floors.

A floor `at_least` is a constraint of a Lagrangian: its multiplier is added to the reward's weight. It grows by what is missing to
the floor, as a share of the floor, and shrinks by what is above it; what is missing now counts at once too, so that it does
not swing (a PI controller: Stooke et al., arXiv 2007.03964). It is never below zero. A resumed stage has it from the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.controller.scenario import RewardOptions

RATE, AT_ONCE = (
    0.1,
    1.0,
)  # of the share that is missing: what the multiplier gains a step, and what counts at once


class Objectives:
    """rewards: of a stage, by name."""

    def __init__(self, rewards: Mapping[str, RewardOptions]):
        self.rewards = dict(rewards)
        self._sums = {name: 0.0 for name, each in self.rewards.items() if each.at_least is not None}
        self._missing = dict.fromkeys(self._sums, 0.0)

    def weights(self, step: int) -> dict[str, float]:
        """What each reward counts at a step, multipliers and all."""
        more = self.multipliers()
        return {name: each.weight_at(step) + more.get(name, 0.0) for name, each in self.rewards.items()}

    def multipliers(self) -> dict[str, float]:
        """Of each floor."""
        return {name: max(0.0, self._sums[name] + AT_ONCE * self._missing[name]) for name in self._sums}

    def learn(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Move multipliers by a step's mean rewards; what to show of it."""
        weights, used = self.weights(step), self.multipliers()
        for name in self._sums:
            floor, mean = self.rewards[name].at_least, record.get(f"reward.{name}")
            if floor is None or mean is None:
                continue
            self._missing[name] = (floor - mean) / (abs(floor) or 1.0)
            self._sums[name] = max(0.0, self._sums[name] + RATE * self._missing[name])
        shown = {f"weight.{name}": weights[name] for name in weights if self._moves(name)}
        return shown | {f"multiplier.{name}": value for name, value in used.items()}

    def _moves(self, name: str) -> bool:
        return name in self._sums or not isinstance(self.rewards[name].weight, float | int)

    def put(self, name: str, options: RewardOptions) -> None:
        """A reward with other options, or one more. A multiplier begins at zero where a floor is new."""
        self.rewards[name] = options
        if options.at_least is None:
            self._sums.pop(name, None)
            self._missing.pop(name, None)
        elif name not in self._sums:
            self._sums[name] = self._missing[name] = 0.0

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

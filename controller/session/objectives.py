"""Objectives: what each reward of a stage counts, step by step: weights, their schedules, and multipliers of floors.

A floor `at_least` is a constraint of a Lagrangian: its multiplier is added to the reward's weight. It grows by what is missing to
the floor, as a share of the floor, and shrinks by what is above it; what is missing now counts at once too, so that it does
not swing (a PI controller: Stooke et al., arXiv 2007.03964). What is missing now is a mean over about five steps, since users
differ from step to step. It is never below zero, and in units of what the other rewards count. A resumed stage has it from
the journal.

A floor is about the lists that would be served, and rollouts may be draws of the policy, whose mean reward is another. So the
served lists are scored at every evaluation, and between two of them a step's mean is multiplied by the last ratio of served
lists to rollouts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nonet.controller.scenario import RewardOptions
from nonet.workers.roles import SceneSetup

RATE, AT_ONCE = (
    0.05,
    3.0,
)  # of the share that is missing: what the multiplier gains a step, what counts at once
SETTABLE = re.compile(r"^(?:stages\.([A-Za-z_][\w\-]*)\.)?rewards\.([A-Za-z_][\w\-]*)\.(weight|at_least)$")
"""Keys of a scenario that can be set while a run goes on: stage (left out, the one under way), reward, and which."""
_KEPT = 0.8  # of the mean of what is missing, a step


class Objectives:
    """rewards: of a stage, by name."""

    def __init__(self, rewards: Mapping[str, RewardOptions]):
        self.rewards = dict(rewards)
        self._sums = {name: 0.0 for name, each in self.rewards.items() if each.at_least is not None}
        self._missing: dict[str, float | None] = dict.fromkeys(self._sums)  # None before the first step
        self._served: dict[str, float] = {}  # means of served lists that no step's mean was compared with yet
        self._ratio: dict[str, float] = {}  # served lists over rollouts, as of the last evaluation

    def weights(self, step: int) -> dict[str, float]:
        """What each reward counts at a step, multipliers and all."""
        more = self.multipliers(step)
        return {name: each.weight_at(step) + more.get(name, 0.0) for name, each in self.rewards.items()}

    def multipliers(self, step: int) -> dict[str, float]:
        """Of each floor."""
        counts = [max(0.0, self._sums[name] + AT_ONCE * (self._missing[name] or 0.0)) for name in self._sums]
        return {name: self._unit(name, step) * count for name, count in zip(self._sums, counts, strict=True)}

    @property
    def has_floors(self) -> bool:
        """Whether any reward has a floor."""
        return bool(self._sums)

    def note_served(self, means: Mapping[str, float]) -> None:
        """Take the mean rewards of the lists that the policy would serve now; the next step's rollouts are by the same policy."""
        self._served = {name: means[name] for name in self._sums if name in means}

    def _as_served(self, name: str, mean: float) -> float:
        """Return what a mean of rollouts says of the lists that would be served."""
        served = self._served.pop(name, None)
        if served is not None:
            self._ratio[name] = served / mean if mean * served > 0 else 1.0
            return served
        return mean * self._ratio.get(name, 1.0)

    def total(
        self, parts: Mapping[str, Sequence[float]], step: int, scenes: SceneSetup | None = None
    ) -> float | None:
        """Return the mean trained reward of lists by the weights in force at a step, without multipliers of floors.

        Args:
            parts: What each scene's lists contribute to the mean of each reward (`scene_parts`).
            step: Step of the stage whose weights are meant.
            scenes: Scenes with weights of their own, if the stage has some.

        Returns:
            None where a reward that counts was not measured.
        """
        total = 0.0
        for name, options in self.rewards.items():
            weight = options.weight_at(step)
            if name not in parts:
                if weight:
                    return None
                continue
            index = np.arange(len(parts[name]))
            weights = weight if scenes is None else scenes.weights_of(name, weight, index)
            total += float(np.sum(weights * np.asarray(parts[name])))
        return total

    def learn(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Move multipliers by a step's mean rewards of rollouts.

        Returns:
            The weights that move and the multipliers of the step, to be shown.
        """
        weights, used = self.weights(step), self.multipliers(step)
        for name in self._sums:
            mean = record.get(f"reward.{name}")
            if mean is None:
                continue
            missing, before = self._short(name, self._as_served(name, mean)), self._missing[name]
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

    def apply(self, command: Mapping[str, Any]) -> None:
        """Do what a command that was checked says: attach or detach a reward, or set its weight or floor.

        Args:
            command: As `Commands` records it.

        Raises:
            ValidationError: The value cannot be set.
        """
        name = command["name"]
        if command["verb"] == "attach":
            self.put(name, RewardOptions.model_validate(command["options"]))
        elif command["verb"] == "detach":
            self.remove(name)
        elif (match := SETTABLE.match(name)) is not None:
            before = self.rewards[match[2]]
            fields = {field: getattr(before, field) for field in before.model_fields_set} | before.options()
            self.put(match[2], RewardOptions.model_validate(fields | {match[3]: command["value"]}))

    def put(self, name: str, options: RewardOptions) -> None:
        """A reward with other options, or one more. A multiplier begins at zero where a floor is new."""
        self.rewards[name] = options
        if options.at_least is None:
            self._sums.pop(name, None)
            self._missing.pop(name, None)
        elif name not in self._sums:
            self._sums[name], self._missing[name] = 0.0, None

    def remove(self, name: str) -> None:
        """Remove a reward and its multiplier."""
        del self.rewards[name]
        self._served.pop(name, None)
        self._ratio.pop(name, None)
        self._sums.pop(name, None)
        self._missing.pop(name, None)

    def state(self) -> dict[str, Any]:
        """Return what a resumed stage must know: nothing without floors."""
        if not self._sums:
            return {}
        known = {name: [self._served.get(name), self._ratio.get(name)] for name in self._sums}
        return {
            "floors": {name: [self._sums[name], self._missing[name]] for name in self._sums},
            "served": known,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        for name, (total, missing) in state.get("floors", {}).items():
            if name in self._sums:
                self._sums[name], self._missing[name] = total, missing
        for name, (served, ratio) in state.get("served", {}).items():
            if name in self._sums:
                self._served |= {} if served is None else {name: served}
                self._ratio |= {} if ratio is None else {name: ratio}


def scene_parts(
    mean_P: np.ndarray, there_P: np.ndarray, scene_P: np.ndarray | None, count: int
) -> list[float]:
    """Return what each scene's lists contribute to the mean of a reward over all lists.

    Args:
        mean_P: Mean reward of each list.
        there_P: Which lists count.
        scene_P: Scene of each list; None where the stage has none.
        count: How many scenes there are, the others among them.
    """
    scene_P = np.zeros(len(mean_P), np.int64) if scene_P is None else scene_P
    sums = np.bincount(scene_P[there_P], mean_P[there_P], minlength=count)
    return (sums / max(1, int(there_P.sum()))).tolist()

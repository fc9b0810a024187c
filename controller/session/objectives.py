"""The weights of a stage's rewards by step: their schedules, and the multipliers of floors.

A floor `at_least` is a constraint with a Lagrange multiplier, which is added to the weight of the reward. The multiplier
grows by the shortfall to the floor, as a fraction of the floor, and shrinks by the excess. A proportional term adds the
current shortfall, so that the multiplier does not oscillate (a PI controller: Stooke et al., arXiv 2007.03964).
The current shortfall is a mean over about five steps, because users differ from step to step. The multiplier is never
negative, and is scaled by the total weight of the other rewards. A resumed stage restores it from the journal.

A floor applies to the lists that would be served. Rollouts may be sampled from the policy, with another mean reward. The
served lists are therefore scored at every evaluation. Between evaluations, the mean of a step is multiplied by the last
ratio of served lists to rollouts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nonet.controller.scenario import RewardOptions
from nonet.workers.roles import SceneSetup

# Gains per step, applied to the relative shortfall.
_INTEGRAL_GAIN, _PROPORTIONAL_GAIN = 0.05, 3.0
SETTABLE = re.compile(r"^(?:stages\.([A-Za-z_][\w\-]*)\.)?rewards\.([A-Za-z_][\w\-]*)\.(weight|at_least)$")
"""Scenario keys that can be set during a run: the stage (by default the current one), the reward, and its option."""
_SHORTFALL_DECAY = 0.8  # decay per step of the running mean of the shortfall


class RewardObjectives:
    """The current rewards of a stage with their weights and multipliers.

    Attributes:
        rewards: The options of the rewards, by name.
    """

    def __init__(self, rewards: Mapping[str, RewardOptions]):
        self.rewards = dict(rewards)
        # The integral terms of the multipliers; their keys are the rewards that have a floor.
        self._sums = {name: 0.0 for name, options in self.rewards.items() if options.at_least is not None}
        self._shortfalls: dict[str, float | None] = dict.fromkeys(self._sums)  # None before the first step
        # Mean rewards of served lists that no step has been compared with yet.
        self._served: dict[str, float] = {}
        # Mean of served lists divided by mean of rollouts, at the last evaluation.
        self._served_ratios: dict[str, float] = {}

    def compute_weights(self, step: int) -> dict[str, float]:
        """Return the weight of each reward at a step, including multipliers."""
        multipliers = self.compute_multipliers(step)
        return {
            name: options.compute_weight(step) + multipliers.get(name, 0.0)
            for name, options in self.rewards.items()
        }

    def compute_multipliers(self, step: int) -> dict[str, float]:
        """Return the multiplier of each reward that has a floor."""
        relative_multipliers = [
            max(0.0, self._sums[name] + _PROPORTIONAL_GAIN * (self._shortfalls[name] or 0.0))
            for name in self._sums
        ]
        return {
            name: self._compute_unit(name, step) * multiplier
            for name, multiplier in zip(self._sums, relative_multipliers, strict=True)
        }

    @property
    def has_floors(self) -> bool:
        """Whether any reward has a floor."""
        return bool(self._sums)

    def note_served(self, means: Mapping[str, float]) -> None:
        """Record the mean rewards of the lists that the policy would serve now.

        The rollouts of the next step come from the same policy and are compared with these means.
        """
        self._served = {name: means[name] for name in self._sums if name in means}

    def _convert_to_served(self, name: str, mean: float) -> float:
        """Convert a mean reward of rollouts to that of the lists that would be served.

        If served lists were recorded since the last step, they are consumed, and the ratio is updated.
        """
        served = self._served.pop(name, None)
        if served is not None:
            self._served_ratios[name] = served / mean if mean * served > 0 else 1.0
            return served
        return mean * self._served_ratios.get(name, 1.0)

    def compute_total(
        self, parts: Mapping[str, Sequence[float]], step: int, scenes: SceneSetup | None = None
    ) -> float | None:
        """Return the mean trained reward of lists with the weights of a step, without multipliers.

        Args:
            parts: The contribution of each scene's lists to the mean of each reward (`sum_by_scene`).
            step: The step of the stage whose weights are used.
            scenes: The scenes and their weights, if the stage has scenes.

        Returns:
            The total, or None if a reward with a weight was not measured.
        """
        total = 0.0
        for name, options in self.rewards.items():
            weight = options.compute_weight(step)
            if name not in parts:
                if weight:
                    return None
                continue
            index = np.arange(len(parts[name]))
            weights = weight if scenes is None else scenes.get_weights(name, weight, index)
            total += float(np.sum(weights * np.asarray(parts[name])))
        return total

    def update_multipliers(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Update the multipliers with the mean rewards of a step's rollouts.

        Args:
            step: The step of the stage.
            record: The metrics of the step; `reward.<name>` is the mean of a reward.

        Returns:
            The weights that change over time and the multipliers that the step used, by metric name.
        """
        weights, used = self.compute_weights(step), self.compute_multipliers(step)
        for name in self._sums:
            mean = record.get(f"reward.{name}")
            if mean is None:
                continue
            shortfall, before = (
                self._compute_shortfall_of(name, self._convert_to_served(name, mean)),
                self._shortfalls[name],
            )
            self._shortfalls[name] = (
                shortfall
                if before is None
                else _SHORTFALL_DECAY * before + (1 - _SHORTFALL_DECAY) * shortfall
            )
            self._sums[name] = max(0.0, self._sums[name] + _INTEGRAL_GAIN * shortfall)
        shown = {f"weight.{name}": weights[name] for name in weights if self._has_moving_weight(name)}
        return shown | {f"multiplier.{name}": value for name, value in used.items()}

    def compute_shortfall(self, means: Mapping[str, float]) -> float:
        """Return the largest shortfall to a floor, as a fraction of that floor; 0 if all floors are met."""
        return max(
            [0.0, *(self._compute_shortfall_of(name, means[name]) for name in self._sums if name in means)]
        )

    def _compute_shortfall_of(self, name: str, mean: float) -> float:
        floor = self.rewards[name].at_least
        assert floor is not None
        return (floor - mean) / (abs(floor) or 1.0)

    def _compute_unit(self, name: str, step: int) -> float:
        """Return the total weight of the other rewards at a step, or 1 if it is zero."""
        return (
            sum(
                abs(options.compute_weight(step))
                for other_name, options in self.rewards.items()
                if other_name != name
            )
            or 1.0
        )

    def _has_moving_weight(self, name: str) -> bool:
        return name in self._sums or not isinstance(self.rewards[name].weight, float | int)

    def apply_command(self, command: Mapping[str, Any]) -> None:
        """Apply a validated command: attach or detach a reward, or set its weight or floor.

        Args:
            command: The command as `CommandQueue` records it.

        Raises:
            ValidationError: The value cannot be set.
        """
        name = command["name"]
        if command["verb"] == "attach":
            self.set_reward(name, RewardOptions.model_validate(command["options"]))
        elif command["verb"] == "detach":
            self.remove(name)
        elif (match := SETTABLE.match(name)) is not None:
            before = self.rewards[match[2]]
            fields = {
                field: getattr(before, field) for field in before.model_fields_set
            } | before.get_options()
            self.set_reward(match[2], RewardOptions.model_validate(fields | {match[3]: command["value"]}))

    def set_reward(self, name: str, options: RewardOptions) -> None:
        """Add a reward or replace its options; the multiplier of a new floor begins at zero."""
        self.rewards[name] = options
        if options.at_least is None:
            self._sums.pop(name, None)
            self._shortfalls.pop(name, None)
        elif name not in self._sums:
            self._sums[name], self._shortfalls[name] = 0.0, None

    def remove(self, name: str) -> None:
        """Remove a reward and its multiplier."""
        del self.rewards[name]
        self._served.pop(name, None)
        self._served_ratios.pop(name, None)
        self._sums.pop(name, None)
        self._shortfalls.pop(name, None)

    def get_state(self) -> dict[str, Any]:
        """Return the state that a resumed stage needs; empty without floors."""
        if not self._sums:
            return {}
        served = {name: [self._served.get(name), self._served_ratios.get(name)] for name in self._sums}
        return {
            "floors": {name: [self._sums[name], self._shortfalls[name]] for name in self._sums},
            "served": served,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned."""
        for name, (total, shortfall) in state.get("floors", {}).items():
            if name in self._sums:
                self._sums[name], self._shortfalls[name] = total, shortfall
        for name, (served, ratio) in state.get("served", {}).items():
            if name in self._sums:
                self._served |= {} if served is None else {name: served}
                self._served_ratios |= {} if ratio is None else {name: ratio}


def sum_by_scene(
    mean_P: np.ndarray, is_measured_P: np.ndarray, scene_P: np.ndarray | None, count: int
) -> list[float]:
    """Return the contribution of each scene's lists to the mean of a reward over all lists.

    Args:
        mean_P: The mean reward of each list.
        is_measured_P: Mask of the lists that are included in the mean.
        scene_P: The scene of each list, or None if the stage has no scenes.
        count: The number of scenes, including the scene of lists that belong to no named scene.
    """
    scene_P = np.zeros(len(mean_P), np.int64) if scene_P is None else scene_P
    sums = np.bincount(scene_P[is_measured_P], mean_P[is_measured_P], minlength=count)
    return (sums / max(1, int(is_measured_P.sum()))).tolist()

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

# Gains per step of the PI controller, applied to the shortfall as a fraction of the floor.
_INTEGRAL_GAIN, _PROPORTIONAL_GAIN = 0.05, 3.0
SETTABLE = re.compile(r"^(?:stages\.([A-Za-z_][\w\-]*)\.)?rewards\.([A-Za-z_][\w\-]*)\.(weight|at_least)$")
"""Scenario keys that can be set during a run: the stage (by default the current one), the reward, and its option."""
_SHORTFALL_DECAY = 0.8  # decay per step of the running mean, which covers about 1 / (1 - 0.8) = 5 steps


class RewardObjectives:
    """The current rewards of a stage with their weights and multipliers.

    Attributes:
        rewards: The options of the rewards, by name.
    """

    def __init__(self, rewards: Mapping[str, RewardOptions]):
        self.rewards = dict(rewards)
        # The integral terms of the multipliers; their keys are the rewards that have a floor.
        self._integrals = {
            name: 0.0 for name, options in self.rewards.items() if options.at_least is not None
        }
        # The running mean of the shortfall to each floor; None before the first step.
        self._shortfalls: dict[str, float | None] = dict.fromkeys(self._integrals)
        # Mean rewards of served lists that no step has been compared with yet.
        self._served_means: dict[str, float] = {}
        # Mean of served lists divided by mean of rollouts, at the last evaluation.
        self._served_ratios: dict[str, float] = {}

    def compute_weights(self, step: int) -> dict[str, float]:
        """Return the weight of each reward at a step of the stage, including the multiplier of its floor."""
        multipliers = self.compute_multipliers(step)
        return {
            name: options.compute_weight(step) + multipliers.get(name, 0.0)
            for name, options in self.rewards.items()
        }

    def compute_multipliers(self, step: int) -> dict[str, float]:
        """Return the multiplier of each reward that has a floor; it is added to the weight of the reward."""
        return {
            name: self._compute_other_weight(name, step)
            * max(0.0, integral + _PROPORTIONAL_GAIN * (self._shortfalls[name] or 0.0))
            for name, integral in self._integrals.items()
        }

    @property
    def has_floors(self) -> bool:
        """Whether any reward has a floor."""
        return bool(self._integrals)

    def note_served(self, means: Mapping[str, float]) -> None:
        """Record the mean rewards of the lists that the policy would serve now, by reward.

        The rollouts of the next step come from the same policy and are compared with these means.
        """
        self._served_means = {name: means[name] for name in self._integrals if name in means}

    def _convert_to_served(self, name: str, mean: float) -> float:
        """Convert a mean reward of rollouts to that of the lists that would be served.

        If `note_served` was called since the last step, its mean is returned and removed, and the ratio is updated.
        """
        served = self._served_means.pop(name, None)
        if served is not None:
            # With different signs or a zero, the ratio would not carry over to other steps.
            self._served_ratios[name] = served / mean if mean * served > 0 else 1.0
            return served
        return mean * self._served_ratios.get(name, 1.0)

    def compute_total(
        self, parts: Mapping[str, Sequence[float]], step: int, scenes: SceneSetup | None = None
    ) -> float | None:
        """Return the mean trained reward of lists with the weights of a step, without multipliers.

        Args:
            parts: The contribution of each scene's lists to the mean of a reward (`sum_by_scene`), by reward.
            step: The step of the stage whose weights are used.
            scenes: The scenes and their weights, if the stage has scenes.

        Returns:
            The total, or None if a reward with a weight other than 0 was not measured.
        """
        total = 0.0
        for name, options in self.rewards.items():
            weight = options.compute_weight(step)
            if name not in parts:
                if weight:
                    return None
                continue
            scene_numbers = np.arange(len(parts[name]))
            weights = weight if scenes is None else scenes.get_weights(name, weight, scene_numbers)
            total += float(np.sum(weights * np.asarray(parts[name])))
        return total

    def update_multipliers(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Update the multipliers with the mean rewards of a step's rollouts.

        Args:
            step: The step of the stage.
            record: The metrics of the step; `reward.<name>` is the mean of a reward.

        Returns:
            The metrics of the step: `weight.<name>` for weights that can change from step to step, and
                `multiplier.<name>`, both as they were before the update.
        """
        weights, multipliers = self.compute_weights(step), self.compute_multipliers(step)
        for name in self._integrals:
            mean = record.get(f"reward.{name}")
            if mean is None:
                continue
            shortfall = self._compute_shortfall_of(name, self._convert_to_served(name, mean))
            running_mean = self._shortfalls[name]
            self._shortfalls[name] = (
                shortfall
                if running_mean is None
                else _SHORTFALL_DECAY * running_mean + (1 - _SHORTFALL_DECAY) * shortfall
            )
            self._integrals[name] = max(0.0, self._integrals[name] + _INTEGRAL_GAIN * shortfall)
        metrics = {f"weight.{name}": weights[name] for name in weights if self._has_moving_weight(name)}
        return metrics | {f"multiplier.{name}": value for name, value in multipliers.items()}

    def compute_shortfall(self, means: Mapping[str, float]) -> float:
        """Return the largest shortfall to a floor, as a fraction of that floor; 0 if all floors are met.

        Args:
            means: The mean rewards of served lists, by reward.
        """
        return max(
            [
                0.0,
                *(self._compute_shortfall_of(name, means[name]) for name in self._integrals if name in means),
            ]
        )

    def _compute_shortfall_of(self, name: str, mean: float) -> float:
        """Return the shortfall of a mean to the floor of a reward, as a fraction of the floor; negative above the floor."""
        floor = self.rewards[name].at_least
        assert floor is not None
        return (floor - mean) / (abs(floor) or 1.0)

    def _compute_other_weight(self, name: str, step: int) -> float:
        """Return the sum of the absolute weights of all other rewards at a step, or 1 if it is zero."""
        return (
            sum(
                abs(options.compute_weight(step))
                for other_name, options in self.rewards.items()
                if other_name != name
            )
            or 1.0
        )

    def _has_moving_weight(self, name: str) -> bool:
        """Return whether the weight of a reward can change from step to step, by a floor or a schedule."""
        return name in self._integrals or not isinstance(self.rewards[name].weight, float | int)

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
            reward, key = match[2], match[3]
            before = self.rewards[reward]
            fields = {
                field: getattr(before, field) for field in before.model_fields_set
            } | before.get_options()
            self.set_reward(reward, RewardOptions.model_validate(fields | {key: command["value"]}))

    def set_reward(self, name: str, options: RewardOptions) -> None:
        """Add a reward or replace its options; the multiplier of a new floor begins at zero."""
        self.rewards[name] = options
        if options.at_least is None:
            self._integrals.pop(name, None)
            self._shortfalls.pop(name, None)
        elif name not in self._integrals:
            self._integrals[name], self._shortfalls[name] = 0.0, None

    def remove(self, name: str) -> None:
        """Remove a reward and its multiplier."""
        del self.rewards[name]
        self._served_means.pop(name, None)
        self._served_ratios.pop(name, None)
        self._integrals.pop(name, None)
        self._shortfalls.pop(name, None)

    def get_state(self) -> dict[str, Any]:
        """Return the state of the floors that a resumed stage needs, as fields of a journal record; empty without floors."""
        if not self._integrals:
            return {}
        served = {
            name: [self._served_means.get(name), self._served_ratios.get(name)] for name in self._integrals
        }
        return {
            "floors": {name: [self._integrals[name], self._shortfalls[name]] for name in self._integrals},
            "served": served,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned."""
        for name, (integral, shortfall) in state.get("floors", {}).items():
            if name in self._integrals:
                self._integrals[name], self._shortfalls[name] = integral, shortfall
        for name, (served, ratio) in state.get("served", {}).items():
            if name in self._integrals:
                self._served_means |= {} if served is None else {name: served}
                self._served_ratios |= {} if ratio is None else {name: ratio}


def sum_by_scene(
    mean_P: np.ndarray, is_measured_P: np.ndarray, scene_P: np.ndarray | None, count: int
) -> list[float]:
    """Return the contribution of each scene's lists to the mean of a reward over all lists, in the order of scene numbers.

    The contributions add up to the mean over all measured lists.

    Args:
        mean_P: The mean reward of the list of each prompt.
        is_measured_P: Mask of the lists that are included in the mean.
        scene_P: The scene number of each list, or None if the stage has no scenes.
        count: The number of scenes, including the scene of lists that belong to no named scene.
    """
    scene_P = np.zeros(len(mean_P), np.int64) if scene_P is None else scene_P
    sums = np.bincount(scene_P[is_measured_P], mean_P[is_measured_P], minlength=count)
    return (sums / max(1, int(is_measured_P.sum()))).tolist()

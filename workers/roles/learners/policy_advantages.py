"""Advantages of an RL step, which an algorithm computes from a rank's scores, and the weights of sampled beams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.plugins import load_heavy
from nonet.rl import Advantages, Draws, apply_corrections
from nonet.rl.algorithms import Algorithm
from nonet.workers.roles import LearnerContext, StageSetup
from nonet.workers.roles.learners.policy_prompts import PolicyPrompts

# Shapes: U prompts, W beams, L levels.


@dataclass(frozen=True)
class PolicyAdvantages:
    """Computes the advantages of a rank's share of an RL step.

    Attributes:
        context: Objects shared with the trainer.
        stage: The stage, with the weights of rewards at this step.
        algorithm: The algorithm of the stage.
        prompts: The prompts of the stage.
    """

    context: LearnerContext
    stage: StageSetup
    algorithm: Algorithm
    prompts: PolicyPrompts

    def compute(
        self, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray], weight: Tensor | None = None
    ) -> tuple[Advantages, Tensor]:
        """Compute the advantages of this rank's share.

        Args:
            beams: Rollouts of this rank's prompts.
            scores: Scores [U, W] by reward.
            weight: Weights that correct for the mismatch of rollout and trainer, per beam [U, W] or per level [U, W, L]. For an
                algorithm with draws, weights per beam are multiplied into the weights of the draws.

        Returns:
            The advantages, and the mask [U, W] of the valid beams.
        """
        valid_UW = torch.from_numpy(beams["valid"])
        rewards = {name: torch.from_numpy(np.ascontiguousarray(score)) for name, score in scores.items()}
        drawn: dict[str, Any] = {}
        if self.algorithm.weighted and "weight" in beams:
            draw_weight_UW, chance_UW = (torch.from_numpy(beams[name]) for name in ("weight", "chance"))
            if weight is not None and weight.ndim == 2:
                draw_weight_UW, weight = draw_weight_UW.double() * weight, None
            drawn = {"draws": Draws(draw_weight_UW, chance_UW)}
        column = self.algorithm.feedback_column(self.stage.algorithm)
        if column is not None:
            drawn["feedback_U"] = torch.from_numpy(self.prompts.read_feedback(beams, column))
        # This small computation in float64 runs on the host.
        compute_advantages = load_heavy(self.algorithm.advantage)
        options = self.stage.algorithm
        advantages = compute_advantages(
            rewards, self._get_reward_weights(beams), valid_UW, options, self._sum_moments, **drawn
        )
        return replace(advantages, value=apply_corrections(advantages.value, weight)), valid_UW

    def _get_reward_weights(self, beams: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the weight of each reward; with scenes, the weight for each prompt [U, 1]."""
        setup = self.context.run.scenes.get(self.stage.name)
        if setup is None or not setup.names or "scene" not in beams:
            return self.stage.weights
        return {
            name: torch.from_numpy(setup.get_weights(name, weight, beams["scene"]))[:, None]
            for name, weight in self.stage.weights.items()
        }

    def compute_draw_weights(self, beams: Mapping[str, Any], valid_UW: Tensor) -> Tensor | None:
        """Return the weight [U, W] of each beam, 1 on average over a group; None if the rollout has no weights."""
        if not self.algorithm.weighted or "weight" not in beams:
            return None
        draws = Draws(torch.from_numpy(beams["weight"]), torch.from_numpy(beams["chance"]))
        return draws.scale_weights(valid_UW).float().to(self.context.device)

    def _sum_moments(self, moments: Tensor) -> Tensor:
        """Return the sums of some numbers over all ranks, in their dtype."""
        return torch.tensor(self.context.member.sum_over_trainers(*moments.tolist()), dtype=moments.dtype)


def select_advantages(advantage: Advantages, part: slice | np.ndarray) -> Advantages:
    """Return the advantages of some prompts, with counts of groups of 0, since those are reported once for all prompts."""
    used_U, group_U = (None if x is None else x[part] for x in (advantage.used_U, advantage.group_U))
    return Advantages(advantage.value[part], flat_groups=0, small_groups=0, used_U=used_U, group_U=group_U)


def drop_unscored(
    valid_UW: np.ndarray, scores: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray], float]:
    """Exclude prompts without a score (NaN).

    Returns:
        The mask of valid beams [U, W], False for these prompts; the scores by reward, 0 for these prompts; and the number of
        the other prompts.
    """
    scored_U = np.ones(len(valid_UW), bool)
    for score in scores.values():
        scored_U &= ~np.isnan(score).any(1)
    clean = {name: np.where(scored_U[:, None], score, 0).astype(np.float32) for name, score in scores.items()}
    return valid_UW & scored_U[:, None], clean, float(scored_U.sum())

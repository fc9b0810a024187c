"""Trial of a reward on a few users without a run: its scores, spread, correlation with other rewards, and duration.

The caller provides the rollouts, which need not come from a model. Nothing is trained and no process is started.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nonet.errors import DataError
from nonet.rl.rewards.api import Reward
from nonet.rl.rewards.attempts import PromptFailure, RewardCalls
from nonet.types import Rollouts

# Shapes: U users, W beams.


@dataclass(frozen=True)
class RewardTrial:
    """Result of a trial.

    Attributes:
        name: Name of the reward on trial.
        rollouts: The rollouts that were scored.
        scores: Scores [U, W] by reward; rewards other than `name` that failed are left out.
        weights: Weights by reward.
        seconds: Duration of one call of the reward on trial.
        troubles: Prompts for which the reward on trial gave no score.
    """

    name: str
    rollouts: Rollouts
    scores: Mapping[str, np.ndarray]
    weights: Mapping[str, float]
    seconds: float
    troubles: list[PromptFailure]

    @property
    def flat(self) -> list[int]:
        """Rows of the users whose beams all have the same score, so that the reward on trial gives no training signal."""
        valid_UW, score_UW = self.rollouts.valid, self.scores[self.name]
        return [u for u in range(len(valid_UW)) if len(np.unique(score_UW[u][valid_UW[u]])) < 2]

    def compute_correlation(self, other: str) -> float:
        """Compute the correlation of the reward on trial with another one, after each group's mean is subtracted.

        The result is NaN if either of them does not vary.
        """
        own_UW, other_UW = self._centre(self.name), self._centre(other)
        norm = float(np.sqrt((own_UW**2).sum() * (other_UW**2).sum()))
        return float((own_UW * other_UW).sum() / norm) if norm > 0 else float("nan")

    def share(self, name: str) -> float:
        """Return a reward's share, in [0, 1], of the sum of the weighted rewards' standard deviations inside groups."""
        spread_by_reward = {
            reward: abs(self.weights[reward]) * float(np.sqrt((self._centre(reward) ** 2).mean()))
            for reward in self.scores
        }
        total = sum(spread_by_reward.values())
        return spread_by_reward[name] / total if total else 0.0

    def count_decided(self) -> int:
        """Count the groups whose best beam by the weighted sum changes if the reward on trial is left out."""
        sum_UW = np.sum([self.weights[name] * score for name, score in self.scores.items()], axis=0)
        rest_UW = sum_UW - self.weights[self.name] * self.scores[self.name]
        sum_UW, rest_UW = (np.where(self.rollouts.valid, scores, -np.inf) for scores in (sum_UW, rest_UW))
        return int((sum_UW.argmax(1) != rest_UW.argmax(1)).sum())

    def _centre(self, name: str) -> np.ndarray:
        """Return a reward's scores [U, W] float64 minus the mean of their group; 0 for invalid beams."""
        valid, score = self.rollouts.valid, np.nan_to_num(np.asarray(self.scores[name], np.float64))
        mean = np.where(valid, score, 0).sum(1, keepdims=True) / np.maximum(valid.sum(1, keepdims=True), 1)
        return np.where(valid, score - mean, 0.0)


def run_trial(
    name: str, rewards: Mapping[str, Reward], weights: Mapping[str, float], rollouts: Rollouts
) -> RewardTrial:
    """Score rollouts with the reward `name` and with the other rewards, all of which are set up and opened.

    Wrong shapes, exceptions and NaN of the reward on trial are reported as `troubles`. Other rewards that fail are left out.

    Raises:
        DataError: `weights` has no weight of the reward on trial.
    """
    calls = RewardCalls(lambda: rewards[name], name, rewards[name].timeout_s)
    began = time.perf_counter()
    score_UW, troubles = calls.score(rollouts)
    seconds = time.perf_counter() - began
    scores: dict[str, Any] = {name: score_UW}
    for other, reward in rewards.items():
        if other != name:
            other_UW, failures = RewardCalls(lambda reward=reward: reward, other, reward.timeout_s).score(
                rollouts
            )
            if not failures:
                scores[other] = other_UW
    if name not in weights:
        raise DataError(f"reward {name!r} has no weight")
    scored_weights = {scored: weights[scored] for scored in scores}
    return RewardTrial(name, rollouts, scores, scored_weights, seconds, troubles)

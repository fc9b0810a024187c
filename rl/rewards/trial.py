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
        scores: Scores [U, W] of every reward.
        weights: Weight of each reward.
        seconds: Duration of one call.
        troubles: Prompts for which the reward on trial gave no score.
        rollouts: The rollouts that were scored.
    """

    name: str
    rollouts: Rollouts
    scores: Mapping[str, np.ndarray]
    weights: Mapping[str, float]
    seconds: float
    troubles: list[PromptFailure]

    @property
    def flat(self) -> list[int]:
        """Users whose beams all have the same score, which give no training signal for this reward."""
        valid, score = self.rollouts.valid, self.scores[self.name]
        return [u for u in range(len(valid)) if len(np.unique(score[u][valid[u]])) < 2]

    def compute_correlation(self, other: str) -> float:
        """Compute the correlation of two rewards after each group's mean is subtracted; NaN if either does not vary."""
        mine, theirs = self._centre(self.name), self._centre(other)
        size = float(np.sqrt((mine**2).sum() * (theirs**2).sum()))
        return float((mine * theirs).sum() / size) if size > 0 else float("nan")

    def share(self, name: str) -> float:
        """Return a reward's share of the summed standard deviations of all weighted rewards inside groups."""
        spread = {
            reward: abs(self.weights[reward]) * float(np.sqrt((self._centre(reward) ** 2).mean()))
            for reward in self.scores
        }
        return spread[name] / total if (total := sum(spread.values())) else 0.0

    def count_decided(self) -> int:
        """Count the groups whose best beam by the weighted sum changes if the reward on trial is left out."""
        total = np.sum([self.weights[name] * score for name, score in self.scores.items()], axis=0)
        without = total - self.weights[self.name] * self.scores[self.name]
        total, without = (np.where(self.rollouts.valid, scores, -np.inf) for scores in (total, without))
        return int((total.argmax(1) != without.argmax(1)).sum())

    def _centre(self, name: str) -> np.ndarray:
        valid, score = self.rollouts.valid, np.nan_to_num(np.asarray(self.scores[name], np.float64))
        mean = np.where(valid, score, 0).sum(1, keepdims=True) / np.maximum(valid.sum(1, keepdims=True), 1)
        return np.where(valid, score - mean, 0.0)


def run_trial(
    name: str, rewards: Mapping[str, Reward], weights: Mapping[str, float], rollouts: Rollouts
) -> RewardTrial:
    """Score rollouts with the reward `name` and with the other rewards, all of which are set up and opened.

    Wrong shapes, exceptions and NaN of the reward on trial are reported as `troubles`. Other rewards that fail are left out.
    """
    attempt = RewardCalls(lambda: rewards[name], name, rewards[name].timeout_s)
    began = time.perf_counter()
    score, troubles = attempt.score(rollouts)
    seconds = time.perf_counter() - began
    scores: dict[str, Any] = {name: score}
    for other, reward in rewards.items():
        if other != name:
            found, wrong = RewardCalls(lambda reward=reward: reward, other, reward.timeout_s).score(rollouts)
            if not wrong:
                scores[other] = found
    if name not in weights:
        raise DataError(f"reward {name!r} has no weight")
    return RewardTrial(name, rollouts, scores, {each: weights[each] for each in scores}, seconds, troubles)

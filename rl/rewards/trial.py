"""Trial of a reward on a few users before any run: scores, spread, correlation with other rewards, time and shape.

Beams stand in for those of a model: the user's next events, items that often followed the last ones, popular items, and some
drawn by the seed. Nothing is trained and no process is started.
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
        troubles: Rows of the reward on trial without a score.
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
        """Compute the correlation of two rewards' differences from their group's mean; NaN where either has none."""
        mine, theirs = self._centre(self.name), self._centre(other)
        size = float(np.sqrt((mine**2).sum() * (theirs**2).sum()))
        return float((mine * theirs).sum() / size) if size > 0 else float("nan")

    def share(self, name: str) -> float:
        """Return this reward's share of the spread inside groups of all weighted rewards."""
        spread = {
            each: abs(self.weights[each]) * float(np.sqrt((self._centre(each) ** 2).mean()))
            for each in self.scores
        }
        return spread[name] / total if (total := sum(spread.values())) else 0.0

    def count_decided(self) -> int:
        """Count the groups whose best beam by all weighted rewards changes without this reward."""
        whole = np.sum([self.weights[name] * score for name, score in self.scores.items()], axis=0)
        without = whole - self.weights[self.name] * self.scores[self.name]
        whole, without = (np.where(self.rollouts.valid, each, -np.inf) for each in (whole, without))
        return int((whole.argmax(1) != without.argmax(1)).sum())

    def _centre(self, name: str) -> np.ndarray:
        valid, score = self.rollouts.valid, np.nan_to_num(np.asarray(self.scores[name], np.float64))
        mean = np.where(valid, score, 0).sum(1, keepdims=True) / np.maximum(valid.sum(1, keepdims=True), 1)
        return np.where(valid, score - mean, 0.0)


def run_trial(
    name: str, rewards: Mapping[str, Reward], weights: Mapping[str, float], rollouts: Rollouts
) -> RewardTrial:
    """Try the reward `name` together with the others, all set up and opened.

    A wrong shape, an exception and NaN are reported as troubles; another reward that fails is left out.
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

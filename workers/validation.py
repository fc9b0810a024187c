"""Validation of a checkpoint while its stage goes on: which events are used, and the nats of their items.

The nats of an event are the negative log-probability of its item, over the whole catalogue and without dropout. A training
loss also predicts the events `ahead` of the next one and uses dropout, so it lies above the nats of the same model.
"""

# Shapes: P prompts, I items.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nonet.random import rng

MOST_USERS = (
    2000  # Users of a validation; with more, a supervised stage would spend too long on its validations.
)

Scores = Callable[[np.ndarray, np.ndarray], np.ndarray]


def select_validation_events(users: np.ndarray, seed: int, max_users: int = MOST_USERS) -> np.ndarray:
    """Select the events of at most `max_users` users, drawn by the seed.

    Args:
        users: The user of each event [P].
        seed: Seed of the draw.
        max_users: Largest number of users.

    Returns:
        Whether each event is validated [P] bool.
    """
    distinct_users = np.unique(users)
    if len(distinct_users) <= max_users:
        return np.ones(len(users), bool)
    return np.isin(users, rng(seed, "validation").choice(distinct_users, max_users, replace=False))


class TargetNats:
    """A score function that passes scores on unchanged and collects the nats of the targets.

    Args:
        scores: Maps (users [P], positions [P]) to log-probabilities [P, I].
        target: Maps (users [P], positions [P]) to the held-out items [P].
    """

    def __init__(self, scores: Scores, target: Scores):
        self._scores, self._target = scores, target
        self._nats_of_calls: list[np.ndarray] = []

    def __call__(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the scores [P, I] of events, and collect the nats of their targets."""
        scores_PI = self._scores(users, positions)
        target_logp_P = scores_PI[np.arange(len(users)), self._target(users, positions)].astype(np.float64)
        self._nats_of_calls.append(np.where(np.isfinite(target_logp_P), -target_logp_P, np.nan))
        return scores_PI

    @property
    def values(self) -> np.ndarray:
        """The nats of each event scored so far [P]; NaN where its item is outside the catalogue."""
        return np.concatenate([np.empty(0), *self._nats_of_calls])

    @property
    def mean(self) -> float | None:
        """The mean nats of a held-out event; None where no target is in the catalogue."""
        known = self.values[~np.isnan(self.values)]
        return float(known.sum()) / len(known) if len(known) else None

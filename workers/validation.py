"""Validation of a commit while its stage goes on: which events are used, and the cost of the held-out items in nats.

Nats are those of the next event alone, over the whole catalogue and without dropout. A training loss is a mixture
over the events `ahead` with dropout, so it lies above the nats that the same model has for next events.
"""

# Shapes: P prompts, I items.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nonet.random import rng

MOST_USERS = 2000

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
    known = np.unique(users)
    if len(known) <= max_users:
        return np.ones(len(users), bool)
    return np.isin(users, rng(seed, "validation").choice(known, max_users, replace=False))


class TargetNats:
    """A score function that passes scores on unchanged and collects the nats of the targets.

    Args:
        scores: Maps (users [P], positions [P]) to log-probabilities [P, I].
        target: Maps (users [P], positions [P]) to the held-out items [P].
    """

    def __init__(self, scores: Scores, target: Scores):
        self._scores, self._target = scores, target
        self._parts: list[np.ndarray] = []

    def __call__(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the scores [P, I] of events, and collect the nats of their targets."""
        scores_PI = self._scores(users, positions)
        own_P = scores_PI[np.arange(len(users)), self._target(users, positions)].astype(np.float64)
        self._parts.append(np.where(np.isfinite(own_P), -own_P, np.nan))
        return scores_PI

    @property
    def values(self) -> np.ndarray:
        """The nats of each event scored so far [P]; NaN where its item is outside the catalogue."""
        return np.concatenate([np.empty(0), *self._parts])

    @property
    def mean(self) -> float | None:
        """The mean nats of a held-out event; None where no target is in the catalogue."""
        values = self.values[~np.isnan(self.values)]
        return float(values.sum()) / len(values) if len(values) else None

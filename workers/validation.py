"""Validation of a commit while its stage goes on: whose events are asked, and what the held-out items cost in nats.

Nats are of the next event alone, over the whole catalogue, without dropout. A training loss is a mixture over the events `ahead`,
with dropout: it lies above what the same model pays for next events, never below.
"""

# Shapes: P prompts, I items.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nonet.random import rng

MOST_USERS = 2000

Scores = Callable[[np.ndarray, np.ndarray], np.ndarray]


def select_validation_events(users: np.ndarray, seed: int, max_users: int = MOST_USERS) -> np.ndarray:
    """Which of the events [P] of these users are validated [P] bool: those of `most` users, drawn by the seed, or all."""
    known = np.unique(users)
    if len(known) <= max_users:
        return np.ones(len(users), bool)
    return np.isin(users, rng(seed, "validation").choice(known, max_users, replace=False))


class TargetNats:
    """Scores that are asked for, as they are; on the way the nats of the targets add up.

    scores   (users [P], positions [P]) -> log-probability an item [P, I]
    target   (users [P], positions [P]) -> the held-out items [P]
    """

    def __init__(self, scores: Scores, target: Scores):
        self._scores, self._target = scores, target
        self._parts: list[np.ndarray] = []

    def __call__(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        scores_PI = self._scores(users, positions)
        own_P = scores_PI[np.arange(len(users)), self._target(users, positions)].astype(np.float64)
        self._parts.append(np.where(np.isfinite(own_P), -own_P, np.nan))
        return scores_PI

    @property
    def values(self) -> np.ndarray:
        """The nats of each event asked about so far [P]; NaN where its item is outside the catalogue."""
        return np.concatenate([np.empty(0), *self._parts])

    @property
    def mean(self) -> float | None:
        """A held-out event's nats; None where no target is in the catalogue."""
        values = self.values[~np.isnan(self.values)]
        return float(values.sum()) / len(values) if len(values) else None

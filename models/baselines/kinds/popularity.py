"""Popularity: ranks items by their number of training events, in the same way for every user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nonet.models.baselines.kinds.base import BaselineSpec, SparseVotes
from nonet.samples.sequences import TRAIN

if TYPE_CHECKING:
    from nonet.samples.sequences import Sequences


# Shapes: P prompts, I items.
class Popularity:
    """Ranks items by their number of events.

    Attributes:
        popularity: Number of events of each item [I] in the fitted splits.
    """

    def __init__(self, n_items: int):
        self.popularity = np.zeros(n_items)

    def fit(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Popularity:
        """Count the events of each item in the given splits; return the baseline itself."""
        self.popularity = np.zeros(len(self.popularity))
        for part in seq.iterate_parts():
            is_counted = np.isin(part.split, splits)
            self.popularity += np.bincount(part.item[is_counted], minlength=len(self.popularity))
        return self

    def make_prior(self, weight: float) -> np.ndarray:
        """Return the popularity [I] scaled to a maximum of `weight`, as the prior of votes."""
        return weight * self.popularity / max(self.popularity.max(initial=0), 1)

    def votes(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> SparseVotes:
        """Return votes without cells: no prompt has items of its own."""
        empty = np.empty(0, np.int64)
        return SparseVotes(self.popularity, empty, empty, np.empty(0))

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the scores [P, I] float32, a read-only view of one row."""
        return np.broadcast_to(self.popularity.astype(np.float32), (len(users), len(self.popularity)))


SPEC = BaselineSpec(Popularity, quick=True)

"""Recent popularity: ranks items by their number of events in the newest part of the training events."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from nonet.models.baselines._histories import compute_ndcg, draw_validation_events
from nonet.models.baselines.kinds import Popularity, SparseVotes
from nonet.samples.sequences import TRAIN, Sequences

# Shapes: P prompts, I items.
_SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)  # Of the training events; of equal ones the first is chosen.
_MAX_TIMES = 1 << 20  # Events by whose times the windows are cut.
_PRIOR = 1e-6  # Weight of the popularity over all time, which orders items of equal recent popularity.


class RecentPopularity:
    """Ranks items by their number of events since a time.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.
        share: Share of the training events, the newest ones, that count; by default chosen by validation.

    Attributes:
        trained: The share, and the unix second since which events count.
    """

    def __init__(self, n_items: int, *, seed: int, share: float | None = None):
        self._n_items, self._seed = n_items, seed
        self._shares = _SHARES if share is None else (share,)
        self._popularity = np.zeros(n_items)
        self.trained: dict[str, Any] = {}

    def fit(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> RecentPopularity:
        """Count the newest events of the given splits, and return the baseline itself."""
        prior = Popularity(self._n_items).fit(seq, splits).make_prior(_PRIOR)
        events = np.flatnonzero(np.isin(seq.split, splits))
        times = np.sort(seq.time[events[:: max(1, len(events) // _MAX_TIMES)]])
        users, positions = draw_validation_events(seq, splits, self._seed, "recent_popularity")
        best, best_popularity = -1.0, self._popularity
        for share in self._shares:
            since = int(times[int((1 - share) * len(times))]) if len(times) else 0
            counts = np.zeros(self._n_items)
            for part in seq.iterate_parts():
                is_counted = np.isin(part.split, splits) & (part.time >= since)
                counts += np.bincount(part.item[is_counted], minlength=self._n_items)
            self._popularity = counts + prior
            ndcg = compute_ndcg(partial(self.scores, seq), seq, users, positions, self._n_items)
            if ndcg > best:
                best, best_popularity = ndcg, self._popularity
                self.trained = {"share": share, "since": since}
        self._popularity = best_popularity
        return self

    def votes(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> SparseVotes:
        """Return votes without cells: no prompt has items of its own."""
        empty = np.empty(0, np.int64)
        return SparseVotes(self._popularity, empty, empty, np.empty(0))

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the scores [P, I] float64, a read-only view of one row."""
        return np.broadcast_to(self._popularity, (len(users), self._n_items))

"""Recent popularity: ranks items by their number of events in the newest part of the training events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nonet.models.baselines._histories import ChosenByValidation
from nonet.models.baselines.kinds import Popularity, SparseVotes
from nonet.models.ranking import make_tie_order
from nonet.samples.sequences import TRAIN, Sequences

# Shapes: P prompts, I items.
_SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)  # Of the training events; of equal ones the first is chosen.
_MAX_TIMES = 1 << 20  # Events by whose times the windows are cut.
_PRIOR = 1e-6  # Weight of the popularity over all time, which orders items of equal recent popularity.


class RecentPopularity(ChosenByValidation):
    """Ranks items by their number of events since a time.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.
        share: Share of the training events, the newest ones, that count; by default chosen by validation.

    Attributes:
        trained: The share, and the unix second since which events count.
    """

    name = "recent_popularity"

    def __init__(self, n_items: int, *, seed: int, share: float | None = None):
        super().__init__(n_items, seed)
        self._shares = _SHARES if share is None else (share,)
        self._popularity = np.zeros(n_items)

    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Count the newest events of the given splits, and choose the share by validation."""
        popularity = Popularity(self._n_items).fit(seq, splits)
        prior = popularity.make_prior(_PRIOR)
        times = _list_times(seq, splits)

        def fit(share: float) -> tuple[int, np.ndarray]:
            since = int(times[min(int((1 - share) * len(times)), len(times) - 1)]) if len(times) else 0
            counts = np.zeros(self._n_items)
            for part in seq.iterate_parts():
                is_counted = np.isin(part.split, splits) & (part.time >= since)
                counts += np.bincount(part.item[is_counted], minlength=self._n_items)
            self._popularity = counts + prior
            return since, self._popularity

        # The prior is lost in the float32 of ranked votes, so it orders items of equal recent popularity here, too.
        tie_I = make_tie_order(popularity.popularity, seed=0)
        share, (since, self._popularity) = yield from self._choose(self._shares, fit, seq, splits, tie_I)
        self.trained = {"share": share, "since": since}

    def votes(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> SparseVotes:
        """Return votes without cells: no prompt has items of its own."""
        empty = np.empty(0, np.int64)
        return SparseVotes(self._popularity, empty, empty, np.empty(0))

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the scores [P, I] float64, a read-only view of one row."""
        return np.broadcast_to(self._popularity, (len(users), self._n_items))


def _list_times(seq: Sequences, splits: Sequence[int]) -> np.ndarray:
    """Return the times of at most two million events in some splits in ascending order; the first is the least of all."""
    events = np.flatnonzero(np.isin(seq.split, splits))
    times = np.sort(seq.time[events[:: max(1, len(events) // _MAX_TIMES)]])
    if len(times):
        parts = seq.iterate_parts()
        times[0] = min(part.time[np.isin(part.split, splits)].min(initial=times[0]) for part in parts)
    return times

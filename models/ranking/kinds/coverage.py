"""Coverage: the share of the catalogue that is recommended to at least one user."""

from __future__ import annotations

import numpy as np

from nonet.models.ranking.kinds.base import MISSED, ListCatalogue, ListMetric


class CoverageCounter:
    """Records the best rank at which each item was recommended to any user.

    Args:
        catalogue: The catalogue of the items.
    """

    def __init__(self, catalogue: ListCatalogue):
        self._best_rank_I = np.full(len(catalogue.occurs_I), MISSED, np.int64)

    def add(self, lists_PW: np.ndarray) -> None:
        """Add recommended lists of item indices [P, W], best first; -1 is an empty entry."""
        is_item_PW = lists_PW >= 0
        rank_PW = np.broadcast_to(np.arange(lists_PW.shape[1]), lists_PW.shape)
        np.minimum.at(self._best_rank_I, lists_PW[is_item_PW], rank_PW[is_item_PW])

    def absorb(self, other: CoverageCounter) -> None:
        """Add the lists of another counter to this one."""
        self._best_rank_I = np.minimum(self._best_rank_I, other._best_rank_I)

    def compute(self, k: int | None) -> float:
        """Return the share of the catalogue that is among the first k items of any list; None for k uses complete lists."""
        return float((self._best_rank_I < (k or MISSED)).mean())


SPEC = ListMetric(CoverageCounter, needs_k=False)

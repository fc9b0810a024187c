"""Coverage: the share of the catalogue that is recommended to at least one user."""

from __future__ import annotations

import numpy as np

from nonet.models.ranking.kinds.base import MISSED, ListCatalogue, ListMetric


class CoverageCounter:
    """The best place at which each item of the catalogue was recommended to any user, over all lists added."""

    def __init__(self, catalogue: ListCatalogue):
        self._place_I = np.full(len(catalogue.occurs_I), MISSED, np.int64)

    def add(self, lists_PW: np.ndarray) -> None:
        """Add lists of item indices, best first; -1 is none."""
        there = lists_PW >= 0
        place_PW = np.broadcast_to(np.arange(lists_PW.shape[1]), lists_PW.shape)
        np.minimum.at(self._place_I, lists_PW[there], place_PW[there])

    def absorb(self, other: CoverageCounter) -> None:
        """Add the lists of another counter."""
        self._place_I = np.minimum(self._place_I, other._place_I)

    def compute(self, k: int | None) -> float:
        """Return the share of the catalogue among the first k items of any list, or anywhere in a list for None."""
        return float((self._place_I < (k or MISSED)).mean())


SPEC = ListMetric(CoverageCounter, needs_k=False)

"""NDCG: the discounted gain of each held-out event, whose item is the only relevant one."""

import numpy as np

from nonet.models.ranking.kinds.base import EventMetric


def compute_ndcg(ranks: np.ndarray, k: int) -> np.ndarray:
    """Return 1 / log2(rank + 2) for each event [P] whose rank is below k, and 0 for the others."""
    return np.where(ranks < k, 1 / np.log2(ranks + 2.0), 0.0)


SPEC = EventMetric(compute_ndcg)

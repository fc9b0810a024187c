"""MRR: the reciprocal rank of each held-out event."""

import numpy as np

from nonet.models.ranking.kinds.base import EventMetric


def compute_mrr(ranks: np.ndarray, k: int) -> np.ndarray:
    """Return 1 / (rank + 1) for each event [P] whose rank is below k, and 0 for the others."""
    return np.where(ranks < k, 1 / (ranks + 1.0), 0.0)


SPEC = EventMetric(compute_mrr)

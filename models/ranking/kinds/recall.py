"""Recall: the share of held-out events whose item is among the first k."""

import numpy as np

from nonet.models.ranking.kinds.base import EventMetric


def compute_recall(ranks: np.ndarray, k: int) -> np.ndarray:
    """Return 1 for each event [P] whose rank is below k, and 0 for the others."""
    return (ranks < k).astype(np.float64)


SPEC = EventMetric(compute_recall)

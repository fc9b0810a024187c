"""List quality beyond accuracy: catalogue coverage, Gini, novelty, diversity and calibration.

These belong beside accuracy in a report: a recommender of popular items only can be accurate although it shows the same hundred
items to everybody. Only the first k items of each list count. Categories come from the item table; without them diversity and
calibration are left out.
"""

from __future__ import annotations

import numpy as np

from nonet.models.ranking.kinds import ItemCategories
from nonet.types import Jagged

# Shapes: P prompts, W items of a list, k of them that count, I items of the catalogue, C categories.

# Weight of the history's distribution that is mixed into the list's, so that the divergence is finite (Steck 2018).
_HISTORY_WEIGHT = 0.01


class ListQuality:
    """Accumulates statistics of lists of item indices, best first; -1 stands for no item.

    Args:
        occurs_I: Number of training events of each item.
        k: Number of items of each list that count.
        categories: Categories of the items; None to leave out the statistics that need them.
    """

    def __init__(self, occurs_I: np.ndarray, k: int = 10, categories: ItemCategories | None = None):
        occurs = np.asarray(occurs_I, np.float64)
        self._k, self._categories = k, categories
        self._self_information_I = -np.log2((occurs + 1) / (occurs.sum() + len(occurs)))
        self._shown_I = np.zeros(len(occurs), np.int64)
        self._sums = {"novelty": 0.0, "diversity": 0.0, "calibration": 0.0}
        self._counts = dict.fromkeys(self._sums, 0)

    def add(self, lists_PW: np.ndarray, history: Jagged) -> None:
        """Add lists, and for each list the history of its user (dense item indices)."""
        lists_Pk = np.asarray(lists_PW)[:, : self._k]
        is_item = lists_Pk >= 0
        shown = lists_Pk[is_item]
        self._shown_I += np.bincount(shown, minlength=len(self._shown_I))
        self._add_values("novelty", self._self_information_I[shown])
        if self._categories is not None:
            share_PkC = self._categories.compute_shares(np.maximum(lists_Pk, 0)) * is_item[:, :, None]
            self._add_values("diversity", _compute_diversity(share_PkC > 0, is_item))
            self._add_values(
                "calibration", _compute_divergence(self._sum_history_shares(history), share_PkC.sum(1))
            )

    def absorb(self, other: ListQuality) -> None:
        """Add the sums of another instance for the same catalogue."""
        self._shown_I = self._shown_I + other._shown_I
        for name in self._sums:
            self._sums[name] += other._sums[name]
            self._counts[name] += other._counts[name]

    def summarise(self) -> dict[str, float]:
        """Return the statistics of the lists under the keys "name@k".

        Returns:
            coverage: Share of the catalogue in any list.
            gini: Gini coefficient of how often items are shown: 0 if all are shown equally often, 1 if all lists show one item.
            novelty: Mean self-information of shown items in bits, -log2 of their frequency (Zhou et al. 2010).
            diversity: 1 - Jaccard similarity of the categories of two items in a list (Ziegler et al. 2005).
            calibration: KL divergence in nats between the categories of a list and those of its user (Steck 2018); lower is
                better.
        """
        values = {"coverage": float((self._shown_I > 0).mean()), "gini": _compute_gini(self._shown_I)}
        values |= {name: self._sums[name] / count for name, count in self._counts.items() if count}
        return {f"{name}@{self._k}": value for name, value in values.items()}

    def _add_values(self, name: str, values: np.ndarray) -> None:
        """Add the finite values to the sum and the count of a statistic."""
        finite = values[np.isfinite(values)]
        self._sums[name] += float(finite.sum())
        self._counts[name] += len(finite)

    def _sum_history_shares(self, history: Jagged) -> np.ndarray:
        """Return the sum [P, C] of the category shares of each history's items."""
        assert self._categories is not None
        offsets, items = np.asarray(history.offsets), np.asarray(history.values)
        sums_PC = np.zeros((len(offsets) - 1, self._categories.count))
        # One history at a time, since np.add.at over all of them takes ten times as long.
        for row in range(len(sums_PC)):
            items_of_history = items[offsets[row] : offsets[row + 1]]
            sums_PC[row] = self._categories.compute_shares(items_of_history).sum(0, dtype=np.float64)
        return sums_PC


def _compute_diversity(has_PkC: np.ndarray, is_item_Pk: np.ndarray) -> np.ndarray:
    """Compute the mean [P] of 1 - Jaccard over the pairs of items of each list; NaN without a pair that has categories."""
    has_category = has_PkC.astype(np.float32)
    intersection = has_category @ has_category.transpose(0, 2, 1)
    count_Pk = has_category.sum(2)
    union = count_Pk[:, :, None] + count_Pk[:, None, :] - intersection
    k = is_item_Pk.shape[1]
    is_pair_Pkk = np.triu(np.ones((k, k), bool), 1) & (count_Pk > 0)[:, :, None] & (count_Pk > 0)[:, None, :]
    distance = np.where(is_pair_Pkk, 1 - intersection / np.maximum(union, 1), 0).sum((1, 2))
    return np.where(is_pair_Pkk.any((1, 2)), distance / np.maximum(is_pair_Pkk.sum((1, 2)), 1), np.nan)


def _compute_divergence(history_PC: np.ndarray, list_PC: np.ndarray) -> np.ndarray:
    """Compute KL(history, list) [P] of the category distributions in nats; NaN if history or list has no categories."""
    has_categories = (history_PC.sum(1) > 0) & (list_PC.sum(1) > 0)
    p = history_PC / np.maximum(history_PC.sum(1, keepdims=True), 1e-12)
    q = list_PC / np.maximum(list_PC.sum(1, keepdims=True), 1e-12)
    q = (1 - _HISTORY_WEIGHT) * q + _HISTORY_WEIGHT * p
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0)
    return np.where(has_categories, terms.sum(1), np.nan)


def _compute_gini(shown_I: np.ndarray) -> float:
    """Compute the Gini coefficient of how often items were shown."""
    total = shown_I.sum()
    if not total:
        return 0.0
    sorted_counts, n = np.sort(shown_I), len(shown_I)
    return float((2 * np.arange(1, n + 1) - n - 1) @ sorted_counts / (n * total))

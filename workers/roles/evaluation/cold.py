"""ColdRanking: how well items without training events are ordered among themselves, whatever they get in the full ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nonet.models.ranking import compute_per_event, rank_of_target_np
from nonet.models.ranking.kinds import ItemCategories
from nonet.ranges import concatenate_rows
from nonet.types import Jagged

# Shapes: P held-out events, Q events whose item is cold, I items, C categories.

_METRIC, _LENGTH = "recall@10", 10


@dataclass(slots=True)
class ColdRanking:
    """Ranks of held-out events of cold items, those without training events, among such items alone.

    Attributes:
        is_cold: Which items are cold [I] bool.
        tie: Order of items of equal scores [I].
        categories: Categories of the items; None without any.
        ranks: Rank of each event's item among the cold ones, in parts.
        chances: Probability of each event's item to be among ten that are drawn from the cold items which share a category with
            the user's history, in parts.
    """

    is_cold: np.ndarray
    tie: np.ndarray
    categories: ItemCategories | None
    ranks: list[np.ndarray] = field(default_factory=list)
    chances: list[np.ndarray] = field(default_factory=list)

    def add(self, scores_PI: np.ndarray, target_P: np.ndarray, masked: Jagged, seen: Jagged) -> None:
        """Add the events with a cold item.

        Args:
            scores_PI: Scores of all items.
            target_P: Items of the events.
            masked: Masked items of each event.
            seen: Items of the history of each event.
        """
        rows = np.flatnonzero(self.is_cold[target_P])
        if not len(rows):
            return
        target_Q, scores_QI = target_P[rows], np.where(self.is_cold, scores_PI[rows], -np.inf)
        masked_rows = [np.asarray(masked[p]) for p in rows.tolist()]
        self.ranks.append(rank_of_target_np(scores_QI, target_Q, concatenate_rows(masked_rows), self.tie))
        if self.categories is not None:
            histories = [np.asarray(seen[p]) for p in rows.tolist()]
            self.chances.append(self._compute_chances(self.categories, target_Q, masked_rows, histories))

    def _compute_chances(
        self,
        categories: ItemCategories,
        target_Q: np.ndarray,
        masked: Sequence[np.ndarray],
        histories: Sequence[np.ndarray],
    ) -> np.ndarray:
        """Return the probability [Q] that ten random cold items which share a category with the history contain the target."""
        cold = np.flatnonzero(self.is_cold)
        has_category = categories.compute_shares(cold) > 0
        chances = np.zeros(len(target_Q))
        for q, target in enumerate(target_Q):
            known_C = (categories.compute_shares(histories[q]) > 0).any(0)
            candidates = np.setdiff1d(cold[has_category[:, known_C].any(1)], masked[q])
            if target in candidates:
                chances[q] = min(1.0, _LENGTH / len(candidates))
        return chances

    def absorb(self, other: ColdRanking) -> None:
        """Append the events of another share."""
        self.ranks += other.ranks
        self.chances += other.chances

    def summarise(self) -> dict[str, Any]:
        """Return the number of cold "items" and of "events" with one, and "recall@10" and "random recall@10" among cold items.

        The last is that of a random order of those that share a category with the history; None without categories. Empty if no
        event has a cold item.
        """
        if not self.ranks:
            return {}
        ranks = np.concatenate(self.ranks)
        chance = float(np.concatenate(self.chances).mean()) if self.chances else None
        recall = float(compute_per_event(_METRIC, ranks).mean())
        counts = {"items": int(self.is_cold.sum()), "events": len(ranks)}
        return counts | {_METRIC: recall, f"random {_METRIC}": chance}

"""SparseScores: scores of all items that differ from shared scores in few items per prompt, ranked without an array [P, I].

Ranks and lists are equal to those of the dense scores: ties have the same order, and masked items are in no list. A rank is that
of the target among the shared scores, corrected by the items that are masked or have a score of their own for the prompt.
"""

from __future__ import annotations

import numpy as np

from nonet.models.ranking.metrics import MISSED
from nonet.types import Jagged

# Shapes: P prompts, I items, C cells: (prompt, item) pairs with a score of their own, as keys prompt * I + item.


class SharedScores:
    """Scores [I] float32 that all prompts share, sorted once; items of equal score are ordered by `tie_I`."""

    def __init__(self, score_I: np.ndarray, tie_I: np.ndarray):
        self.score, self.tie = np.asarray(score_I, np.float32), tie_I
        self.order = np.lexsort((tie_I, -self.score))
        self._negated_scores, self._sorted_ties = -self.score[self.order], tie_I[self.order]

    def count_ahead(self, score_P: np.ndarray, tie_P: np.ndarray) -> np.ndarray:
        """Count for each prompt [P] the items that rank before one with this score and tie order."""
        n_ahead_P = np.searchsorted(self._negated_scores, -score_P, "left")
        n_ahead_or_tied_P = np.searchsorted(self._negated_scores, -score_P, "right")
        for row in np.flatnonzero(n_ahead_or_tied_P > n_ahead_P):
            n_ahead_P[row] += np.searchsorted(
                self._sorted_ties[n_ahead_P[row] : n_ahead_or_tied_P[row]], tie_P[row]
            )
        return n_ahead_P


class SparseScores:
    """Scores of P prompts that equal the shared ones except in few cells.

    Args:
        prompts: Number of prompts.
        shared: Scores of all other cells.
        prompt: Prompt of each cell [C].
        item: Item of each cell [C]; cells are sorted by prompt, then by item.
        score: Score of each cell [C] float32.
    """

    def __init__(
        self, prompts: int, shared: SharedScores, prompt: np.ndarray, item: np.ndarray, score: np.ndarray
    ):
        self._prompts, self._shared = prompts, shared
        self._cells = prompt * len(shared.score) + item
        self._score = np.asarray(score, np.float32)

    def compute_ranks(self, target_P: np.ndarray, masked: Jagged) -> np.ndarray:
        """Compute the ranks [P] int64 of the targets, equal to those of `rank_of_target_np` for the dense scores."""
        shared, n_items = self._shared, len(self._shared.score)
        target_score_P = self._get_scores(np.arange(self._prompts) * n_items + target_P)
        target_tie_P = shared.tie[target_P]
        masked_cells = self._find_masked_cells(masked)
        index, is_own = self._find_cells(masked_cells)
        special_cells = np.concatenate([self._cells, masked_cells[~is_own]])
        prompt, item = special_cells // n_items, special_cells % n_items
        rank_P = shared.count_ahead(target_score_P, target_tie_P)
        is_ahead = _is_ahead(
            shared.score[item], shared.tie[item], target_score_P[prompt], target_tie_P[prompt]
        )
        rank_P = rank_P - np.bincount(prompt, weights=is_ahead, minlength=self._prompts).astype(np.int64)
        is_unmasked = np.ones(len(self._cells), bool)
        is_unmasked[index[is_own]] = False
        prompt, item = self._cells[is_unmasked] // n_items, self._cells[is_unmasked] % n_items
        is_ahead = _is_ahead(
            self._score[is_unmasked], shared.tie[item], target_score_P[prompt], target_tie_P[prompt]
        )
        rank_P = rank_P + np.bincount(prompt, weights=is_ahead, minlength=self._prompts).astype(np.int64)
        rank_P[np.isin(np.arange(self._prompts) * n_items + target_P, masked_cells)] = MISSED
        rank_P[np.isneginf(target_score_P)] = MISSED
        return rank_P

    def select_top(self, k: int, masked: Jagged) -> np.ndarray:
        """Return the k best items [P, k] of each prompt that are not masked, best first; -1 where none is left."""
        shared, n_items = self._shared, len(self._shared.score)
        masked_cells = self._find_masked_cells(masked)
        top_Pk = np.full((self._prompts, k), -1, np.int64)
        first_cells = np.arange(self._prompts + 1) * n_items
        cell_cuts = np.searchsorted(self._cells, first_cells)
        masked_cuts = np.searchsorted(masked_cells, first_cells)
        for row in range(self._prompts):
            own_items = self._cells[cell_cuts[row] : cell_cuts[row + 1]] - row * n_items
            own_score = self._score[cell_cuts[row] : cell_cuts[row + 1]]
            masked_items = masked_cells[masked_cuts[row] : masked_cuts[row + 1]] - row * n_items
            shared_items = shared.order[: k + len(own_items) + len(masked_items)]
            shared_items = shared_items[~np.isin(shared_items, np.concatenate([own_items, masked_items]))][:k]
            is_allowed = ~np.isin(own_items, masked_items)
            item = np.concatenate([own_items[is_allowed], shared_items])
            score = np.concatenate([own_score[is_allowed], shared.score[shared_items]])
            best = np.lexsort((shared.tie[item], -score))[:k]
            best = best[~np.isneginf(score[best])]
            top_Pk[row, : len(best)] = item[best]
        return top_Pk

    def _get_scores(self, cell: np.ndarray) -> np.ndarray:
        """Return the scores of cells, which may be shared ones."""
        score = self._shared.score[cell % len(self._shared.score)].copy()
        index, is_own = self._find_cells(cell)
        score[is_own] = self._score[index[is_own]]
        return score

    def _find_cells(self, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each cell among those with a score of their own, and whether it is one of them."""
        index = np.searchsorted(self._cells, cell)
        is_own = index < len(self._cells)
        is_own[is_own] = self._cells[index[is_own]] == cell[is_own]
        return index, is_own

    def _find_masked_cells(self, masked: Jagged) -> np.ndarray:
        """Return the distinct masked cells, ascending."""
        lengths = np.diff(np.asarray(masked.offsets, np.int64))
        prompt = np.repeat(np.arange(len(lengths)), lengths)
        return np.unique(prompt * len(self._shared.score) + np.asarray(masked.values))


def _is_ahead(
    score: np.ndarray, tie: np.ndarray, target_score: np.ndarray, target_tie: np.ndarray
) -> np.ndarray:
    """Return whether items with these scores and tie orders rank before the targets."""
    return (score > target_score) | ((score == target_score) & (tie < target_tie))

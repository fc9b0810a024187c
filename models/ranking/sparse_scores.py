"""SparseScores: scores of a whole catalogue that differ from a shared list in few items per prompt, ranked without [P, I].

Ranks and lists are bitwise those of the dense scores: ties have the same order, and masked items are in no list. A rank is that
of the target among the shared scores, corrected by the items that are the prompt's own or masked.
"""

from __future__ import annotations

import numpy as np

from nonet.models.ranking.metrics import MISSED
from nonet.types import Jagged

# Shapes: P prompts, I items, C (prompt, item) cells with a score of their own, S cells that are special: those and masked ones.


class SharedScores:
    """Scores [I] float32 that all prompts share and the order of ties [I], sorted once."""

    def __init__(self, score_I: np.ndarray, tie_I: np.ndarray):
        self.score, self.tie = np.asarray(score_I, np.float32), tie_I
        self.order = np.lexsort((tie_I, -self.score))
        self._sorted, self._ties = -self.score[self.order], tie_I[self.order]

    def count_ahead(self, score_P: np.ndarray, tie_P: np.ndarray) -> np.ndarray:
        """Count the items that come before one of this score and tie order [P]."""
        left = np.searchsorted(self._sorted, -score_P, "left")
        right = np.searchsorted(self._sorted, -score_P, "right")
        for row in np.flatnonzero(right > left):
            left[row] += np.searchsorted(self._ties[left[row] : right[row]], tie_P[row])
        return left


class SparseScores:
    """Scores that differ from shared ones in few cells.

    Args:
        prompts: Number of prompts.
        shared: Scores of all other cells.
        prompt: Prompt of each cell [C].
        item: Item of each cell [C], in the order of prompt and item.
        score: Score of each cell [C] float32.
    """

    def __init__(
        self, prompts: int, shared: SharedScores, prompt: np.ndarray, item: np.ndarray, score: np.ndarray
    ):
        self._prompts, self._shared = prompts, shared
        self._cell = prompt * len(shared.score) + item
        self._score = np.asarray(score, np.float32)

    def compute_ranks(self, target_P: np.ndarray, masked: Jagged) -> np.ndarray:
        """Compute the ranks [P] int64 of the targets, equal to those of `rank_of_target_np` for the dense scores."""
        shared, items = self._shared, len(self._shared.score)
        own_P = self._get_scores(np.arange(self._prompts) * items + target_P)
        tie_P = shared.tie[target_P]
        hidden = self._find_masked_cells(masked)
        special = np.union1d(self._cell, hidden)
        prompt, item = special // items, special % items
        rank_P = shared.count_ahead(own_P, tie_P)
        before = _is_before(shared.score[item], shared.tie[item], own_P[prompt], tie_P[prompt])
        rank_P = rank_P - np.bincount(prompt, weights=before, minlength=self._prompts).astype(np.int64)
        left = ~np.isin(self._cell, hidden)
        prompt, item = self._cell[left] // items, self._cell[left] % items
        before = _is_before(self._score[left], shared.tie[item], own_P[prompt], tie_P[prompt])
        rank_P = rank_P + np.bincount(prompt, weights=before, minlength=self._prompts).astype(np.int64)
        rank_P[np.isin(np.arange(self._prompts) * items + target_P, hidden)] = MISSED
        rank_P[np.isneginf(own_P)] = MISSED
        return rank_P

    def select_top(self, k: int, masked: Jagged) -> np.ndarray:
        """Select the k best items of each prompt that are not masked [P, k]; -1 where none is left."""
        shared, items = self._shared, len(self._shared.score)
        hidden = self._find_masked_cells(masked)
        out = np.full((self._prompts, k), -1, np.int64)
        cuts = np.arange(self._prompts + 1) * items
        own, gone = np.searchsorted(self._cell, cuts), np.searchsorted(hidden, cuts)
        for row in range(self._prompts):
            voted = self._cell[own[row] : own[row + 1]] - row * items
            score = self._score[own[row] : own[row + 1]]
            barred = hidden[gone[row] : gone[row + 1]] - row * items
            first = shared.order[: k + len(voted) + len(barred)]
            first = first[~np.isin(first, np.concatenate([voted, barred]))][:k]
            is_allowed = ~np.isin(voted, barred)
            item = np.concatenate([voted[is_allowed], first])
            score = np.concatenate([score[is_allowed], shared.score[first]])
            best = np.lexsort((shared.tie[item], -score))[:k]
            best = best[~np.isneginf(score[best])]
            out[row, : len(best)] = item[best]
        return out

    def _get_scores(self, cell: np.ndarray) -> np.ndarray:
        """Return the score of any cells."""
        score = self._shared.score[cell % len(self._shared.score)].copy()
        if len(self._cell):
            place = np.searchsorted(self._cell, cell).clip(max=len(self._cell) - 1)
            own = self._cell[place] == cell
            score[own] = self._score[place[own]]
        return score

    def _find_masked_cells(self, masked: Jagged) -> np.ndarray:
        """Return the distinct masked cells, ascending."""
        lengths = np.diff(np.asarray(masked.offsets, np.int64))
        prompt = np.repeat(np.arange(len(lengths)), lengths)
        return np.unique(prompt * len(self._shared.score) + np.asarray(masked.values))


def _is_before(score: np.ndarray, tie: np.ndarray, own: np.ndarray, own_tie: np.ndarray) -> np.ndarray:
    return (score > own) | ((score == own) & (tie < own_tie))

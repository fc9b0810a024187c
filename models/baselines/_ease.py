"""EASE: a linear model of items by items, in closed form.

    B = argmin |X - X B|^2 + l2 |B|^2 with diag(B) = 0 = I - P / diag(P),   P = (X'X + l2 I)^-1

X [U, I] is 1 where a user has an item in the training events. The score of an item is the sum of B over the items of the history
(Steck, "Embarrassingly shallow autoencoders for sparse data", WWW 2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from nonet.models.baselines._histories import (
    ChosenByValidation,
    list_prompt_items,
    list_user_items,
)
from nonet.ranges import expand_ranges
from nonet.samples.batches import split_by_size
from nonet.samples.sequences import TRAIN, Sequences

# Shapes: P prompts, I items, U users.
_L2 = (100.0, 20.0, 500.0, 4.0)
_CHUNK_PAIRS = 1 << 22  # Pairs of items of users that are counted at once.
_PART_PAIRS = 1 << 28  # Pairs of a part of the fit.


class Ease(ChosenByValidation):
    """Scores items by linear weights of the items of the history.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.
        l2: Weight of the squared weights in the loss; by default chosen by validation.

    Attributes:
        trained: The chosen weight.
    """

    name = "ease"

    def __init__(self, n_items: int, *, seed: int, l2: float | None = None):
        super().__init__(n_items, seed)
        self._choices = _L2 if l2 is None else (l2,)
        self._weights = np.zeros((0, 0), np.float32)

    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Solve for the weights on the given splits, and choose l2 by validation."""
        gram = np.zeros((self._n_items, self._n_items), np.float32)
        yield from _count_pairs(gram, *list_user_items(seq, self._n_items, splits))
        # A second matrix holds the weights of all l2 in turn, because each may have gigabytes.
        self._weights = np.empty_like(gram)

        def solve(l2: float) -> None:
            """Compute the weights with an l2."""
            _solve(gram, l2, out=self._weights)
            self.trained = {"l2": l2}

        l2, _ = yield from self._choose(self._choices, solve, seq, splits)
        if self.trained["l2"] != l2:
            solve(l2)

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute the scores of all items for each prompt, float32 [P, I]."""
        prompt, item, _ = list_prompt_items(seq, users, positions, self._n_items)
        scores = np.zeros((len(users), self._n_items), np.float32)
        starts = np.searchsorted(prompt, np.arange(len(users) + 1))
        for row in range(len(users)):
            self._weights[item[starts[row] : starts[row + 1]]].sum(0, out=scores[row])
        return scores


def _count_pairs(gram: np.ndarray, offsets: np.ndarray, items: np.ndarray) -> Iterator[None]:
    """Add the number of users that have both items of each pair, X'X, to a matrix [I, I], and yield after each part."""
    by_item = np.argsort(items, kind="stable")
    user = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[by_item]
    starts = np.searchsorted(items[by_item], np.arange(len(gram) + 1))
    n_pairs = np.diff(np.concatenate([[0], np.cumsum(np.diff(offsets)[user])])[starts])
    for part in split_by_size(n_pairs, _PART_PAIRS):
        for item in range(part.start, part.stop):
            users = user[starts[item] : starts[item + 1]]
            for chunk in split_by_size(np.diff(offsets)[users], _CHUNK_PAIRS):
                others, _ = expand_ranges(offsets[users[chunk]], offsets[users[chunk] + 1])
                gram[item] += np.bincount(items[others], minlength=len(gram))
        yield


def _solve(gram: np.ndarray, l2: float, out: np.ndarray) -> None:
    """Compute the weights B [I, I] float32 from X'X, without another matrix."""
    np.copyto(out, gram)
    matrix = torch.from_numpy(out)
    matrix.diagonal().add_(l2)
    # Columns are contiguous in the transposed view of the symmetric matrix, so that LAPACK needs no copy.
    torch.linalg.cholesky(matrix.mT, out=matrix.mT)
    torch.cholesky_inverse(matrix.mT, out=matrix.mT)
    matrix.div_(-matrix.diagonal().clone())  # column by column
    matrix.diagonal().zero_()

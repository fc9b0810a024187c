"""EASE: a linear model of items by items, in closed form.

    B = argmin |X - X B|^2 + l2 |B|^2 with diag(B) = 0 = I - P / diag(P),   P = (X'X + l2 I)^-1

X [U, I] is 1 where a user has an item in the training events. The score of an item is the sum of B over the items of the history
(Steck, "Embarrassingly shallow autoencoders for sparse data", WWW 2019).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from nonet.models.baselines._histories import (
    FittedInParts,
    compute_ndcg,
    draw_validation_events,
    list_prompt_items,
    list_user_items,
)
from nonet.ranges import expand_ranges
from nonet.samples.sequences import TRAIN, Sequences

# Shapes: P prompts, I items, U users.
_L2 = (100.0, 20.0, 500.0, 4.0)
_CHUNK_PAIRS = 1 << 22  # Pairs of items of users per chunk.


class Ease(FittedInParts):
    """Scores items by linear weights of the items of the history.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.
        l2: Weight of the squared weights in the loss; by default chosen by validation.

    Attributes:
        trained: The chosen weight.
    """

    def __init__(self, n_items: int, *, seed: int, l2: float | None = None):
        self._n_items, self._seed = n_items, seed
        self._choices = _L2 if l2 is None else (l2,)
        self._weights = np.zeros((0, 0), np.float32)
        self.trained: dict[str, Any] = {}

    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Solve for the weights on the given splits, and choose l2 by validation."""
        gram = _count_pairs(*list_user_items(seq, self._n_items, splits), self._n_items)
        yield
        users, positions = draw_validation_events(seq, splits, self._seed, "ease")
        best, best_weights = -1.0, self._weights
        for l2 in self._choices if len(users) else self._choices[:1]:
            self._weights = _solve(gram, l2)
            ndcg = compute_ndcg(partial(self.scores, seq), seq, users, positions, self._n_items)
            if ndcg > best:
                best, best_weights, self.trained = ndcg, self._weights, {"l2": l2}
            yield
        self._weights = best_weights

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute the scores of all items for each prompt, float32 [P, I]."""
        prompt, item, _ = list_prompt_items(seq, users, positions, self._n_items)
        scores = np.zeros((len(users), self._n_items), np.float32)
        starts = np.searchsorted(prompt, np.arange(len(users) + 1))
        for row in range(len(users)):
            self._weights[item[starts[row] : starts[row + 1]]].sum(0, out=scores[row])
        return scores


def _count_pairs(offsets: np.ndarray, items: np.ndarray, n_items: int) -> np.ndarray:
    """Count the users that have both items of a pair, X'X [I, I] float32."""
    gram = np.zeros((n_items, n_items), np.float32)
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    ends = np.cumsum(np.diff(offsets)[owner])  # of the pairs of each item with the items of its user
    cuts = np.searchsorted(ends, np.arange(0, ends[-1] if len(ends) else 0, _CHUNK_PAIRS))
    for start, stop in itertools.pairwise([*cuts, len(items)]):
        other, pair_offsets = expand_ranges(offsets[owner[start:stop]], offsets[owner[start:stop] + 1])
        np.add.at(gram, (np.repeat(items[start:stop], np.diff(pair_offsets)), items[other]), 1.0)
    return gram


def _solve(gram: np.ndarray, l2: float) -> np.ndarray:
    """Compute the weights B [I, I] float32 from X'X."""
    matrix = torch.from_numpy(gram.copy())
    matrix.diagonal().add_(l2)
    torch.linalg.cholesky(matrix, out=matrix)  # in place, because the matrix may have gigabytes
    torch.cholesky_inverse(matrix, out=matrix)
    matrix.div_(-matrix.diagonal().clone())  # column by column
    matrix.diagonal().zero_()
    return matrix.numpy()

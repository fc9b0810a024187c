"""Item KNN and iALS by the library implicit (`pip install 'nonet[baselines]'`).

Item KNN sums the similarities of an item with the items of the history, each of which keeps its nearest neighbours; validation
chooses the cosine of the columns of users by items as they are, with TF-IDF or with BM25. iALS factorises the same matrix with a
confidence of alpha for what a user has (Hu, Koren and Volinsky, "Collaborative filtering for implicit feedback datasets", ICDM),
and it solves for the vector of each prompt from the items of its history. Validation chooses alpha and the regularization.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from implicit.als import AlternatingLeastSquares
from implicit.nearest_neighbours import BM25Recommender, CosineRecommender, TFIDFRecommender
from implicit.utils import ParameterWarning
from scipy.sparse import csr_matrix
from threadpoolctl import threadpool_limits

from nonet.models.baselines._histories import (
    FittedInParts,
    compute_ndcg,
    draw_validation_events,
    list_prompt_items,
    list_user_items,
)
from nonet.models.baselines.kinds import Popularity, SparseVotes, score_all_items
from nonet.ranges import expand_ranges
from nonet.samples.sequences import TRAIN, Sequences

# Shapes: P prompts, I items.
_WEIGHTINGS: dict[str, Callable[..., Any]] = {
    "cosine": CosineRecommender,
    "tf-idf": TFIDFRecommender,
    "bm25": BM25Recommender,
}
_ALS_TRIALS = ((10.0, 0.1), (1.0, 0.01), (40.0, 1.0), (10.0, 3.0))  # alpha and regularization
_PRIOR = 1e-9  # Weight of popularity, which is scaled to a maximum of 1; below any similarity.


class ItemKnn(FittedInParts):
    """Scores items by their similarity with the items of the history.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.
        neighbours: Number of most similar items of an item.

    Attributes:
        trained: The weighting that validation has chosen.
    """

    def __init__(self, n_items: int, *, seed: int, neighbours: int = 100):
        self._n_items, self._seed, self._n_neighbours = n_items, seed, neighbours
        self._popularity = Popularity(n_items)
        self._similarity: Any = csr_matrix((n_items, n_items), dtype=np.float32)
        self.trained: dict[str, Any] = {}

    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Find the neighbours of each item in the given splits, and choose the weighting by validation."""
        self._popularity.fit(seq, splits)
        matrix = _make_matrix(seq, self._n_items, splits)
        users, positions = draw_validation_events(seq, splits, self._seed, "item_knn")
        best, best_similarity = -1.0, self._similarity
        for name, recommender_class in list(_WEIGHTINGS.items())[: None if len(users) else 1]:
            # One more, because an item is its own neighbour.
            recommender = recommender_class(K=self._n_neighbours + 1, num_threads=1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ParameterWarning)  # of a conversion within the library
                recommender.fit(matrix, show_progress=False)
            self._similarity = recommender.similarity.tocsr()
            ndcg = compute_ndcg(partial(self.scores, seq), seq, users, positions, self._n_items)
            if ndcg > best:
                best, best_similarity, self.trained = ndcg, self._similarity, {"weighting": name}
            yield
        self._similarity = best_similarity

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute the scores of all items for each prompt, float32 [P, I]."""
        return score_all_items(self, self._n_items, seq, users, positions)

    def votes(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> SparseVotes:
        """Compute the similarities with the items of each prompt; the popularity is the prior of all items."""
        prompt, item, _ = list_prompt_items(seq, users, positions, self._n_items)
        starts = self._similarity.indptr.astype(np.int64)
        index, offsets = expand_ranges(starts[item], starts[item + 1])
        pair = np.repeat(prompt, np.diff(offsets)) * self._n_items + self._similarity.indices[index]
        cell, cell_index = np.unique(pair, return_inverse=True)
        weight = np.bincount(cell_index, weights=self._similarity.data[index], minlength=len(cell))
        return SparseVotes(
            self._popularity.make_prior(_PRIOR), cell // self._n_items, cell % self._n_items, weight
        )


class Ials(FittedInParts):
    """Scores items by the product of their vectors with that of the history.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, of the first vectors and of the validation events.
        factors: Width of the vectors.
        iterations: Number of times that the vectors of users and items are solved for.

    Attributes:
        trained: alpha and the regularization, which validation has chosen.
    """

    def __init__(self, n_items: int, *, seed: int, factors: int = 64, iterations: int = 15):
        self._n_items, self._seed = n_items, seed
        self._factors, self._iterations = factors, iterations
        self._model: Any = None
        self.trained: dict[str, Any] = {}

    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Factorise the given splits, and choose alpha and the regularization by validation."""
        matrix = _make_matrix(seq, self._n_items, splits)
        users, positions = draw_validation_events(seq, splits, self._seed, "ials")
        best, best_model = -1.0, None
        for alpha, regularization in _ALS_TRIALS if len(users) else _ALS_TRIALS[:1]:
            with threadpool_limits(1, "blas"):  # implicit's own threads divide the rows
                self._model = AlternatingLeastSquares(
                    factors=self._factors,
                    iterations=self._iterations,
                    alpha=alpha,
                    regularization=regularization,
                    random_state=self._seed,
                    use_gpu=False,
                )
                self._model.fit(matrix, show_progress=False)
            ndcg = compute_ndcg(partial(self.scores, seq), seq, users, positions, self._n_items)
            if ndcg > best:
                best, best_model = ndcg, self._model
                self.trained = {"alpha": alpha, "regularization": regularization}
            yield
        self._model = best_model

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute the scores of all items for each prompt, float32 [P, I]."""
        prompt, item, _ = list_prompt_items(seq, users, positions, self._n_items)
        shape = len(users), self._n_items
        seen = csr_matrix((np.ones(len(item), np.float32), (prompt, item)), shape=shape)
        with threadpool_limits(1, "blas"):
            vectors = self._model.recalculate_user(np.arange(len(users)), seen)
        return np.asarray(vectors @ self._model.item_factors.T, np.float32)


def _make_matrix(seq: Sequences, n_items: int, splits: Sequence[int]) -> Any:
    """Return a sparse matrix [U, I] float32 with 1 where a user has an item."""
    offsets, items = list_user_items(seq, n_items, splits)
    return csr_matrix((np.ones(len(items), np.float32), items, offsets), shape=(len(seq), n_items))

"""Item KNN and iALS by the library implicit (`pip install 'nonet[baselines]'`).

Item KNN sums the similarities of an item with the items of the history, each of which keeps its nearest neighbours; validation
chooses the cosine of the columns of users by items as they are, with TF-IDF or with BM25. iALS factorises the same matrix with a
confidence of alpha for what a user has (Hu, Koren and Volinsky, "Collaborative filtering for implicit feedback datasets", ICDM),
and it solves for the vector of each prompt from the items of its history. Validation chooses alpha and the regularization.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from implicit.als import AlternatingLeastSquares
from implicit.nearest_neighbours import ItemItemRecommender, bm25_weight, normalize, tfidf_weight
from implicit.utils import ParameterWarning
from scipy.sparse import csr_matrix
from threadpoolctl import threadpool_limits

from nonet.models.baselines._histories import (
    ChosenByValidation,
    list_prompt_items,
    list_user_items,
)
from nonet.models.baselines.kinds import Popularity, SparseVotes, score_all_items, sum_votes
from nonet.samples.sequences import TRAIN, Sequences

# Shapes: U users, P prompts, I items.
_WEIGHTINGS: dict[str, Callable[[Any], Any]] = {  # of items by users [I, U]
    "cosine": normalize,
    "tf-idf": lambda matrix: normalize(tfidf_weight(matrix)),
    "bm25": lambda matrix: bm25_weight(matrix, K1=1.2, B=0.75),  # pyright: ignore[reportArgumentType]  no int
}
_ALS_TRIALS = ((10.0, 0.1), (1.0, 0.01), (40.0, 1.0), (10.0, 3.0))  # alpha and regularization
_PRIOR = 1e-9  # Weight of popularity, which is scaled to a maximum of 1; below any similarity.


class ItemKnn(ChosenByValidation):
    """Scores items by their similarity with the items of the history.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.
        neighbours: Number of most similar items of an item.

    Attributes:
        trained: The weighting that validation has chosen.
    """

    name = "item_knn"

    def __init__(self, n_items: int, *, seed: int, neighbours: int = 100):
        super().__init__(n_items, seed)
        self._n_neighbours, self._popularity = neighbours, Popularity(n_items)
        self._similarity: Any = None

    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Find the neighbours of each item in the given splits, and choose the weighting by validation."""
        self._popularity.fit(seq, splits)
        matrix = _make_matrix(seq, self._n_items, splits)

        def fit(weighting: str) -> Any:
            with np.errstate(invalid="ignore"):  # of weights that are replaced
                weighted = _WEIGHTINGS[weighting](matrix.T)
            self._similarity = _find_neighbours(weighted, self._n_neighbours)
            return self._similarity

        weighting, self._similarity = yield from self._choose(list(_WEIGHTINGS), fit, seq, splits)
        self.trained = {"weighting": weighting}

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute the scores of all items for each prompt, float32 [P, I]."""
        return score_all_items(self, self._n_items, seq, users, positions)

    def votes(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> SparseVotes:
        """Compute the similarities with the items of each prompt; the popularity is the prior of all items."""
        prompt, item, _ = list_prompt_items(seq, users, positions, self._n_items)
        starts, similarity = self._similarity.indptr.astype(np.int64), self._similarity.data
        return sum_votes(
            self._popularity.make_prior(_PRIOR),
            (prompt, starts[item], starts[item + 1]),
            len(users),
            self._similarity.indices,
            lambda index, _: similarity[index],
        )


class Ials(ChosenByValidation):
    """Scores items by the product of their vectors with that of the history.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, of the first vectors and of the validation events.
        factors: Width of the vectors.
        iterations: Number of times that the vectors of users and items are solved for.

    Attributes:
        trained: alpha and the regularization, which validation has chosen.
    """

    name = "ials"

    def __init__(self, n_items: int, *, seed: int, factors: int = 64, iterations: int = 15):
        super().__init__(n_items, seed)
        self._factors, self._iterations = factors, iterations
        self._model: Any = None

    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Factorise the given splits, and choose alpha and the regularization by validation."""
        matrix = _make_matrix(seq, self._n_items, splits)

        def fit(trial: tuple[float, float]) -> Any:
            with threadpool_limits(1, "blas"):  # implicit's own threads divide the rows
                self._model = AlternatingLeastSquares(
                    factors=self._factors,
                    iterations=self._iterations,
                    alpha=trial[0],
                    regularization=trial[1],
                    random_state=self._seed,
                    use_gpu=False,
                )
                self._model.fit(matrix, show_progress=False)
            return self._model

        trial, self._model = yield from self._choose(_ALS_TRIALS, fit, seq, splits)
        self.trained = {"alpha": trial[0], "regularization": trial[1]}

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


def _find_neighbours(weighted: Any, n_neighbours: int) -> Any:
    """Return the similarities of the most similar items of each item [I, I], sparse, from weights of items by users [I, U]."""
    # One more, because an item is its own neighbour.
    recommender: Any = ItemItemRecommender(K=n_neighbours + 1, num_threads=1)
    # TF-IDF weighs users with all items but one by 0, and an item that has no others is then divided by 0.
    weighted.data = np.nan_to_num(weighted.data, copy=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ParameterWarning)  # of a conversion within the library
        recommender.fit(weighted.T, show_progress=False)
    return recommender.similarity.tocsr()

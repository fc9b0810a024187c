"""A ranker of clicks: the attention of an item over a user's history, as in Deep Interest Network (arXiv 1706.06978)."""

import json
from pathlib import Path

import numpy as np

import nonet


class RankModel(nonet.Reward):
    """The probability of a click on each item by a trained ranker.

    Args:
        model: A folder with `din.json`: the ids and vectors of the items, a bias and the weight of the logarithm of a price.
    """

    columns = ["price"]

    def __init__(self, model: str):
        self._folder = Path(model)

    def setup(self):
        """Read the model. It is called once in each worker."""
        din = json.loads((self._folder / "din.json").read_text())
        self._row_by_item = {item: row for row, item in enumerate(din["items"])}
        # The last row stands for items that the model does not know.
        self._vectors = np.vstack(
            [np.asarray(din["vectors"], np.float32), np.zeros(len(din["vectors"][0]), np.float32)]
        )
        self._bias, self._price_weight = float(din["bias"]), float(din["price_weight"])

    def _find_vectors(self, items):
        """Return the vectors of items of any shape."""
        rows = [self._row_by_item.get(int(item), -1) for item in items.ravel()]
        return self._vectors[rows].reshape(*items.shape, -1)

    def score(self, r):
        """Return the probabilities [U, W]."""
        logits = np.full(r.item_id.shape, self._bias)
        candidates = self._find_vectors(r.item_id)
        for user in range(len(logits)):
            history = self._find_vectors(np.asarray(r.history[user]))
            if len(history):
                similarity = candidates[user] @ history.T
                weights = np.exp(similarity - similarity.max(1, keepdims=True))
                interest = weights / weights.sum(1, keepdims=True) @ history
                logits[user] += (candidates[user] * interest).sum(1)
        price = np.nan_to_num(r["price"], nan=1.0)
        return 1 / (1 + np.exp(-(logits + self._price_weight * np.log(np.maximum(price, 1e-3)))))

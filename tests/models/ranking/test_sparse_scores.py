"""Scores that are sparse are ranked and listed as the dense ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nonet.models.generation.exhaustive import select_top_items
from nonet.models.ranking.metrics import make_tie_order, rank_of_target_np
from nonet.models.ranking.sparse_scores import SharedScores, SparseScores
from nonet.types import Jagged

P, ITEMS = 40, 60


@pytest.mark.parametrize("seed", range(5))
def test_sparse_scores_rank_and_list_as_the_dense_ones(seed):
    dice = np.random.default_rng(seed)
    prior = dice.integers(0, 4, ITEMS).astype(np.float32)  # many equals
    prior[dice.random(ITEMS) < 0.1] = -np.inf
    dense = np.tile(prior, (P, 1))
    cell = np.unique(dice.integers(0, P * ITEMS, 300))
    score = dice.integers(0, 6, len(cell)).astype(np.float32)
    dense.reshape(-1)[cell] = score
    hidden = dice.integers(0, 8, P)
    masked = Jagged(dice.integers(0, ITEMS, hidden.sum()), np.concatenate([[0], np.cumsum(hidden)]))
    tie = make_tie_order(dice.integers(0, 5, ITEMS), seed)
    target = dice.integers(0, ITEMS, P)
    sparse = SparseScores(P, SharedScores(prior, tie), cell // ITEMS, cell % ITEMS, score)
    np.testing.assert_array_equal(
        sparse.compute_ranks(target, masked), rank_of_target_np(dense, target, masked, tie)
    )
    wanted = select_top_items(torch.from_numpy(dense), 10, masked, tie).numpy()
    np.testing.assert_array_equal(sparse.select_top(10, masked), wanted)

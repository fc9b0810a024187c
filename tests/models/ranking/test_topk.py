"""The k largest, with ties decided by index alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nonet.errors import DataError
from nonet.models.ranking.topk import select_top_k
from nonet.random import rng


def test_top_k_equals_a_stable_sort_whatever_the_ties():
    for case in range(200):
        generator = rng(1, "topk", case)
        users, size = int(generator.integers(1, 5)), int(generator.integers(1, 40))
        k = int(generator.integers(1, 45))
        scores = generator.integers(0, 6, (users, size)).astype(np.float32)
        scores[generator.random(scores.shape) < 0.3] = -np.inf
        expected = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        values, index = select_top_k(torch.from_numpy(scores), k)
        assert index.tolist() == expected.tolist()
        assert values.tolist() == np.take_along_axis(scores, expected, 1).tolist()


@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_nan_is_refused_and_its_row_named(k):
    scores = torch.tensor([[1.0, 2.0, 3.0], [1.0, torch.nan, 3.0]])
    with pytest.raises(DataError, match="NaN for 1 of 2 prompts, the first is row 1"):
        select_top_k(scores, k)

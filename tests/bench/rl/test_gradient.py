"""The gradient audit finds what is biased and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.bench.rl.estimators import ESTIMATORS, compute_coefficients
from nonet.bench.rl.picture import draw_picture

CHANCE = np.array([[0.4, 0.2, 0.15, 0.1, 0.1, 0.05], [0.3, 0.3, 0.1, 0.1, 0.1, 0.1]])
REWARD = np.array([[0.0, 1.0, 0.2, 0.0, 0.5, 2.0], [1.0, 0.0, 0.0, 0.3, 0.0, 0.0]])
EXACT = CHANCE * (REWARD - (CHANCE * REWARD).sum(1, keepdims=True))


def _gradient(estimator):
    """By the logits of a softmax: what items count, less what they count together times their chance."""
    count = compute_coefficients(estimator, CHANCE, REWARD, 4, 40_000, seed=1)
    return count - CHANCE * count.sum(1, keepdims=True)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda each: each.title)
def test_rloo_is_the_exact_gradient_however_it_draws_and_top_beams_are_not(estimator):
    apart = np.linalg.norm(_gradient(estimator) - EXACT) / np.linalg.norm(EXACT)
    if estimator.algorithm == "rloo":
        assert apart < 0.04  # 40,000 groups know it to about 0.01
    else:
        assert apart > 0.1


def test_the_picture_has_a_bar_a_row():
    rows = [{"estimator": "a & b", "W": 4, "cosine": 0.5}]
    text = draw_picture(rows, [{"algorithm": "c", "share of the ceiling": -0.1}])
    assert text.count("<rect") == 3
    assert "a &amp; b, W = 4" in text
    assert 'width="150.0"' in text

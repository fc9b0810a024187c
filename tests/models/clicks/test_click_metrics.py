"""AUC, log loss and their paired differences."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.errors import ConfigError, DataError
from nonet.models.clicks.metrics import auc, check_metric, compare_clicks, log_losses, summarise_clicks
from nonet.random import rng


def slow_auc(score, label):
    pairs = [(a > b) + 0.5 * (a == b) for a in score[label > 0] for b in score[label == 0]]
    return sum(pairs) / len(pairs)


def test_auc_is_the_share_of_ordered_pairs_and_ties_count_half():
    draw = rng(1, "auc")
    score, label = draw.integers(0, 12, 200) / 12, draw.integers(0, 2, 200)
    assert auc(score, label) == pytest.approx(slow_auc(score, label), abs=1e-12)
    assert auc(np.zeros(4), np.array([0, 1, 0, 1])) == 0.5


def test_log_loss_is_that_of_torch():
    import torch

    chance, label = rng(1, "chance").random(50), rng(1, "label").integers(0, 2, 50)
    expected = torch.nn.functional.binary_cross_entropy(
        torch.from_numpy(chance), torch.from_numpy(label).double()
    )
    assert summarise_clicks(chance, label)["log_loss"] == pytest.approx(float(expected), abs=1e-12)
    assert np.isfinite(log_losses(np.array([0.0, 1.0]), np.array([1, 0]))).all()


def test_a_bootstrap_weighting_is_the_auc_of_the_repeated_rows():
    from nonet.models.clicks.metrics import _compute_weighted_aucs

    draw = rng(3, "weights")
    score, label, times = draw.integers(0, 9, 60) / 9, draw.integers(0, 2, 60), draw.integers(0, 4, 60)
    repeated = slow_auc(np.repeat(score, times), np.repeat(label, times))
    assert _compute_weighted_aucs(score, label, times[None].astype(float))[0] == pytest.approx(
        repeated, abs=1e-12
    )


def test_a_better_model_differs_significantly_and_a_noisy_copy_does_not():
    draw = rng(5, "models")
    user, truth = np.repeat(np.arange(200), 10), draw.random(2000)
    label = draw.random(2000) < truth
    better = compare_clicks(truth, np.full(2000, 0.5), label, user, 7, 300)
    assert better["auc"]["low"] > 0
    assert better["log_loss"]["high"] < 0
    copy = np.clip(truth + draw.normal(0, 1e-4, 2000), 0, 1)
    same = compare_clicks(truth, copy, label, user, 7, 300)
    assert same["auc"]["low"] <= 0 <= same["auc"]["high"]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(DataError, match="same"):
        auc(np.array([0.1, 0.2]), np.array([1, 1]))
    with pytest.raises(DataError, match="1 of 2"):
        auc(np.array([0.1, np.nan]), np.array([0, 1]))
    with pytest.raises(ConfigError, match=r"'acu'.*auc"):
        check_metric("acu")

"""AUC, log loss and their paired differences."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.errors import ConfigError, DataError
from nonet.models.clicks.metrics import (
    auc,
    check_metric,
    compare_clicks,
    log_losses,
    measure_calibration,
    summarise_clicks,
)
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


def test_the_error_of_a_calibration_is_the_mean_distance_of_its_bins():
    chance = np.repeat(np.arange(20) / 20, 5)
    label = np.tile([1, 0, 0, 0, 0], 20)
    found = measure_calibration(chance, label)
    bins = [(chance[i : i + 10].mean(), label[i : i + 10].mean()) for i in range(0, 100, 10)]
    assert [row[:2] for row in found["bins"]] == [pytest.approx(pair) for pair in bins]
    assert [row[2] for row in found["bins"]] == [10] * 10
    assert found["error"] == pytest.approx(np.mean([abs(p - o) for p, o in bins]))
    assert (found["predicted"], found["observed"]) == (pytest.approx(0.475), pytest.approx(0.2))
    assert found["ratio"] == pytest.approx(0.475 / 0.2)


def test_rows_of_equal_probability_are_in_one_bin_whatever_their_order():
    chance = np.array([0.2] * 7 + [0.9] * 3)
    label = np.array([1, 0, 0, 0, 0, 0, 1, 1, 1, 0])
    order = rng(1, "order").permutation(10)
    for index in (np.arange(10), order):
        found = measure_calibration(chance[index], label[index])
        assert [row[2] for row in found["bins"]] == [7, 3]
    assert measure_calibration(np.array([0.4]), np.array([0]))["ratio"] is None


def test_resamples_without_a_click_are_left_out_of_the_interval():
    user, label = np.arange(12), np.array([1, 1] + [0] * 10)
    score = np.array([0.9, 0.4] + [0.5, 0.1] * 5)
    found = compare_clicks(score, np.full(12, 0.5), label, user, 7, 300)
    assert found["auc"]["diff"] == pytest.approx(slow_auc(score, label) - 0.5)
    assert -0.5 <= found["auc"]["low"] <= found["auc"]["diff"] <= found["auc"]["high"] <= 0.5


def test_a_metric_that_the_labels_do_not_define_is_null_and_not_compared():
    chance, user = np.array([0.1, 0.2]), np.arange(2)
    for label in (np.array([1, 1]), np.array([0, 0])):
        assert np.isnan(auc(chance, label))
        summary = summarise_clicks(chance, label)
        assert (summary["auc"], list(summary)) == (None, ["auc", "log_loss"])
        assert summary["log_loss"] == pytest.approx(log_losses(chance, label).mean())
        assert list(compare_clicks(chance, chance[::-1], label, user, 7, 10)) == ["log_loss"]
    empty = np.empty(0)
    assert summarise_clicks(empty, empty) == {"auc": None, "log_loss": None}
    assert compare_clicks(empty, empty, empty, empty, 7) == {}
    assert list(compare_clicks(chance, chance, np.array([0, 1]), user, 7, 10, ["auc"])) == ["auc"]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(DataError, match="1 of 2"):
        auc(np.array([0.1, np.nan]), np.array([0, 1]))
    with pytest.raises(ConfigError, match=r"'acu'.*auc"):
        check_metric("acu")

"""AUC, log loss and calibration of predicted clicks, and paired differences with an interval from resampling users.

AUC is the probability that a clicked row has a higher score than one without a click, where ties count half. The rows of all
users are pooled. A metric of a task is METRIC@TASK, such as auc@bought. AUC is not defined if all rows have the same label, and
no metric is defined without rows.
"""

# Shapes: P rows, S seeds, U users, R resamples, B bins.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nonet.errors import ConfigError, DataError
from nonet.random import rng
from nonet.suggest import join_names, suggest_sentence

METRICS = ("auc", "log_loss")
_BINS = 10  # Bins of a calibration.
_MIN_PROBABILITY = 1e-7  # Probabilities are limited to [1e-7, 1 - 1e-7], so that the log loss is finite.
_CHUNK_WEIGHTS = 4_000_000  # Weights (one per row and resample) that are computed at once.


def split_metric(name: str) -> tuple[str, str]:
    """Return the metric of a name, and its task; "" for the target of the stage."""
    metric, _, task = name.partition("@")
    return metric, task


def check_metric(name: str, tasks: Sequence[str] = ()) -> None:
    """Raise ConfigError unless the name is a metric of clicks, of the target or of one of the tasks."""
    names = (*METRICS, *(f"{metric}@{task}" for task in tasks for metric in METRICS))
    if name not in names:
        raise ConfigError(
            f"evaluate.metrics: {name!r} does not measure clicks; there are {join_names(names)}."
            f"{suggest_sentence(name, names)}"
        )


def is_defined(metric: str, label_P: np.ndarray) -> bool:
    """Return whether a metric is defined for rows with these labels: AUC compares clicked rows with others."""
    clicked = np.asarray(label_P) > 0
    return bool(clicked.any() and not clicked.all()) if metric == "auc" else len(clicked) > 0


def auc(score_P: np.ndarray, label_P: np.ndarray) -> float:
    """Compute the AUC in [0, 1]; NaN if all labels are the same."""
    return float(_compute_weighted_aucs(score_P, label_P, np.ones((1, len(score_P))))[0])


def log_losses(chance_P: np.ndarray, label_P: np.ndarray) -> np.ndarray:
    """Compute the log loss of each row [P] in nats."""
    probability = np.clip(np.asarray(chance_P, np.float64), _MIN_PROBABILITY, 1 - _MIN_PROBABILITY)
    return -np.where(np.asarray(label_P) > 0, np.log(probability), np.log1p(-probability))


def summarise_clicks(
    chance_P: np.ndarray, label_P: np.ndarray, metrics: Sequence[str] = METRICS
) -> dict[str, float | None]:
    """Compute metrics: "auc", and "log_loss", the mean in nats. One that is not defined for these labels is None."""
    return {
        metric: _compute_metric(metric, chance_P, label_P) if is_defined(metric, label_P) else None
        for metric in metrics
    }


def _compute_metric(metric: str, chance_P: np.ndarray, label_P: np.ndarray) -> float:
    """Compute a metric that is defined for these labels."""
    return auc(chance_P, label_P) if metric == "auc" else float(log_losses(chance_P, label_P).mean())


def measure_calibration(chance_P: np.ndarray, label_P: np.ndarray) -> dict[str, Any]:
    """Measure how well predicted probabilities agree with the observed rates of clicks.

    Rows are sorted by their probability and divided into at most 10 bins of equally many rows; rows of equal probability stay in
    one bin. The error is the mean distance between the mean probability and the rate of a bin, weighted by its rows (expected
    calibration error with adaptive bins; Nixon et al., CVPR Workshops 2019).

    Args:
        chance_P: Predicted probabilities.
        label_P: Labels, 1 or 0.

    Returns:
        {"rows": P, "predicted": mean probability, "observed": rate of clicks, "ratio": predicted / observed, None without clicks,
        "error": the error, "bins": [[mean probability, rate, rows], ...]}.
    """
    chance, clicked = np.asarray(chance_P, np.float64), np.asarray(label_P) > 0
    order = np.argsort(chance, kind="stable")
    ranks = np.searchsorted(chance[order], chance)  # Rows of equal probability have the same rank.
    bin_P = ranks * _BINS // max(1, len(chance))
    rows_B = np.bincount(bin_P, minlength=_BINS)
    sums_B = [np.bincount(bin_P, values, _BINS) for values in (chance, clicked)]
    has_rows = rows_B > 0
    rows_B = rows_B[has_rows]
    predicted_B, observed_B = (sums[has_rows] / rows_B for sums in sums_B)
    predicted, observed = float(chance.mean()), float(clicked.mean())
    return {
        "rows": len(chance),
        "predicted": predicted,
        "observed": observed,
        "ratio": predicted / observed if observed else None,
        "error": float(np.abs(predicted_B - observed_B) @ rows_B / len(chance)),
        "bins": [
            [float(p), float(o), int(n)] for p, o, n in zip(predicted_B, observed_B, rows_B, strict=True)
        ],
    }


def compare_clicks(
    a: np.ndarray,
    b: np.ndarray,
    label_P: np.ndarray,
    user_P: np.ndarray,
    seed: int,
    resamples: int = 2000,
    metrics: Sequence[str] = METRICS,
) -> dict[str, dict[str, float]]:
    """Compare two models' click metrics on the same rows, with a paired bootstrap over users.

    Args:
        a: Predicted probabilities of the first model [P], or [S, P] of S seeds, whose metrics are averaged.
        b: Those of the second model.
        label_P: Labels of the rows.
        user_P: Users of the rows.
        seed: Seed of the bootstrap.
        resamples: Number of resamples of the users.
        metrics: The metrics that are compared.

    Returns:
        For each of `metrics` that is defined for these labels, the difference a - b, "diff", and the limits "low" and "high" of
        its 95 % interval.
    """
    metrics = [metric for metric in metrics if is_defined(metric, label_P)]
    if not metrics:
        return {}
    a_SP, b_SP = np.atleast_2d(a), np.atleast_2d(b)
    _, user_index = np.unique(user_P, return_inverse=True)
    n_users, generator = int(user_index.max()) + 1, rng(seed, "bootstrap")
    losses = (log_losses(a_SP, label_P) - log_losses(b_SP, label_P)).mean(0)
    differences: dict[str, list[np.ndarray]] = {metric: [] for metric in metrics}
    chunk_resamples = max(1, _CHUNK_WEIGHTS // len(user_index))
    for start in range(0, resamples, chunk_resamples):
        n_resamples = min(chunk_resamples, resamples - start)
        user_RU = generator.integers(0, n_users, (n_resamples, n_users))
        times_drawn_RU = np.zeros((n_resamples, n_users))
        np.add.at(times_drawn_RU, (np.arange(n_resamples)[:, None], user_RU), 1.0)
        weight_RP = times_drawn_RU[:, user_index]
        if "auc" in differences:
            differences["auc"].append(_compute_auc_differences(a_SP, b_SP, label_P, weight_RP))
        if "log_loss" in differences:
            differences["log_loss"].append(weight_RP @ losses / weight_RP.sum(1))
    compared = {}
    for metric, parts in differences.items():
        # A resample of few clicks may have none, so that it has no AUC and is left out.
        low, high = np.nanquantile(np.concatenate(parts), [0.025, 0.975])
        difference = losses.mean()
        if metric == "auc":
            (difference,) = _compute_auc_differences(a_SP, b_SP, label_P, np.ones((1, len(label_P))))
        compared[metric] = {"diff": float(difference), "low": float(low), "high": float(high)}
    return compared


def _compute_auc_differences(
    a_SP: np.ndarray, b_SP: np.ndarray, label_P: np.ndarray, weight_RP: np.ndarray
) -> np.ndarray:
    """Compute the mean over seeds of the AUC of `a` minus that of `b`, [R] for R weightings of the rows."""
    differences_SR = [
        _compute_weighted_aucs(a, label_P, weight_RP) - _compute_weighted_aucs(b, label_P, weight_RP)
        for a, b in zip(a_SP, b_SP, strict=True)
    ]
    return np.mean(differences_SR, 0)


def _compute_weighted_aucs(score_P: np.ndarray, label_P: np.ndarray, weight_RP: np.ndarray) -> np.ndarray:
    """Compute the AUC [R] for R weightings of the rows, NaN where all rows with a weight have one label; sort the rows once."""
    score = np.asarray(score_P, np.float64)
    if not np.isfinite(score).all():
        raise DataError(f"{(~np.isfinite(score)).sum()} of {len(score)} predicted clicks are not finite")
    order = np.argsort(score, kind="stable")
    first_of_score = np.flatnonzero(np.r_[True, np.diff(score[order]) > 0])
    clicked = np.asarray(label_P)[order] > 0
    weight = weight_RP[:, order]
    clicked_weight = np.add.reduceat(weight * clicked, first_of_score, axis=1)
    other_weight = np.add.reduceat(weight * ~clicked, first_of_score, axis=1)
    lower_other_weight = np.cumsum(other_weight, axis=1) - other_weight
    pair_weight_R = clicked_weight.sum(1) * other_weight.sum(1)
    ordered_weight_R = (clicked_weight * (lower_other_weight + 0.5 * other_weight)).sum(1)
    return np.where(pair_weight_R > 0, ordered_weight_R / np.maximum(pair_weight_R, 1e-300), np.nan)

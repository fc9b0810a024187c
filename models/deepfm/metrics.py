"""AUC and log loss of predicted clicks, and paired differences with an interval from resampling users.

AUC is the probability that a clicked row has a higher score than another one, with ties counting half. All users are pooled.
"""

# Shapes: P rows, U users, R resamples.

from __future__ import annotations

import numpy as np

from nonet.errors import ConfigError, DataError
from nonet.random import rng
from nonet.suggest import join_names, suggest_sentence

METRICS = ("auc", "log_loss")
_LEAST = 1e-7
_CHUNK = 4_000_000


def check_metric(name: str) -> None:
    """Raise ConfigError unless the name is a metric of clicks."""
    if name not in METRICS:
        raise ConfigError(
            f"evaluate.metrics: {name!r} does not measure clicks; there are {join_names(METRICS)}."
            f"{suggest_sentence(name, METRICS)}"
        )


def auc(score_P: np.ndarray, label_P: np.ndarray) -> float:
    """Compute the AUC in [0, 1].

    Raises:
        DataError: All labels are the same.
    """
    return float(_compute_weighted_aucs(score_P, label_P, np.ones((1, len(score_P))))[0])


def log_losses(chance_P: np.ndarray, label_P: np.ndarray) -> np.ndarray:
    """Compute the log loss of each row [P] in nats."""
    chance = np.clip(np.asarray(chance_P, np.float64), _LEAST, 1 - _LEAST)
    return -np.where(np.asarray(label_P) > 0, np.log(chance), np.log1p(-chance))


def summarise_clicks(chance_P: np.ndarray, label_P: np.ndarray) -> dict[str, float]:
    """Compute {"auc", "log_loss"}."""
    return {
        "auc": auc(chance_P, label_P),
        "log_loss": float(log_losses(chance_P, label_P).mean()),
    }


def compare_clicks(
    a: np.ndarray, b: np.ndarray, label_P: np.ndarray, user_P: np.ndarray, seed: int, resamples: int = 2000
) -> dict[str, dict[str, float]]:
    """Compare two models' click metrics on the same rows, with a paired bootstrap over users.

    `a` and `b` are probabilities [P]. Returns for each metric diff, low and high of a - b; the interval is 95 %.
    """
    _, place = np.unique(user_P, return_inverse=True)
    users, draw = int(place.max()) + 1, rng(seed, "bootstrap")
    losses = log_losses(a, label_P) - log_losses(b, label_P)
    differences: dict[str, list[np.ndarray]] = {"auc": [], "log_loss": []}
    some = max(1, _CHUNK // len(place))
    for start in range(0, resamples, some):
        count = min(some, resamples - start)
        drawn = draw.integers(0, users, (count, users))
        times = np.zeros((count, users))
        np.add.at(times, (np.arange(count)[:, None], drawn), 1.0)
        weight_RP = times[:, place]
        differences["auc"].append(
            _compute_weighted_aucs(a, label_P, weight_RP) - _compute_weighted_aucs(b, label_P, weight_RP)
        )
        differences["log_loss"].append(weight_RP @ losses / weight_RP.sum(1))
    estimates = {"auc": auc(a, label_P) - auc(b, label_P), "log_loss": float(losses.mean())}
    bounds = {name: np.quantile(np.concatenate(parts), [0.025, 0.975]) for name, parts in differences.items()}
    return {
        name: {"diff": estimates[name], "low": float(low), "high": float(high)}
        for name, (low, high) in bounds.items()
    }


def _compute_weighted_aucs(score_P: np.ndarray, label_P: np.ndarray, weight_RP: np.ndarray) -> np.ndarray:
    """Compute the AUC [R] for R weightings of the rows with one sort."""
    score = np.asarray(score_P, np.float64)
    if not np.isfinite(score).all():
        raise DataError(f"{(~np.isfinite(score)).sum()} of {len(score)} predicted clicks are not finite")
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(score[order]) > 0])
    clicked = np.asarray(label_P)[order] > 0
    weight = weight_RP[:, order]
    yes = np.add.reduceat(weight * clicked, starts, axis=1)
    no = np.add.reduceat(weight * ~clicked, starts, axis=1)
    below = np.cumsum(no, axis=1) - no
    pairs = yes.sum(1) * no.sum(1)
    if not pairs.all():
        raise DataError("all labels are the same: AUC compares clicked rows with others")
    return (yes * (below + 0.5 * no)).sum(1) / pairs

"""Baselines of click models: the like rate of an item or of neighbours in graphs, and a logistic regression on the same features.

The regression is solved to convergence (L-BFGS, float64), and its L2 penalty is the best of five on validation rows. So if a
click model is better than the regression, the reason is interactions between features.
"""

# Shapes: P rows, C columns (one per key), Z non-zeros.

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.models.clicks.known_clicks import compute_rate
from nonet.samples.batches import ClickRows
from nonet.samples.sequences import TRAIN, VALID
from nonet.types import Jagged

CLICK_BASELINES, NEIGHBOURS = ("popularity", "logistic_regression"), "neighbours"
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0)  # L2 penalties that the regression tries.
_PRIOR_ROWS = 5.0  # Additional rows with the mean rate, by which an item's like rate is smoothed.


def predict_baseline(name: str, clicks: ClickRows, index: np.ndarray, fitted: ClickRows) -> np.ndarray:
    """Fit the baseline `name` on the TRAIN rows of `fitted`, and predict probabilities [P] for events [P] of `clicks`.

    Both have the same items. If no TRAIN row has a label, all probabilities are 0.5.
    """
    if not len(fitted.find_rows(TRAIN)):
        return np.full(len(index), compute_rate(fitted))
    if name == "popularity":
        return _estimate_like_rates(fitted, "item")[clicks.seq.item[index]]
    if name == NEIGHBOURS:
        return _average_like_rates(clicks, index, fitted)
    return LogisticRegression.fit(fitted).predict(clicks.batch(index))


def _estimate_like_rates(clicks: ClickRows, kind: str) -> np.ndarray:
    """Return the share of the TRAIN rows of each item [I] or user [U] that were liked, smoothed towards the mean rate."""
    rows, seq = clicks.find_rows(TRAIN), clicks.seq
    node, n_nodes = (seq.item, len(clicks.items.year)) if kind == "item" else (seq.user, len(seq))
    label = clicks.label[rows]
    total, liked = (np.bincount(node[rows], weights, minlength=n_nodes) for weights in (None, label))
    return (liked + _PRIOR_ROWS * compute_rate(clicks)) / (total + _PRIOR_ROWS)


def _average_like_rates(clicks: ClickRows, index: np.ndarray, fitted: ClickRows) -> np.ndarray:
    """Return the mean like rate of the drawn neighbours of events [P] in all graphs; the mean rate for events without any.

    The rates of items are those of `fitted`; the rates of users are of `clicks`, whose users they are.
    """
    seq, mean = clicks.seq, compute_rate(fitted)
    rates = {"item": _estimate_like_rates(fitted, "item"), "user": _estimate_like_rates(clicks, "user")}
    total, count = np.zeros(len(index)), np.zeros(len(index))
    found = seq.graphs.find_neighbours(
        list(seq.graphs.options), seq.user[index], seq.item[index], seq.time[index]
    )
    for neighbours in found.values():
        drawn = neighbours.drawn
        row = np.repeat(np.arange(len(index)), np.diff(drawn.offsets))
        total += np.bincount(row, rates[neighbours.kind][drawn.values], len(index))
        count += np.diff(drawn.offsets)
    return np.where(count > 0, total / np.maximum(count, 1), mean)


@dataclass(frozen=True)
class LogisticRegression:
    """Logistic regression with one weight per key; the ids of a bag are averaged, as in the click model.

    Attributes:
        keys: Ascending keys that have a weight, by feature.
        weight: Weights [C], feature by feature.
        bias: Bias of the logit.
        penalty: L2 penalty that was selected.
    """

    keys: Mapping[str, np.ndarray]
    weight: Tensor
    bias: float
    penalty: float

    @classmethod
    def fit(cls, clicks: ClickRows) -> LogisticRegression:
        """Fit on TRAIN rows with the penalty that has the least log loss on VALID rows; without VALID rows, the middle one."""
        train, valid = clicks.find_rows(TRAIN), clicks.find_rows(VALID)
        bags = clicks.batch(train)
        keys = {name: np.unique(bag.values.numpy()) for name, bag in bags.items()}
        matrix, label = _build_matrix(bags, keys), torch.from_numpy(clicks.label[train]).double()
        valid_matrix = _build_matrix(clicks.batch(valid), keys) if len(valid) else None
        valid_label = torch.from_numpy(clicks.label[valid]).double()
        best, best_loss, solution = None, float("inf"), torch.zeros(matrix.shape[1] + 1, dtype=torch.float64)
        # Large penalties are solved first: each solution is the start of the next.
        for penalty in sorted(PENALTIES, reverse=True) if valid_matrix is not None else PENALTIES[2:3]:
            solution = _solve(matrix, label, penalty, solution)
            fitted = cls(keys, solution[:-1].clone(), float(solution[-1]), penalty)
            loss = (
                0.0
                if valid_matrix is None
                else float(_compute_loss(valid_matrix @ fitted.weight + fitted.bias, valid_label))
            )
            if loss < best_loss:
                best, best_loss = fitted, loss
        assert best is not None
        return best

    def predict(self, bags: Mapping[str, Jagged]) -> np.ndarray:
        """Predict the probability [P] that each row is a click."""
        return torch.sigmoid(_build_matrix(bags, self.keys) @ self.weight + self.bias).numpy()


def _compute_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Compute the mean log loss in nats."""
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, label)


def _solve(matrix: Tensor, label: Tensor, penalty: float, start: Tensor) -> Tensor:
    """Minimise the L2-regularised log loss with L-BFGS; return the weights [C + 1], the bias last."""
    weights = start.clone()
    transposed = _to_csr(matrix.to_sparse_coo().t().coalesce())
    solver = torch.optim.LBFGS([weights], max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        logits = matrix @ weights[:-1] + weights[-1]
        error = (torch.sigmoid(logits) - label) / len(label)
        ridge = penalty / len(label) * weights[:-1]
        weights.grad = torch.cat([transposed @ error + ridge, error.sum()[None]])
        return _compute_loss(logits, label) + 0.5 * ridge @ weights[:-1]

    with torch.no_grad():
        solver.step(closure)  # type: ignore[arg-type]
    return weights.detach()


def _to_csr(matrix: Tensor) -> Tensor:
    """Convert to CSR without torch's warning that CSR is in beta; only products with vectors are computed."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Sparse CSR tensor support is in beta", category=UserWarning
        )
        return matrix.to_sparse_csr()


def _build_matrix(bags: Mapping[str, Jagged], keys: Mapping[str, np.ndarray]) -> Tensor:
    """Build the CSR matrix [P, C] of features: 1 / (number of ids in the bag) at each id that is among the keys, else 0."""
    rows, columns, values, n_columns, n_rows = [], [], [], 0, 0
    for name, table_keys in keys.items():
        ids, offsets = bags[name].values.numpy(), bags[name].offsets.numpy()
        lengths, n_rows = np.diff(offsets), len(offsets) - 1
        row = np.repeat(np.arange(n_rows), lengths)
        column = np.minimum(np.searchsorted(table_keys, ids), max(len(table_keys) - 1, 0))
        is_known = table_keys[column] == ids if len(table_keys) else np.zeros(len(ids), bool)
        rows.append(row[is_known])
        columns.append(column[is_known] + n_columns)
        values.append((1.0 / lengths[row])[is_known])
        n_columns += len(table_keys)
    indices: Any = np.stack([np.concatenate(rows), np.concatenate(columns)])
    matrix = torch.sparse_coo_tensor(
        torch.from_numpy(indices),
        torch.from_numpy(np.concatenate(values)),
        (n_rows, n_columns),
        check_invariants=False,
    )
    return _to_csr(matrix.coalesce())

"""One optimizer step on the rows that a batch touched.

Rows that were not touched do not move and their state does not age: Adam is lazy and counts steps for each
row. On touched rows sgd, adagrad and adam are torch's formulas; rowwise_adagrad (FBGEMM) keeps one number a
row, the running sum of mean squared gradients. Weight decay is decoupled (AdamW's) and falls on touched rows
only.
"""

# Shapes: N touched rows, D width, S numbers of optimizer state in a row.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nonet.errors import ConfigError

_BETA1, _BETA2 = 0.9, 0.999

# (rows [N, D], state [N, S], grads [N, D], lr, eps): rows and state change in place.
Rule = Callable[[np.ndarray, np.ndarray, np.ndarray, float, float], None]


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """A rule, the floats of state it keeps in a row of width D, and its usual eps."""

    name: str
    rule: Rule
    width_factor: int
    extra: int
    eps: float

    def state_width(self, dim: int) -> int:
        """S for rows of width `dim`."""
        return self.width_factor * dim + self.extra


def row_optimizer(name: str) -> RowOptimizer:
    """The optimizer of this name; ConfigError names the others."""
    try:
        return _OPTIMIZERS[name]
    except KeyError:
        known = ", ".join(_OPTIMIZERS)
        raise ConfigError(f"a sparse table has no optimizer {name!r}; choose one of: {known}") from None


def _sgd(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float, eps: float) -> None:
    rows -= np.float32(lr) * grads


def _adagrad(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float, eps: float) -> None:
    state += grads * grads
    rows -= np.float32(lr) * grads / (np.sqrt(state) + np.float32(eps))


def _rowwise_adagrad(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float, eps: float) -> None:
    state += np.mean(grads * grads, axis=1, keepdims=True)
    rows -= np.float32(lr) * grads / (np.sqrt(state) + np.float32(eps))


def _adam(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float, eps: float) -> None:
    dim = rows.shape[1]
    first, second, steps = state[:, :dim], state[:, dim : 2 * dim], state[:, 2 * dim :]
    steps += 1
    first += np.float32(1 - _BETA1) * (grads - first)
    second += np.float32(1 - _BETA2) * (grads * grads - second)
    steps_f64 = steps.astype(np.float64)
    step_size = (lr / (1 - _BETA1**steps_f64)).astype(np.float32)
    correction = np.sqrt(1 - _BETA2**steps_f64).astype(np.float32)
    rows -= step_size * first / (np.sqrt(second) / correction + np.float32(eps))


_OPTIMIZERS = {
    "sgd": RowOptimizer("sgd", _sgd, 0, 0, 0.0),
    "adagrad": RowOptimizer("adagrad", _adagrad, 1, 0, 1e-10),
    "rowwise_adagrad": RowOptimizer("rowwise_adagrad", _rowwise_adagrad, 0, 1, 1e-8),
    "adam": RowOptimizer("adam", _adam, 2, 1, 1e-8),
}

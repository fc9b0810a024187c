"""One optimizer step on the rows that a batch touched.

Rows that were not touched do not move and their state does not age: Adam is lazy and counts steps for each
row. On touched rows sgd, adagrad and adam are torch's formulas; rowwise_adagrad (FBGEMM) keeps one number a
row, the running sum of mean squared gradients; ftrl is McMahan's (KDD 2013). Weight decay is decoupled (AdamW's)
and falls on touched rows only; so adamw is adam under the name that people look for.

Every formula is written in the order of float32 operations that native/rules.h has, so that both give the same bits:
a sum over a row's width runs in 16 lanes that are added as a tree, powers are by squaring.
"""

# Shapes: N touched rows, D width, S numbers of optimizer state in a row.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nonet.errors import ConfigError

BETA1, BETA2 = 0.9, 0.999
LANES = 16


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The numbers of one step: learning rate, eps, decoupled weight decay, the most a gradient's norm may be, FTRL's."""

    lr: float
    eps: float
    weight_decay: float = 0.0
    clip: float = 0.0
    l1: float = 0.0
    l2: float = 0.0


# (rows [N, D], state [N, S], grads [N, D], step): rows and state change in place.
Rule = Callable[[np.ndarray, np.ndarray, np.ndarray, OptimizerSettings], None]


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """A rule, the floats of state it keeps in a row of width D, its usual eps and its number in the native core."""

    name: str
    rule: Rule
    width_factor: int
    extra: int
    eps: float
    number: int

    def state_width(self, dim: int) -> int:
        """S for rows of width `dim`."""
        return self.width_factor * dim + self.extra

    def apply(self, rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: OptimizerSettings) -> None:
        """Move rows and state by gradients, all in place (grads too, where they are clipped)."""
        if step.clip > 0:
            norm = np.sqrt(sum_squares(grads))
            with np.errstate(divide="ignore"):
                factor = np.float32(step.clip) / norm
            np.multiply(grads, factor[:, None], out=grads, where=(norm > np.float32(step.clip))[:, None])
        if step.weight_decay:
            rows *= np.float32(1.0 - step.lr * step.weight_decay)
        self.rule(rows, state, grads, step)


def get_row_optimizer(name: str) -> RowOptimizer:
    """The optimizer of this name; ConfigError names the others."""
    try:
        return _OPTIMIZERS[name]
    except KeyError:
        known = ", ".join(_OPTIMIZERS)
        raise ConfigError(f"a sparse table has no optimizer {name!r}; choose one of: {known}") from None


def sum_squares(grads: np.ndarray) -> np.ndarray:
    """The sum of squares of each row [N]: element i in lane i mod 16, lanes added as a tree."""
    count, dim = grads.shape
    padded = np.zeros((count, -(-dim // LANES) * LANES), dtype=np.float32)
    padded[:, :dim] = grads * grads
    lanes = np.zeros((count, LANES), dtype=np.float32)
    for start in range(0, padded.shape[1], LANES):
        lanes += padded[:, start : start + LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _apply_sgd(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: OptimizerSettings) -> None:
    rows -= np.float32(step.lr) * grads


def _apply_adagrad(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: OptimizerSettings) -> None:
    state += grads * grads
    rows -= np.float32(step.lr) * grads / (np.sqrt(state) + np.float32(step.eps))


def _apply_rowwise_adagrad(
    rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: OptimizerSettings
) -> None:
    state += (sum_squares(grads) / np.float32(grads.shape[1]))[:, None]
    rows -= np.float32(step.lr) / (np.sqrt(state) + np.float32(step.eps)) * grads


def _apply_adam(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: OptimizerSettings) -> None:
    dim = rows.shape[1]
    first, second, steps = state[:, :dim], state[:, dim : 2 * dim], state[:, 2 * dim :]
    steps += 1
    first += np.float32(1 - BETA1) * (grads - first)
    second += np.float32(1 - BETA2) * (grads * grads - second)
    count = steps.astype(np.int64)
    rate = (step.lr / (1.0 - compute_power(BETA1, count))).astype(np.float32)
    scale = (1.0 / np.sqrt(1.0 - compute_power(BETA2, count))).astype(np.float32)
    rows -= rate * first / (np.sqrt(second) * scale + np.float32(step.eps))


def _apply_ftrl(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: OptimizerSettings) -> None:
    dim = rows.shape[1]
    z, n = state[:, :dim], state[:, dim:]
    lr, l1, l2 = np.float32(step.lr), np.float32(step.l1), np.float32(step.l2)
    before = np.sqrt(n)
    n += grads * grads
    after = np.sqrt(n)
    z += grads - (after - before) / lr * rows
    size = np.abs(z) - l1
    moved = np.copysign(size, z) / ((np.float32(step.eps) + after) / lr + l2)
    rows[:] = np.where(size > 0, -moved, np.float32(0.0))


def compute_power(beta: float, exponent: np.ndarray) -> np.ndarray:
    """beta ** exponent (int64) in float64, by squaring."""
    result, left = np.ones(exponent.shape), exponent.copy()
    while left.any():
        result = np.where(left & 1, result * beta, result)
        beta, left = beta * beta, left >> 1
    return result


_OPTIMIZERS = {
    "sgd": RowOptimizer("sgd", _apply_sgd, 0, 0, 0.0, 0),
    "adagrad": RowOptimizer("adagrad", _apply_adagrad, 1, 0, 1e-10, 1),
    "rowwise_adagrad": RowOptimizer("rowwise_adagrad", _apply_rowwise_adagrad, 0, 1, 1e-8, 2),
    "adam": RowOptimizer("adam", _apply_adam, 2, 1, 1e-8, 3),
    "adamw": RowOptimizer("adamw", _apply_adam, 2, 1, 1e-8, 3),
    "ftrl": RowOptimizer("ftrl", _apply_ftrl, 2, 0, 1.0, 4),
}

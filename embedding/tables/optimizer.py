"""Row optimizers: one optimizer step on the rows of a batch.

Rows that are not in the batch do not change and their state does not age: Adam is lazy and counts steps per row.
sgd, adagrad and adam use torch's formulas. rowwise_adagrad (FBGEMM) has one number of state per row, the running
sum of mean squared gradients. ftrl is McMahan's (KDD 2013). Weight decay is decoupled (as in AdamW) and applies
only to the rows of the batch, so adamw is another name for adam.

Every formula uses the order of float32 operations of native/rules.h, so that both produce the same bits: a sum over
a row's width runs in 16 lanes that are added as a tree, and powers are computed by squaring.
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
    """The hyperparameters of one optimizer step.

    Attributes:
        lr: The learning rate.
        eps: The optimizer's eps.
        weight_decay: Decoupled weight decay.
        clip: The largest norm of a row's gradient; 0: no limit.
        l1, l2: The penalties of FTRL.
    """

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
    """An update rule and the size of its state.

    Attributes:
        name: The name in a TableSpec.
        rule: The function that updates rows and state in place.
        width_factor: Numbers of state per number of the row.
        extra: Further numbers of state per row.
        eps: The default eps.
        number: The rule's number in the native core.
    """

    name: str
    rule: Rule
    width_factor: int
    extra: int
    eps: float
    number: int

    def state_width(self, dim: int) -> int:
        """Compute S, the numbers of optimizer state in a row of width `dim`."""
        return self.width_factor * dim + self.extra

    def apply(self, rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: OptimizerSettings) -> None:
        """Update rows and state by gradients, in place.

        Args:
            rows: Rows, float32 [N, D].
            state: Optimizer state, float32 [N, S].
            grads: Gradients, float32 [N, D]; overwritten if they are clipped.
            step: The hyperparameters of this step.
        """
        if step.clip > 0:
            norm = np.sqrt(sum_squares(grads))
            with np.errstate(divide="ignore"):
                factor = np.float32(step.clip) / norm
            np.multiply(grads, factor[:, None], out=grads, where=(norm > np.float32(step.clip))[:, None])
        if step.weight_decay:
            rows *= np.float32(1.0 - step.lr * step.weight_decay)
        self.rule(rows, state, grads, step)


def get_row_optimizer(name: str) -> RowOptimizer:
    """Return the optimizer of this name.

    Raises:
        ConfigError: If there is none of this name; the message lists the names.
    """
    try:
        return _OPTIMIZERS[name]
    except KeyError:
        known = ", ".join(_OPTIMIZERS)
        raise ConfigError(f"a sparse table has no optimizer {name!r}; choose one of: {known}") from None


def sum_squares(grads: np.ndarray) -> np.ndarray:
    """Compute the sum of squares of each row [N]: element i is added to lane i mod 16, and the lanes as a tree."""
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
    """Compute `beta ** exponent` (int64) in float64 by squaring."""
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

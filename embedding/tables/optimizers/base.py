"""The interface of row optimizers, which apply one optimizer step to the rows of a batch.

Rows that are not in the batch keep their values and their state. Weight decay is decoupled (as in AdamW) and applies
only to the rows of the batch.

Every shipped optimizer executes float32 operations in the same order as native/rules.h, so that the results are equal bit
for bit: a sum over a row's width uses 16 lanes, which are then added as a tree, and powers are computed by squaring.
"""

# Shapes: N rows of the batch, D width of a row, S elements of optimizer state per row.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nonet.plugins import PluginRegistry

LANES = 16  # Partial sums of a sum over a row's width, as many as one vector register of the core has floats.


@dataclass(frozen=True, slots=True)
class TableOptimizerSettings:
    """The hyperparameters of one optimizer step.

    Attributes:
        lr: The learning rate.
        eps: The number that is added to a denominator for numerical stability.
        weight_decay: Decoupled weight decay.
        clip: The maximum norm of a row's gradient; 0 for no limit.
        l1, l2: The penalties of FTRL.
    """

    lr: float
    eps: float
    weight_decay: float = 0.0
    clip: float = 0.0
    l1: float = 0.0
    l2: float = 0.0


# (rows [N, D], state [N, S], grads [N, D], settings) -> None; updates rows and state in place.
Rule = Callable[[np.ndarray, np.ndarray, np.ndarray, TableOptimizerSettings], None]


@dataclass(frozen=True)
class RowOptimizer:
    """A kind of optimizer of sparse rows: its update rule and the size of its state.

    Attributes:
        rule: The function that updates rows and state in place, on NumPy arrays.
        width_factor: Elements of state per element of a row.
        extra: Additional elements of state per row.
        eps: The default eps.
        number: The rule's number in the native core (`step_row` in native/rules.h); None for a rule that the core
            does not implement, whose tables run on NumPy.
        device_rule: The same rule for torch tensors on a device; without it, rows are updated on the host.
        has_penalties: Whether the rule uses the settings l1 and l2.
        divides_by_lr: Whether the learning rate must be above 0.
    """

    rule: Rule
    width_factor: int = 0
    extra: int = 0
    eps: float = 1e-8
    number: int | None = None
    device_rule: Callable[[Any, Any, Any, TableOptimizerSettings], None] | None = None
    has_penalties: bool = False
    divides_by_lr: bool = False

    def state_width(self, dim: int) -> int:
        """Compute S, the elements of optimizer state of a row of width `dim`."""
        return self.width_factor * dim + self.extra

    def apply(
        self, rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: TableOptimizerSettings
    ) -> None:
        """Apply one optimizer step to rows and state in place: gradient clipping, weight decay, then the rule.

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


def _update_rows(rows: Any, state: Any, grads: Any, step: Any) -> None:
    """Declare the arguments of `RowOptimizer.rule`."""


OPTIMIZERS = PluginRegistry(
    "optimizer", RowOptimizer, "nonet.embedding.tables.optimizers", contract={"rule": _update_rows}
)


@cache
def get_row_optimizer(name: str) -> RowOptimizer:
    """Return the optimizer with this name: a shipped one, an installed one, or `file.py:NAME` with an absolute path.

    Raises:
        ConfigError: If there is no optimizer with this name, or it does not satisfy the contract of `RowOptimizer`.
    """
    return OPTIMIZERS.get(name)


def sum_squares(grads: np.ndarray) -> np.ndarray:
    """Compute the sum of squares of each row [N].

    Element i is added to lane i mod 16, and the lanes are then added pairwise as a tree.
    """
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


def compute_power(beta: float, exponent: np.ndarray) -> np.ndarray:
    """Compute `beta ** exponent` in float64 by repeated squaring; `exponent` is int64."""
    result, remaining = np.ones(exponent.shape), exponent.copy()
    while remaining.any():
        result = np.where(remaining & 1, result * beta, result)
        beta, remaining = beta * beta, remaining >> 1
    return result

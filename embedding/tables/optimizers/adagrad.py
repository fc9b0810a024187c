"""Adagrad: the formula of `torch.optim.Adagrad`, with a running sum of squared gradients for each element of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nonet.embedding.tables.optimizers.base import RowOptimizer, TableOptimizerSettings

if TYPE_CHECKING:
    from torch import Tensor


def update_rows(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: TableOptimizerSettings) -> None:
    """Update rows [N, D] and state [N, S] in place, on the host."""
    state += grads * grads
    rows -= np.float32(step.lr) * grads / (np.sqrt(state) + np.float32(step.eps))


def update_on_device(rows: Tensor, state: Tensor, grads: Tensor, step: TableOptimizerSettings) -> None:
    """Update rows and state on a device; the results equal those of `update_rows` bit for bit."""
    from nonet.embedding.tables.optimizers._device import compute_sqrt, round_to_float32

    state.add_(grads * grads)
    rows.sub_(grads * round_to_float32(step.lr) / (compute_sqrt(state) + round_to_float32(step.eps)))


SPEC = RowOptimizer(update_rows, width_factor=1, extra=0, eps=1e-10, number=1, device_rule=update_on_device)

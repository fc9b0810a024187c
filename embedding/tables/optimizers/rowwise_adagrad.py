"""Row-wise Adagrad (FBGEMM): one number of state per row, the running sum of mean squared gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nonet.embedding.tables.optimizers.base import RowOptimizer, TableOptimizerSettings, sum_squares

if TYPE_CHECKING:
    from torch import Tensor


def update_rows(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: TableOptimizerSettings) -> None:
    """Update rows and state on the host."""
    state += (sum_squares(grads) / np.float32(grads.shape[1]))[:, None]
    rows -= np.float32(step.lr) / (np.sqrt(state) + np.float32(step.eps)) * grads


def update_on_device(rows: Tensor, state: Tensor, grads: Tensor, step: TableOptimizerSettings) -> None:
    """Update rows and state on a device, with the same bits."""
    import torch

    from nonet.embedding.tables.optimizers._device import (
        compute_sqrt,
        round_to_float32,
    )
    from nonet.embedding.tables.optimizers._device import (
        sum_squares as device_sum_squares,
    )

    width = torch.full(
        (), float(grads.shape[1]), device=grads.device
    )  # A tensor, because torch replaces a division by a number with a multiplication.
    state.add_((device_sum_squares(grads) / width)[:, None])
    rate = torch.full_like(state, round_to_float32(step.lr)) / (
        compute_sqrt(state) + round_to_float32(step.eps)
    )
    rows.sub_(rate * grads)


SPEC = RowOptimizer(update_rows, 0, 1, 1e-8, number=2, device_rule=update_on_device)

"""Row-wise Adagrad (as in FBGEMM): each row has one element of state, the running sum of its mean squared gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nonet.embedding.tables.optimizers.base import RowOptimizer, TableOptimizerSettings, sum_squares

if TYPE_CHECKING:
    from torch import Tensor


def update_rows(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: TableOptimizerSettings) -> None:
    """Update rows [N, D] and state [N, 1] in place, on the host."""
    state += (sum_squares(grads) / np.float32(grads.shape[1]))[:, None]
    rows -= np.float32(step.lr) / (np.sqrt(state) + np.float32(step.eps)) * grads


def update_on_device(rows: Tensor, state: Tensor, grads: Tensor, step: TableOptimizerSettings) -> None:
    """Update rows and state on a device; the results equal those of `update_rows` bit for bit."""
    import torch

    from nonet.embedding.tables.optimizers._device import (
        compute_sqrt,
        round_to_float32,
    )
    from nonet.embedding.tables.optimizers._device import (
        sum_squares as device_sum_squares,
    )

    # The width is a tensor, because torch replaces a division by a Python number with a multiplication.
    width = torch.full((), float(grads.shape[1]), device=grads.device)
    state.add_((device_sum_squares(grads) / width)[:, None])
    rate = torch.full_like(state, round_to_float32(step.lr)) / (
        compute_sqrt(state) + round_to_float32(step.eps)
    )
    rows.sub_(rate * grads)


SPEC = RowOptimizer(update_rows, width_factor=0, extra=1, eps=1e-8, number=2, device_rule=update_on_device)

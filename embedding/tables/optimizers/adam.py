"""Lazy Adam: the formula of `torch.optim.Adam`, with a step count per row that grows only when the row is in a batch.

The state of a row is the first moments [D], the second moments [D] and the step count [1].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nonet.embedding.tables.optimizers.base import RowOptimizer, TableOptimizerSettings, compute_power

if TYPE_CHECKING:
    from torch import Tensor


BETA1, BETA2 = 0.9, 0.999


def update_rows(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: TableOptimizerSettings) -> None:
    """Update rows [N, D] and state [N, S] in place, on the host."""
    dim = rows.shape[1]
    first_moment, second_moment, steps = state[:, :dim], state[:, dim : 2 * dim], state[:, 2 * dim :]
    steps += 1
    first_moment += np.float32(1 - BETA1) * (grads - first_moment)
    second_moment += np.float32(1 - BETA2) * (grads * grads - second_moment)
    count = steps.astype(np.int64)
    rate = (step.lr / (1.0 - compute_power(BETA1, count))).astype(np.float32)
    scale = (1.0 / np.sqrt(1.0 - compute_power(BETA2, count))).astype(np.float32)
    rows -= rate * first_moment / (np.sqrt(second_moment) * scale + np.float32(step.eps))


def update_on_device(rows: Tensor, state: Tensor, grads: Tensor, step: TableOptimizerSettings) -> None:
    """Update rows and state on a device; the results equal those of `update_rows` bit for bit."""
    import torch

    from nonet.embedding.tables.optimizers._device import compute_sqrt, round_to_float32

    dim = rows.shape[1]
    first_moment, second_moment, steps = state[:, :dim], state[:, dim : 2 * dim], state[:, 2 * dim :]
    steps.add_(1.0)
    first_moment.add_((grads - first_moment) * round_to_float32(1 - BETA1))
    second_moment.add_((grads * grads - second_moment) * round_to_float32(1 - BETA2))
    count = steps.cpu().numpy().astype(np.int64)
    rate = (step.lr / (1.0 - compute_power(BETA1, count))).astype(np.float32)
    scale = (1.0 / np.sqrt(1.0 - compute_power(BETA2, count))).astype(np.float32)
    device = rows.device
    update = torch.from_numpy(rate).to(device) * first_moment
    rows.sub_(
        update
        / (compute_sqrt(second_moment) * torch.from_numpy(scale).to(device) + round_to_float32(step.eps))
    )


SPEC = RowOptimizer(update_rows, width_factor=2, extra=1, eps=1e-8, number=3, device_rule=update_on_device)

"""FTRL-Proximal (McMahan et al., KDD 2013, algorithm 1); eps is their beta, lr their alpha.

The state of each element of a row is z and n of the paper, where n is the sum of squared gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nonet.embedding.tables.optimizers.base import RowOptimizer, TableOptimizerSettings

if TYPE_CHECKING:
    from torch import Tensor


def update_rows(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: TableOptimizerSettings) -> None:
    """Update rows [N, D] and state [N, S] in place, on the host."""
    dim = rows.shape[1]
    z, n = state[:, :dim], state[:, dim:]
    lr, l1, l2 = np.float32(step.lr), np.float32(step.l1), np.float32(step.l2)
    sqrt_before = np.sqrt(n)
    n += grads * grads
    sqrt_after = np.sqrt(n)
    z += grads - (sqrt_after - sqrt_before) / lr * rows
    shrunk_z = np.abs(z) - l1
    magnitude = np.copysign(shrunk_z, z) / ((np.float32(step.eps) + sqrt_after) / lr + l2)
    rows[:] = np.where(shrunk_z > 0, -magnitude, np.float32(0.0))


def update_on_device(rows: Tensor, state: Tensor, grads: Tensor, step: TableOptimizerSettings) -> None:
    """Update rows and state on a device; the results equal those of `update_rows` bit for bit."""
    import torch

    from nonet.embedding.tables.optimizers._device import compute_sqrt, round_to_float32

    dim = rows.shape[1]
    z, n = state[:, :dim], state[:, dim:]
    lr, eps = torch.full((), round_to_float32(step.lr), device=rows.device), round_to_float32(step.eps)
    sqrt_before = compute_sqrt(n)
    n.add_(grads * grads)
    sqrt_after = compute_sqrt(n)
    z.add_(grads - (sqrt_after - sqrt_before) / lr * rows)
    shrunk_z = torch.abs(z) - round_to_float32(step.l1)
    magnitude = torch.copysign(shrunk_z, z) / ((sqrt_after + eps) / lr + round_to_float32(step.l2))
    rows.copy_(torch.where(shrunk_z > 0, -magnitude, torch.zeros_like(magnitude)))


SPEC = RowOptimizer(
    update_rows,
    width_factor=2,
    extra=0,
    eps=1.0,
    number=4,
    device_rule=update_on_device,
    has_penalties=True,
    divides_by_lr=True,
)

"""FTRL (McMahan et al., KDD 2013); eps is their beta, where the square root of n starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nonet.embedding.tables.optimizers.base import RowOptimizer, TableOptimizerSettings

if TYPE_CHECKING:
    from torch import Tensor


def update_rows(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: TableOptimizerSettings) -> None:
    """Update rows and state on the host."""
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


def update_on_device(rows: Tensor, state: Tensor, grads: Tensor, step: TableOptimizerSettings) -> None:
    """Update rows and state on a device, with the same bits."""
    import torch

    from nonet.embedding.tables.optimizers._device import compute_sqrt, round_to_float32

    dim = rows.shape[1]
    z, n = state[:, :dim], state[:, dim:]
    lr, eps = torch.full((), round_to_float32(step.lr), device=rows.device), round_to_float32(step.eps)
    before = compute_sqrt(n)
    n.add_(grads * grads)
    after = compute_sqrt(n)
    z.add_(grads - (after - before) / lr * rows)
    size = torch.abs(z) - round_to_float32(step.l1)
    moved = torch.copysign(size, z) / ((after + eps) / lr + round_to_float32(step.l2))
    rows.copy_(torch.where(size > 0, -moved, torch.zeros_like(moved)))


SPEC = RowOptimizer(
    update_rows, 2, 0, 1.0, number=4, device_rule=update_on_device, has_penalties=True, divides_by_lr=True
)

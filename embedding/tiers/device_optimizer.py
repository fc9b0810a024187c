"""Optimizer steps on rows of a device.

A shipped optimizer performs the same float32 operations as on the host, in the same order and not fused. Where float32 is
IEEE (every CPU; add, multiply, divide and sqrt of CUDA), a row that is updated on a device has the same bits as on the host.
Adam's bias corrections are float64 powers of a per-row count, computed on the host; only this waits for the device. An
optimizer without a rule for devices is applied on the host.
"""

# Shapes: U distinct rows, D width, S numbers of optimizer state in a row.

from __future__ import annotations

import torch
from torch import Tensor

from nonet.embedding.tables.optimizers import (
    RowOptimizer,
    TableOptimizerSettings,
    compute_sqrt,
    round_to_float32,
    sum_squares,
)


def apply_step(
    optimizer: RowOptimizer, rows: Tensor, state: Tensor, grads: Tensor, step: TableOptimizerSettings
) -> None:
    """Apply one optimizer step to float32 rows in place.

    Args:
        optimizer: The optimizer.
        rows: Rows [U, D].
        state: Optimizer state [U, S].
        grads: Summed gradients [U, D].
        step: The hyperparameters of this step.
    """
    if step.clip > 0:
        norm = compute_sqrt(sum_squares(grads))
        clipped = grads * (torch.full_like(norm, step.clip) / norm)[:, None]
        grads = torch.where((norm > round_to_float32(step.clip))[:, None], clipped, grads)
    if step.weight_decay:
        rows.mul_(round_to_float32(1.0 - step.lr * step.weight_decay))
    if optimizer.device_rule is not None:
        optimizer.device_rule(rows, state, grads, step)
        return
    host_rows, host_state, host_grads = (tensor.cpu().numpy().copy() for tensor in (rows, state, grads))
    optimizer.rule(host_rows, host_state, host_grads, step)
    rows.copy_(torch.from_numpy(host_rows))
    state.copy_(torch.from_numpy(host_state))


def sum_gradients(grads: Tensor, inverse: Tensor, count: int) -> Tensor:
    """Add gradients [N, D] of equal rows in position order, starting from zero, and return [U, D]."""
    sums = torch.zeros(count, grads.shape[1], device=grads.device)
    if grads.device.type == "cpu":
        return sums.index_add_(0, inverse, grads)
    # On other devices the order of index_add_ depends on threads; this sorts by row, stably, and adds sequentially.
    return sums.index_put_((inverse,), grads, accumulate=True)

"""Optimizer steps on rows that are stored on a device.

A shipped optimizer performs the same float32 operations as on the host, in the same order and without fused operations. If these
follow IEEE 754 (on every CPU; on CUDA for add, multiply, divide and sqrt), a device computes the same bits as the host. Adam's
bias corrections are float64 powers of a per-row count and are computed on the host, which is the only synchronisation with the
device. An optimizer without `device_rule` is applied on the host.
"""

# Shapes: U distinct rows, D width, S elements of optimizer state per row.

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
        rows: Rows [U, D], overwritten.
        state: Optimizer state [U, S], overwritten.
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
    """Sum the gradients of each row in position order.

    Args:
        grads: Gradients [N, D].
        inverse: The index of the row to which each gradient belongs, in 0..count - 1, int64 [N].
        count: The number of rows U.

    Returns:
        The summed gradients [U, D], float32.
    """
    sums = torch.zeros(count, grads.shape[1], device=grads.device)
    if grads.device.type == "cpu":
        return sums.index_add_(0, inverse, grads)
    # On other devices index_add_ adds in an order that depends on threads; index_put_ sorts stably by row and adds in order.
    return sums.index_put_((inverse,), grads, accumulate=True)

"""The row optimizers on a device: the float32 operations of optimizer.py, one torch kernel each.

The operations are the same, in the same order and not fused. Where float32 is IEEE (every CPU; add, multiply,
divide and sqrt of CUDA), a row that is updated on a device has the same bits as on the host. Adam's bias
corrections are float64 powers of a per-row count, computed on the host; only this waits for the device.
"""

# Shapes: U distinct rows, D width, S numbers of optimizer state in a row.

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.tables import BETA1, BETA2, LANES, OptimizerSettings, compute_power

Rule = Callable[[Tensor, Tensor, Tensor, OptimizerSettings], None]


def apply_step(name: str, rows: Tensor, state: Tensor, grads: Tensor, step: OptimizerSettings) -> None:
    """Apply one optimizer step to float32 rows in place.

    Args:
        name: The name of the optimizer.
        rows: Rows [U, D].
        state: Optimizer state [U, S].
        grads: Summed gradients [U, D].
        step: The hyperparameters of this step.
    """
    if step.clip > 0:
        norm = _compute_sqrt(_sum_squares(grads))
        clipped = grads * (torch.full_like(norm, step.clip) / norm)[:, None]
        grads = torch.where((norm > _round_to_float32(step.clip))[:, None], clipped, grads)
    if step.weight_decay:
        rows.mul_(_round_to_float32(1.0 - step.lr * step.weight_decay))
    _RULES[name](rows, state, grads, step)


def sum_gradients(grads: Tensor, inverse: Tensor, count: int) -> Tensor:
    """Add gradients [N, D] of equal rows in position order, starting from zero, and return [U, D]."""
    sums = torch.zeros(count, grads.shape[1], device=grads.device)
    if grads.device.type == "cpu":
        return sums.index_add_(0, inverse, grads)
    # On other devices the order of index_add_ depends on threads; this sorts by row, stably, and adds sequentially.
    return sums.index_put_((inverse,), grads, accumulate=True)


def _round_to_float32(value: float) -> float:
    return float(np.float32(value))


def _compute_sqrt(values: Tensor) -> Tensor:
    # On a CPU torch uses MKL's square root, which is off by one ulp for 7 of 1,000 numbers; NumPy's is IEEE.
    return torch.from_numpy(np.sqrt(values.numpy())) if values.device.type == "cpu" else torch.sqrt(values)


def _sum_squares(grads: Tensor) -> Tensor:
    """Compute optimizer.square_sum: element i is added to lane i mod 16, and the lanes as a tree."""
    count, dim = grads.shape
    padded = torch.nn.functional.pad(grads * grads, (0, -dim % LANES))
    lanes = torch.zeros(count, LANES, device=grads.device)
    for start in range(0, padded.shape[1], LANES):
        lanes = lanes + padded[:, start : start + LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _apply_sgd(rows: Tensor, state: Tensor, grads: Tensor, step: OptimizerSettings) -> None:
    rows.sub_(grads * _round_to_float32(step.lr))


def _apply_adagrad(rows: Tensor, state: Tensor, grads: Tensor, step: OptimizerSettings) -> None:
    state.add_(grads * grads)
    rows.sub_(grads * _round_to_float32(step.lr) / (_compute_sqrt(state) + _round_to_float32(step.eps)))


def _apply_rowwise_adagrad(rows: Tensor, state: Tensor, grads: Tensor, step: OptimizerSettings) -> None:
    width = torch.full(
        (), float(grads.shape[1]), device=grads.device
    )  # A tensor, because torch replaces a division by a number with a multiplication.
    state.add_((_sum_squares(grads) / width)[:, None])
    rate = torch.full_like(state, _round_to_float32(step.lr)) / (
        _compute_sqrt(state) + _round_to_float32(step.eps)
    )
    rows.sub_(rate * grads)


def _apply_adam(rows: Tensor, state: Tensor, grads: Tensor, step: OptimizerSettings) -> None:
    dim = rows.shape[1]
    first, second, steps = state[:, :dim], state[:, dim : 2 * dim], state[:, 2 * dim :]
    steps.add_(1.0)
    first.add_((grads - first) * _round_to_float32(1 - BETA1))
    second.add_((grads * grads - second) * _round_to_float32(1 - BETA2))
    count = steps.cpu().numpy().astype(np.int64)
    rate = (step.lr / (1.0 - compute_power(BETA1, count))).astype(np.float32)
    scale = (1.0 / np.sqrt(1.0 - compute_power(BETA2, count))).astype(np.float32)
    device = rows.device
    move = torch.from_numpy(rate).to(device) * first
    rows.sub_(
        move / (_compute_sqrt(second) * torch.from_numpy(scale).to(device) + _round_to_float32(step.eps))
    )


def _apply_ftrl(rows: Tensor, state: Tensor, grads: Tensor, step: OptimizerSettings) -> None:
    dim = rows.shape[1]
    z, n = state[:, :dim], state[:, dim:]
    lr, eps = torch.full((), _round_to_float32(step.lr), device=rows.device), _round_to_float32(step.eps)
    before = _compute_sqrt(n)
    n.add_(grads * grads)
    after = _compute_sqrt(n)
    z.add_(grads - (after - before) / lr * rows)
    size = torch.abs(z) - _round_to_float32(step.l1)
    moved = torch.copysign(size, z) / ((after + eps) / lr + _round_to_float32(step.l2))
    rows.copy_(torch.where(size > 0, -moved, torch.zeros_like(moved)))


_RULES: dict[str, Rule] = {
    "sgd": _apply_sgd,
    "adagrad": _apply_adagrad,
    "rowwise_adagrad": _apply_rowwise_adagrad,
    "adam": _apply_adam,
    "adamw": _apply_adam,
    "ftrl": _apply_ftrl,
}

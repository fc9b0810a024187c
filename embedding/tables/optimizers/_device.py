"""Float32 operations for rules of row optimizers on a device, which give the same bits as those on the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.tables.optimizers.base import LANES


def round_to_float32(value: float) -> float:
    """Round a number to float32."""
    return float(np.float32(value))


def compute_sqrt(values: Tensor) -> Tensor:
    """Compute the IEEE square root."""
    # On a CPU torch uses MKL's square root, which is off by one ulp for 7 of 1,000 numbers; NumPy's is IEEE.
    return torch.from_numpy(np.sqrt(values.numpy())) if values.device.type == "cpu" else torch.sqrt(values)


def sum_squares(grads: Tensor) -> Tensor:
    """Compute the sum of squares of each row [N], in the same order as `sum_squares` of base.py."""
    count, dim = grads.shape
    padded = torch.nn.functional.pad(grads * grads, (0, -dim % LANES))
    lanes = torch.zeros(count, LANES, device=grads.device)
    for start in range(0, padded.shape[1], LANES):
        lanes = lanes + padded[:, start : start + LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]

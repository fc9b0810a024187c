"""SGD: torch's formula without momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nonet.embedding.tables.optimizers.base import RowOptimizer, TableOptimizerSettings

if TYPE_CHECKING:
    from torch import Tensor


def update_rows(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: TableOptimizerSettings) -> None:
    """Update rows [N, D] and state [N, S] in place, on the host."""
    rows -= np.float32(step.lr) * grads


def update_on_device(rows: Tensor, state: Tensor, grads: Tensor, step: TableOptimizerSettings) -> None:
    """Update rows and state on a device; the results equal those of `update_rows` bit for bit."""
    from nonet.embedding.tables.optimizers._device import round_to_float32

    rows.sub_(grads * round_to_float32(step.lr))


SPEC = RowOptimizer(update_rows, width_factor=0, extra=0, eps=0.0, number=0, device_rule=update_on_device)

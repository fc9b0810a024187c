"""SGD: torch's formula without momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nonet.embedding.tables.optimizers.base import RowOptimizer, TableOptimizerSettings

if TYPE_CHECKING:
    from torch import Tensor


def update_rows(rows: np.ndarray, state: np.ndarray, grads: np.ndarray, step: TableOptimizerSettings) -> None:
    """Update rows and state on the host."""
    rows -= np.float32(step.lr) * grads


def update_on_device(rows: Tensor, state: Tensor, grads: Tensor, step: TableOptimizerSettings) -> None:
    """Update rows and state on a device, with the same bits."""
    from nonet.embedding.tables.optimizers._device import round_to_float32

    rows.sub_(grads * round_to_float32(step.lr))


SPEC = RowOptimizer(update_rows, 0, 0, 0.0, number=0, device_rule=update_on_device)

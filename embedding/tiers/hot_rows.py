"""The protocol of a tier of hot rows; `DeviceCache` implements it, and FBGEMM's cached TBE or dynamicemb could.

A tier contains copies of rows with their optimizer state. While it contains a row, its copy is the current one.
Changed rows are returned when they leave, so that the tier below never loses a step.
"""

# Shapes: N keys, D width.

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.tables import RowColumns


@runtime_checkable
class HotRows(Protocol):
    """A tier of rows in device memory."""

    device: torch.device

    def __len__(self) -> int:
        """Return the number of rows in the tier."""
        ...

    @property
    def keys(self) -> np.ndarray:
        """The keys of the rows in the tier."""
        ...

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Return which keys [N] are in the tier, as bool [N]."""
        ...

    def lookup(self, keys: np.ndarray, *, train: bool) -> Tensor:
        """Return a copy of the rows [N, D] of keys [N] that are all in the tier, float32, on the device."""
        ...

    def apply(self, keys: np.ndarray, grads: Tensor, step: int, lr: float) -> None:
        """Sum the gradients of equal keys in position order, then apply one optimizer step to each row.

        Args:
            keys: Keys that are all in the tier [N].
            grads: Gradients [N, D].
            step: The step.
            lr: The learning rate.
        """
        ...

    def admit(self, rows: RowColumns) -> RowColumns:
        """Add as many of these distinct rows as fit, and return the changed rows that they displaced."""
        ...

    def pin(self, step: int, keys: np.ndarray) -> None:
        """Keep those rows of these distinct keys that are in the tier until `release` of this step."""
        ...

    def announce_batch(self, step: int, keys: np.ndarray) -> None:
        """Announce that the batch of `step` will need these distinct keys."""
        ...

    def release(self, step: int) -> None:
        """Mark the batches up to `step` as finished."""
        ...

    def pop_dirty(self, keys: np.ndarray | None = None) -> RowColumns:
        """Return copies of the changed rows (of these keys) and mark them as unchanged."""
        ...

    def overwrite(self, rows: RowColumns) -> None:
        """Replace the values of those of these rows that are in the tier, and mark them as unchanged."""
        ...

    def drop(self, keys: np.ndarray) -> None:
        """Remove the rows of these keys, changed or not."""
        ...

    def clear(self) -> None:
        """Remove every row and every announced batch."""
        ...

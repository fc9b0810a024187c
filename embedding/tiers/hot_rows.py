"""The protocol of a tier of hot rows, which `DeviceCache` implements.

It is narrow enough for an adapter of FBGEMM's cached TBE or dynamicemb. A tier contains copies of rows with their optimizer
state. While the tier contains a row, its copy is the current one. Changed rows are returned to the caller when they are
evicted, so that the caller can write them to the tier below.
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
        """Return a copy of the rows of keys [N], all of which are in the tier, as float32 [N, D] on the device."""
        ...

    def apply(self, keys: np.ndarray, grads: Tensor, step: int, lr: float) -> None:
        """Sum the gradients of equal keys in position order, then apply one optimizer step to each row.

        Args:
            keys: Keys [N], all of which are in the tier.
            grads: Gradients [N, D].
            step: The training step.
            lr: The learning rate.
        """
        ...

    def admit(self, rows: RowColumns) -> RowColumns:
        """Add rows of distinct keys that are not in the tier, as many as fit.

        Returns:
            The rows that were evicted for them and had changed since they were added.
        """
        ...

    def pin(self, step: int, keys: np.ndarray) -> None:
        """Protect the rows in the tier among these distinct keys from eviction until `release(step)` is called."""
        ...

    def announce_batch(self, step: int, keys: np.ndarray) -> None:
        """Announce that the batch of `step` will need these distinct keys."""
        ...

    def release(self, step: int) -> None:
        """Mark the batches up to `step` as finished, which ends the protection by `pin`."""
        ...

    def pop_dirty(self, keys: np.ndarray | None = None) -> RowColumns:
        """Return copies of the changed rows and mark them as unchanged; with `keys`, only rows of these keys."""
        ...

    def overwrite(self, rows: RowColumns) -> None:
        """Replace the values of rows that are in the tier and mark them as unchanged; other rows are ignored."""
        ...

    def drop(self, keys: np.ndarray) -> None:
        """Remove the rows of these keys without returning their changes."""
        ...

    def clear(self) -> None:
        """Remove every row and every announced batch."""
        ...

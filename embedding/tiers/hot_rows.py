"""What a tier of hot rows must do: `DeviceCache` does it, FBGEMM's cached TBE or dynamicemb can stand in its place.

A tier holds copies of rows with their optimizer state. While it holds a row, its copy is the row; rows that changed are
handed back when they leave, so that whoever is below never loses a step.
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
    """Rows near the computation."""

    device: torch.device

    def __len__(self) -> int:
        """How many rows are held."""
        ...

    @property
    def keys(self) -> np.ndarray:
        """The keys held."""
        ...

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Which keys [N] are held."""
        ...

    def lookup(self, keys: np.ndarray, *, train: bool) -> Tensor:
        """A copy of the rows [N, D] of keys [N] that are held, float32, on the device."""
        ...

    def apply(self, keys: np.ndarray, grads: Tensor, step: int, lr: float) -> None:
        """Sum the gradients [N, D] of equal keys, all held, in position order, then step each row once."""
        ...

    def admit(self, rows: RowColumns) -> RowColumns:
        """Take as many of these distinct rows in as there is room for; hands back the changed rows that left for them."""
        ...

    def pin(self, step: int, keys: np.ndarray) -> None:
        """Keep the rows of these distinct keys, of which some are held, until `release` of this step."""
        ...

    def announce_batch(self, step: int, keys: np.ndarray) -> None:
        """The batch of `step` will need these distinct keys."""
        ...

    def release(self, step: int) -> None:
        """The batches up to `step` are done."""
        ...

    def pop_dirty(self, keys: np.ndarray | None = None) -> RowColumns:
        """Copies of the held rows (of these keys) that changed since they came; they count as unchanged from here on."""
        ...

    def overwrite(self, rows: RowColumns) -> None:
        """New values of rows, of which some are held, unchanged by us."""
        ...

    def drop(self, keys: np.ndarray) -> None:
        """Forget the rows of these keys, changed or not."""
        ...

    def clear(self) -> None:
        """Forget every row and every batch."""
        ...

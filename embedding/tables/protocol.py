"""What every sparse table can do, whoever stores it; one test suite holds for all.

A table maps unbounded int64 keys to rows with their optimizer state. Only `lookup(train=True)` and `load` make rows,
only `apply` and `load` change them, only the table's own eviction and `load` forget them.
"""

# Shapes: N keys, D width, S numbers of optimizer state in a row.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from nonet.embedding.tables.spec import TableSpec

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["DELETE", "UPSERT", "SparseTable", "TableSpec"]

UPSERT, DELETE = "upsert", "delete"


@runtime_checkable
class SparseTable(Protocol):
    """Rows by key."""

    name: str
    dim: int
    spec: TableSpec
    step: int

    @property
    def absent(self) -> int:
        """Positions of reading lookups whose key has no row, answered with the default row."""
        ...

    def __len__(self) -> int:
        """How many rows are held."""
        ...

    def lookup(self, keys: Tensor | np.ndarray, *, train: bool, step: int | None = None) -> Tensor:
        """Rows [N, D] of keys [N], duplicates allowed; an absent key gets a row only when `train` and admitted.

        `step` is the step these rows are trained in, the next one unless batches are in flight.
        """
        ...

    def apply(self, keys: Tensor | np.ndarray, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Sum the gradients [N, D] of equal keys in position order, then step each row once."""
        ...

    def export(self, slices: range = ..., since: int | None = None) -> Iterator[pa.Table]:
        """Columns key, row, state, step, op of the rows in these slices that changed or went after step `since`."""
        ...

    def load(self, tables: Iterable[pa.Table], slices: range = ...) -> None:
        """Upsert and delete what `export` gave, leaving out keys of other slices."""
        ...

"""The protocol of all sparse tables; one test suite checks every implementation.

A table maps arbitrary int64 keys to rows with their optimizer state. Only `lookup(train=True)` and `load` create
rows, only `apply` and `load` change them, and only the table's own eviction and `load` delete them.
"""

# Shapes: N keys, D width, S elements of optimizer state per row.

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
    """A table of rows by int64 key."""

    name: str
    dim: int
    spec: TableSpec
    step: int

    @property
    def absent(self) -> int:
        """The number of positions in read-only lookups that read the default row because their key had no row."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def lookup(self, keys: Tensor | np.ndarray, *, train: bool, step: int | None = None) -> Tensor:
        """Read the rows of keys. With `train`, rows are created for absent keys that the admission policy admits.

        Other absent keys read the default row.

        Args:
            keys: Keys as int64 [N]; duplicates are allowed.
            train: Whether to create rows.
            step: The step that trains these rows; by default the table's step plus 1.

        Returns:
            A copy of the rows, float32 [N, D].
        """
        ...

    def apply(self, keys: Tensor | np.ndarray, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Sum the gradients of equal keys in position order, then apply one optimizer step to each row.

        Args:
            keys: Keys as int64 [N].
            grads: Gradients [N, D].
            step: The step; it must not be lower than in an earlier call.
            lr: The learning rate; None for that of the spec.
        """
        ...

    def export(self, slices: range = ..., since: int | None = None) -> Iterator[pa.Table]:
        """Yield Arrow tables with key, row, state, step and op of the rows of these slices.

        With `since`, only rows that were changed or deleted after that step.
        """
        ...

    def load(self, tables: Iterable[pa.Table], slices: range = ...) -> None:
        """Upsert or delete the rows that `export` of a table yielded, except keys of other slices."""
        ...

"""What every sparse table can do, whoever stores it; one test suite holds for all.

A table maps unbounded int64 keys to float32 rows with their optimizer state. Only `lookup(train=True)` and
`load` make rows, only `apply` and `load` change them.
"""

# Shapes: N keys, D width, S numbers of optimizer state in a row.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from nonet.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

UPSERT, DELETE = "upsert", "delete"


@runtime_checkable
class SparseTable(Protocol):
    """Rows by key."""

    name: str
    dim: int
    absent: int

    def lookup(self, keys: Tensor | np.ndarray, *, train: bool) -> Tensor:
        """Rows [N, D] of keys [N], duplicates allowed; an absent key gets a row only when `train`."""
        ...

    def apply(self, keys: Tensor | np.ndarray, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Sum the gradients [N, D] of equal keys in position order, then step each row once."""
        ...

    def export(self, slices: range = ..., since: int | None = None) -> Iterator[pa.Table]:
        """Columns key, row, state, step, op of the rows in these slices that changed after step `since`."""
        ...

    def load(self, tables: Iterable[pa.Table], slices: range = ...) -> None:
        """Upsert and delete what `export` gave, leaving out keys of other slices."""
        ...


@dataclass(frozen=True, slots=True)
class TableSpec:
    """How a table's rows are made and trained; everything a shard needs to hold its part of it."""

    dim: int
    optimizer: str = "rowwise_adagrad"
    lr: float = 0.02
    init_scale: float = 0.02
    weight_decay: float = 0.0
    eps: float | None = None

    def __post_init__(self) -> None:
        from nonet.embedding.optimizer import row_optimizer

        row_optimizer(self.optimizer)
        if self.dim < 1:
            raise ConfigError(f"a sparse table's dim must be at least 1, got {self.dim}")
        for name in ("lr", "init_scale", "weight_decay", "eps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(
                    f"a sparse table's {name} must be a finite number of at least 0, got {value}"
                )

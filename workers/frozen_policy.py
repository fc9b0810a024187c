"""FrozenPolicy: the dense weights and sparse rows of a policy at one moment, with which the trained policy is compared later.

The dense weights are copied. Of the sparse rows only those that change later are stored, each before its first change, so
the memory grows with the rows that a stage changes and not with the tables. Every trainer rank stores the same rows, since a
rank may read a row that another rank has changed. "Live" are the model and the rows that are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.models.generation import Voters

# Shapes: N stored keys, M keys of a step, C items that the nearest-item voter compares, D width.


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The stored rows of one table.

    Attributes:
        keys: Distinct keys [N] int64, ascending, on the host.
        rows: Their rows [N, D], on the trainer's device.
    """

    keys: Tensor
    rows: Tensor

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Look up keys [M] among the stored ones.

        Returns:
            The index of each key [M], only valid if it is stored; and whether it is stored, [M] bool.
        """
        if not len(self.keys):
            return torch.zeros_like(keys), torch.zeros(len(keys), dtype=torch.bool)
        index_M = torch.searchsorted(self.keys, keys).clamp_max(len(self.keys) - 1)
        return index_M, self.keys[index_M] == keys

    def add(self, keys: Tensor, rows: Tensor) -> StoredRows:
        """Return new `StoredRows` that also have these rows [M, D]; keys that are stored already keep their first row."""
        _, is_stored_M = self.find(keys)
        all_keys, order = torch.cat([self.keys, keys[~is_stored_M]]).sort()
        all_rows = torch.cat([self.rows, rows[(~is_stored_M).to(rows.device)]])
        return StoredRows(all_keys, all_rows[order.to(all_rows.device)])

    def put_into(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Return the rows [M, D] of keys [M], replaced by the stored rows for keys that are stored."""
        index_M, is_stored_M = self.find(keys)
        if not is_stored_M.any():
            return rows
        stored = self.rows.index_select(0, index_M.to(self.rows.device)).to(rows.device)
        return torch.where(is_stored_M.to(rows.device)[:, None], stored, rows)


class FrozenPolicy:
    """The policy at the moment when this object is created.

    Attributes:
        model: A copy of the dense weights, in eval mode, without gradients.
        stored: For each table, the original values of the rows that have changed since then.
    """

    def __init__(self, model: Any):
        self.model = model
        self.stored: dict[str, StoredRows] = {}

    def find_missing_keys(self, table: str, keys: Tensor) -> Tensor:
        """Return the keys of a table that are not stored yet."""
        if table not in self.stored:
            return keys
        _, is_stored_M = self.stored[table].find(keys)
        return keys[~is_stored_M]

    def store(self, table: str, keys: Tensor, rows: Tensor) -> None:
        """Store rows [M, D] of a table before they change. Keys that are stored already keep their first row.

        Args:
            table: Name of the table.
            keys: Distinct keys [M] int64 on the host.
            rows: Their rows as they are now.
        """
        if table not in self.stored:
            self.stored[table] = StoredRows(keys[:0], rows[:0])
        self.stored[table] = self.stored[table].add(keys, rows)

    def restore_rows(self, keys: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows [M, D] by table as this policy had them, from the live rows of the same keys."""
        return {
            table: self.stored[table].put_into(keys[table], live) if table in self.stored else live
            for table, live in rows.items()
        }

    def restore_voters(self, voters: Voters | None, table: str | None, keys: Tensor | None) -> Voters | None:
        """Return the voters of a memory as this policy had them.

        Args:
            voters: The live voters, whose item rows are those of the tables at this moment.
            table: The table that item rows are in.
            keys: Keys [C] of the items that the nearest-item voter compares.
        """
        if voters is None or table not in self.stored or keys is None:
            return voters
        return voters.replace_rows(lambda live: self.stored[table].put_into(keys, live))

    def follow(
        self,
        weights: Iterable[tuple[Tensor, Tensor]],
        decay: float,
        read: Callable[[str, Tensor], Tensor],
    ) -> None:
        """Move dense weights and stored rows towards the live policy, as an exponential moving average.

        Args:
            weights: Each weight of this policy with the live one.
            decay: Weight of the frozen policy in the average, in (0, 1).
            read: Returns the live rows [N, D] of the keys [N] of a table.
        """
        with torch.no_grad():
            for frozen, live in weights:
                frozen.lerp_(live, 1 - decay)
            for table in sorted(self.stored):
                stored = self.stored[table]
                rows = read(table, stored.keys).to(stored.rows.device)
                self.stored[table] = StoredRows(stored.keys, stored.rows.lerp(rows, 1 - decay))

    def to_row_tensors(self) -> dict[str, Tensor]:
        """Return the stored rows as named tensors for a checkpoint: `<table>.keys` and `<table>.rows`."""
        tensors = {f"{table}.keys": stored.keys for table, stored in self.stored.items()}
        return tensors | {f"{table}.rows": stored.rows for table, stored in self.stored.items()}

    def load_rows(self, tensors: Mapping[str, Tensor], device: str) -> None:
        """Replace the stored rows by those of a checkpoint."""
        tables = [name.removesuffix(".keys") for name in tensors if name.endswith(".keys")]
        self.stored = {
            table: StoredRows(tensors[f"{table}.keys"], tensors[f"{table}.rows"].to(device))
            for table in tables
        }

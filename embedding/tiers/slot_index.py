"""Where a key's row lies: 64-bit keys to numbers from 0 up, in a sparse table of two columns that hold the number's bits.

The core's hash table is the only one here that grows and forgets without a pause, so tiers find their rows by it too:
8,192 keys in 0.1 ms on the core.
"""

# Shapes: N keys.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nonet.embedding.tables import ALL_SLICES, RowColumns, TableSpec, make_table


class SlotIndex:
    """Distinct int64 keys, any value, and a number of at least 0 for each."""

    def __init__(self, name: str):
        # Absent keys read the default row, two zeros: numbers are held plus one.
        self._table = make_table(name, TableSpec(2, optimizer="sgd", init_scale=0.0), 0)

    def __len__(self) -> int:
        return len(self._table)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The number of each key [N], -1 where it has none."""
        return self._table.lookup(keys, train=False).numpy().view(np.int64).reshape(-1) - 1

    def put(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        """Give distinct keys [N] these numbers [N]."""
        count = len(keys)
        if count:
            bits = (numbers + 1).astype(np.int64).view(np.float32).reshape(count, 2)
            none = np.zeros((count, 0), np.float32)
            self._table._upsert(
                RowColumns(keys, bits, none, np.zeros(count, np.int64), np.zeros(count, bool))
            )

    def drop(self, keys: np.ndarray) -> None:
        """Forget these keys [N]."""
        if len(keys):
            self._table._delete(keys)

    def items(self, slices: range = ALL_SLICES) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys of these slices and their numbers, by slice and key, some at a time."""
        for part in self._table._iterate_rows(slices, None):
            yield part.key, np.ascontiguousarray(part.row).view(np.int64).reshape(-1) - 1

    def clear(self) -> None:
        """Forget every key."""
        self._table.clear()

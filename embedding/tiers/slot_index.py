"""An index from 64-bit keys to numbers, stored in a sparse table whose two columns contain the number's bits.

The core's hash table grows and deletes without pauses, so the tiers use it to find their rows: 8,192 keys take 0.1
ms.
"""

# Shapes: N keys.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nonet.embedding.tables import ALL_SLICES, RowColumns, TableSpec, make_table


class SlotIndex:
    """A map from distinct int64 keys of any value to numbers of at least 0; `name` is that of its table in messages."""

    def __init__(self, name: str):
        # A row of two float32 has the 64 bits of a number. Absent keys read the default row, whose bits are 0, so a number
        # is stored plus one.
        self._table = make_table(name, TableSpec(2, optimizer="sgd", init_scale=0.0), 0)

    def __len__(self) -> int:
        return len(self._table)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the number of each key [N], -1 if it has none."""
        return self._table.lookup(keys, train=False).numpy().view(np.int64).reshape(-1) - 1

    def put(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        """Assign numbers [N] to distinct keys [N]."""
        count = len(keys)
        if count:
            bits = (numbers + 1).astype(np.int64).view(np.float32).reshape(count, 2)
            no_state = np.zeros((count, 0), np.float32)
            self._table._upsert(
                RowColumns(keys, bits, no_state, np.zeros(count, np.int64), np.zeros(count, bool))
            )

    def drop(self, keys: np.ndarray) -> None:
        """Remove keys [N]."""
        if len(keys):
            self._table._delete(keys)

    def items(self, slices: range = ALL_SLICES) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield keys of these slices and their numbers in parts, by slice and key."""
        for part in self._table._iterate_rows(slices, None):
            yield part.key, np.ascontiguousarray(part.row).view(np.int64).reshape(-1) - 1

    def clear(self) -> None:
        """Remove every key."""
        self._table.clear()

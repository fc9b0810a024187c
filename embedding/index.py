"""From 64-bit keys to dense row numbers: open addressing with linear probing, in NumPy.

Rows are numbered 0, 1, 2, ... in the order of arrival and every cell between a key's home and its place is
taken, so a search may stop at the first empty cell. Cells hold row numbers, not keys, so that no key value is
reserved. Vectorised over the batch: the Python loop runs once for each probe length, about five times at most
half full.
"""

# Shapes: N keys asked for, R rows held.

from __future__ import annotations

import numpy as np

from nonet.embedding.slices import splitmix64

_LEAST_CELLS = 64
_ABSENT = -1


class KeyIndex:
    """Distinct int64 keys, any value, numbered in the order they came."""

    def __init__(self) -> None:
        self._count = 0
        self._keys = np.empty(_LEAST_CELLS // 2, dtype=np.int64)
        self._cells = np.full(_LEAST_CELLS, _ABSENT, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> np.ndarray:
        """The keys by row number [R]; a view, not to be written to."""
        return self._keys[: self._count]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The row of each key [N], -1 where the key is absent."""
        rows = np.full(len(keys), _ABSENT, dtype=np.int64)
        open_ = np.arange(len(keys))
        cells = self._home(keys)
        while open_.size:
            found = self._cells[cells]
            taken = found != _ABSENT
            hit = taken & (self._keys[found] == keys[open_])
            rows[open_[hit]] = found[hit]
            onward = taken & ~hit
            open_, cells = open_[onward], (cells[onward] + 1) & (len(self._cells) - 1)
        return rows

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Give new rows to keys [N] that are distinct and absent; returns their row numbers."""
        rows = np.arange(self._count, self._count + len(keys), dtype=np.int64)
        self._reserve(self._count + len(keys))
        self._keys[rows] = keys
        self._count += len(keys)
        self._place(rows)
        return rows

    def keep(self, rows: np.ndarray) -> None:
        """Forget every key but those of these rows, and number these anew in the given order."""
        kept = self.keys[rows]
        self.__init__()
        self.add(kept)

    def _home(self, keys: np.ndarray) -> np.ndarray:
        return (splitmix64(keys) & np.uint64(len(self._cells) - 1)).astype(np.int64)

    def _reserve(self, count: int) -> None:
        if count > len(self._keys):
            larger = np.empty(max(count, 2 * len(self._keys)), dtype=np.int64)
            larger[: self._count] = self.keys
            self._keys = larger
        cells = len(self._cells)
        while 2 * count > cells:
            cells *= 2
        if cells > len(self._cells):
            self._cells = np.full(cells, _ABSENT, dtype=np.int64)
            self._place(np.arange(self._count, dtype=np.int64))

    def _place(self, rows: np.ndarray) -> None:
        cells = self._home(self._keys[rows])
        while rows.size:
            free = self._cells[cells] == _ABSENT
            self._cells[cells[free]] = rows[free]
            lost = self._cells[cells] != rows
            rows, cells = rows[lost], (cells[lost] + 1) & (len(self._cells) - 1)

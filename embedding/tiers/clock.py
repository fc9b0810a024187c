"""The choice of rows that leave host memory: a clock hand samples slices, and the less recently trained half leaves.

Slices are assigned by key hash, so a slice is a random sample of the rows. Evicting its older half needs no counters per
step, and reads two rows for every row that leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nonet.embedding import SLICES
from nonet.embedding.tables import BaseTable, RowColumns, join_rows
from nonet.embedding.tiers.hot_rows import HotRows

_PART_SLICES = 64  # A native table exports the rows of this many slices at a time.
_MAX_SAMPLE_ROWS = 1 << 14


class ClockEvictor:
    """A clock hand that moves through the slices of one table."""

    def __init__(self) -> None:
        self._hand = 0  # The next slice to sample.

    def select_oldest(
        self, table: BaseTable, budget: int, needed: np.ndarray, hot: HotRows | None
    ) -> Iterator[RowColumns]:
        """Yield rows to evict until an eighth of the budget is free, or until a full round finds none.

        Args:
            table: The table; the caller deletes the yielded rows from it.
            budget: The maximum number of rows of the table.
            needed: Keys whose rows must stay.
            hot: A tier whose rows must stay.
        """
        excess = len(table) - (budget - budget // 8)  # The number of rows to evict.
        idle_slices = 0  # Slices since the last evicted row.
        while excess > 0 and idle_slices < SLICES:
            start = self._hand
            # Of a sample at most half is evicted.
            sample = self._sample_rows(table, needed, hot, min(2 * excess, _MAX_SAMPLE_ROWS))
            idle_slices += (self._hand - start - 1) % SLICES + 1  # A full round counts as SLICES, not as 0.
            if len(sample.key):
                oldest = np.argsort(sample.step, kind="stable")[: min(-(-len(sample.key) // 2), excess)]
                chosen = np.zeros(len(sample.key), bool)
                chosen[oldest] = True
                yield sample.select(chosen)
                excess, idle_slices = excess - len(oldest), 0

    def _sample_rows(
        self, table: BaseTable, needed: np.ndarray, hot: HotRows | None, sample_rows: int
    ) -> RowColumns:
        """Move the hand over about `sample_rows` rows, at most a round, and return those of them that need not stay."""
        parts, count, start = [], 0, self._hand
        width = count_slices(sample_rows, len(table))  # Slices per read.
        while count < sample_rows:
            stop = min(self._hand + width, SLICES)
            for part in table._iterate_rows(range(self._hand, stop), None):
                parts.append(part)
                count += len(part.key)
            self._hand = stop % SLICES
            if start in range(self._hand, self._hand + width):  # The next read would begin a second round.
                break
        rows = join_rows(parts, table.spec)
        must_stay = np.isin(rows.key, needed)
        if hot is not None:
            must_stay |= hot.contains(rows.key)
        return rows.select(~must_stay)


def count_slices(rows: int, table_rows: int) -> int:
    """Compute how many slices contain about `rows` of a table's rows: a multiple of 64, at least 64."""
    return min(SLICES, max(_PART_SLICES, SLICES * rows // max(1, table_rows) // _PART_SLICES * _PART_SLICES))

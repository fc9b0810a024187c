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

_LEAST_SLICES = 64
_LOOK_ROWS = 1 << 14


class ClockEvictor:
    """A clock hand that moves through the slices of one table."""

    def __init__(self) -> None:
        self._at = 0

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
        excess = len(table) - (budget - budget // 8)
        idle = 0  # Slices since the last evicted row.
        while excess > 0 and idle < SLICES:
            start = self._at
            sample = self._sample_rows(table, needed, hot, min(2 * excess, _LOOK_ROWS))
            idle += (self._at - start - 1) % SLICES + 1
            if len(sample.key):
                oldest = np.argsort(sample.step, kind="stable")[: min(-(-len(sample.key) // 2), excess)]
                chosen = np.zeros(len(sample.key), bool)
                chosen[oldest] = True
                yield sample.select(chosen)
                excess, idle = excess - len(oldest), 0

    def _sample_rows(
        self, table: BaseTable, needed: np.ndarray, hot: HotRows | None, look: int
    ) -> RowColumns:
        """Return about `look` rows that the hand finds next within a round, without those that must stay."""
        parts, count, start = [], 0, self._at
        width = count_slices(look, len(table))
        while count < look:
            stop = min(self._at + width, SLICES)
            for part in table._iterate_rows(range(self._at, stop), None):
                parts.append(part)
                count += len(part.key)
            self._at = stop % SLICES
            if start in range(self._at, self._at + width):
                break
        rows = join_rows(parts, table.spec)
        stays = np.isin(rows.key, needed)
        if hot is not None:
            stays |= hot.contains(rows.key)
        return rows.select(~stays)


def count_slices(rows: int, held: int) -> int:
    """Compute how many slices contain about `rows` of the `held` rows, in whole parts of an export."""
    return min(SLICES, max(_LEAST_SLICES, SLICES * rows // max(1, held) // _LEAST_SLICES * _LEAST_SLICES))

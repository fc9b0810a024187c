"""VersionSearch: which version of a cell each request reads as of its time, found with few calls.

HBase's Thrift 1 server reads many rows as of one time, or all versions of one cell. A request of cell c as of time t may be
answered by any call as of a time T between t and the oldest version of c that is known so far: the call returns the newest
version before T, and where that is still too young, the search goes on from there. So one time serves all cells whose
intervals contain it. Where cells were written together, a round of calls reads one version of every cell, and there are as many
rounds as versions. A group of cells that is smaller than the number of rounds so far is read cell by cell instead.
"""

# Shapes: R requests, S slots (a slot is a row and a column), P pending slots.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

NO_VERSION = np.iinfo(np.int64).min


class VersionSearch:
    """Requests (slot, time), each answered by the newest version of its slot that is strictly older.

    Attributes:
        answer: [R] index into `cells` of the version that answers each request; -1 for none.
        cells: values of versions.
        rounds: rounds of calls so far.
    """

    def __init__(self, slots: np.ndarray, before: np.ndarray, slot_count: int):
        self._slots, self._before = slots, before
        self._pending = np.lexsort((-before, slots))
        self._oldest = np.full(slot_count, np.iinfo(np.int64).max)  # time of the oldest known version [S]
        self.answer = np.full(len(slots), -1, np.int64)
        self.cells: list[bytes] = []
        self.rounds = 0

    def add_versions(self, slots: np.ndarray, cells: list[tuple[bytes, int] | None]) -> None:
        """Record for slots [P] the newest version before the time that was asked about; None where there is none."""
        times = np.array([NO_VERSION if cell is None else cell[1] for cell in cells], np.int64)
        there = times != NO_VERSION
        index = np.where(there, len(self.cells) + np.cumsum(there) - 1, -1)
        self.cells.extend(cell[0] for cell in cells if cell is not None)
        place = np.full(len(self._oldest), -1, np.int64)
        place[slots] = np.arange(len(slots))
        mine = place[self._slots[self._pending]]
        answered = (mine >= 0) & (self._before[self._pending] > times[mine])
        self.answer[self._pending[answered]] = index[mine[answered]]
        self._pending = self._pending[~answered]
        self._oldest[slots] = times

    def add_all_versions(self, slot: int, versions: list[tuple[bytes, int]]) -> None:
        """Record all versions of a slot before the newest time that is pending for it."""
        versions = sorted(versions, key=lambda version: version[1])
        first, last = np.searchsorted(self._slots[self._pending], [slot, slot + 1])
        mine = self._pending[first:last]
        older = np.searchsorted([time for _, time in versions], self._before[mine]) - 1
        self.answer[mine] = np.where(older >= 0, len(self.cells) + older, -1)
        self.cells.extend(value for value, _ in versions)
        self._oldest[slot] = NO_VERSION

    def iterate_groups(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (time, slots [P]) groups that one call can read as of that time; together all slots with pending requests."""
        self._pending = self._pending[self._oldest[self._slots[self._pending]] != NO_VERSION]
        self.rounds += 1
        slots, first = np.unique(self._slots[self._pending], return_index=True)
        low, high = self._before[self._pending[first]], self._oldest[slots]
        order = np.argsort(high, kind="stable")
        start = 0
        sorted_low, sorted_high = low[order].tolist(), high[order].tolist()
        for at in range(1, len(order) + 1):
            if at == len(order) or sorted_low[at] > sorted_high[start]:
                yield max(sorted_low[start:at]), slots[order[start:at]]
                start = at

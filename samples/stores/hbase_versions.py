"""Finds the version of a cell that each request reads as of its time, with few calls to the server (`VersionSearch`).

HBase's Thrift 1 server reads many rows as of one time, or all versions of one cell. A request of slot c as of time t may be
answered by any call as of a time T between t and the oldest version of c that is known so far: the call returns the newest
version before T, and if that is not older than t, the search continues from there. So one time serves all slots whose intervals
contain it. If slots were written together, a round of calls reads one version of every slot, and there are as many rounds as
versions. A group of slots that is not larger than the number of rounds so far is read slot by slot instead (`HBaseStore`).
"""

# Shapes: R requests, S slots (a slot is one column of one row), P slots with pending requests. A cell is a value with its time.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# The time of the oldest known version of a slot that has no older version in the store.
NO_VERSION = np.iinfo(np.int64).min


class VersionSearch:
    """A search for the newest version of each request's slot that is strictly older than the request's time.

    Args:
        slots: The slot of each request [R].
        before: The time of each request [R].
        slot_count: The number of slots, S.

    Attributes:
        answer: [R] index into `cells` of the version that answers each request; -1 for none.
        cells: Values (without their times) of the cells that were read.
        rounds: Number of rounds of calls so far.
    """

    def __init__(self, slots: np.ndarray, before: np.ndarray, slot_count: int):
        self._slots, self._before = slots, before
        # Indices of the requests without an answer, ordered by slot; the newest time of a slot is first.
        self._pending = np.lexsort((-before, slots))
        self._oldest = np.full(slot_count, np.iinfo(np.int64).max)  # Time of the oldest known version [S].
        self.answer = np.full(len(slots), -1, np.int64)
        self.cells: list[bytes] = []
        self.rounds = 0

    def add_versions(self, slots: np.ndarray, cells: list[tuple[bytes, int] | None]) -> None:
        """Add the versions of one call, and answer the pending requests that they answer.

        Args:
            slots: The slots [P] that were read as of one time.
            cells: The (value, time) of the newest version before that time per slot; None if the slot has none.
        """
        times = np.array([NO_VERSION if cell is None else cell[1] for cell in cells], np.int64)
        exists = times != NO_VERSION
        # The index in `self.cells` of each version.
        answer_index = np.where(exists, len(self.cells) + np.cumsum(exists) - 1, -1)
        self.cells.extend(cell[0] for cell in cells if cell is not None)
        read_index_of_slot = np.full(len(self._oldest), -1, np.int64)
        read_index_of_slot[slots] = np.arange(len(slots))
        read_index = read_index_of_slot[self._slots[self._pending]]
        answered = (read_index >= 0) & (self._before[self._pending] > times[read_index])
        self.answer[self._pending[answered]] = answer_index[read_index[answered]]
        self._pending = self._pending[~answered]
        self._oldest[slots] = times

    def add_all_versions(self, slot: int, versions: list[tuple[bytes, int]]) -> None:
        """Add all versions of a slot before its newest pending time, and answer all its requests.

        Args:
            slot: The slot.
            versions: The (value, time) of each version, in any order.
        """
        versions = sorted(versions, key=lambda version: version[1])
        first, last = np.searchsorted(self._slots[self._pending], [slot, slot + 1])
        slot_requests = self._pending[first:last]
        version_index = np.searchsorted([time for _, time in versions], self._before[slot_requests]) - 1
        self.answer[slot_requests] = np.where(version_index >= 0, len(self.cells) + version_index, -1)
        self.cells.extend(value for value, _ in versions)
        self._oldest[slot] = NO_VERSION  # `iterate_groups` removes the slot's requests from the pending ones.

    def iterate_groups(self) -> Iterator[tuple[int, np.ndarray]]:
        """Begin a round: group all slots with pending requests so that one call as of one time serves a group.

        Each slot accepts the times between its newest pending request and its oldest known version. The slots are taken in the
        order of the ends of these intervals, and a group ends before the first slot whose interval begins after the end of the
        group's first one.

        Yields:
            The time and the slots [P] of each group.
        """
        self._pending = self._pending[self._oldest[self._slots[self._pending]] != NO_VERSION]
        self.rounds += 1
        slots, first_request = np.unique(self._slots[self._pending], return_index=True)
        newest_request, oldest_version = self._before[self._pending[first_request]], self._oldest[slots]
        order = np.argsort(oldest_version, kind="stable")
        group_start = 0
        starts, ends = newest_request[order].tolist(), oldest_version[order].tolist()
        for next_slot in range(1, len(order) + 1):
            if next_slot == len(order) or starts[next_slot] > ends[group_start]:
                yield max(starts[group_start:next_slot]), slots[order[group_start:next_slot]]
                group_start = next_slot

"""The admission and eviction policy of the NumPy table: which absent keys get a row, and which rows are removed.

It makes the same decisions as native/policy.h and native/evict.cpp, which explain them, but reads the keys of all rows to
select those that are checked.
"""

# Shapes: N keys, R rows of the table.

from __future__ import annotations

import numpy as np

from nonet.embedding import SLICES, compute_slices, splitmix64
from nonet.embedding.tables.spec import TableSpec

_COUNT_MASK = 0xFFFFFFFF  # The lower 32 bits of a packed admission count are the number of steps.


class AdmissionFilter:
    """Counts the steps in which keys without a row were requested, and draws which of them are admitted."""

    def __init__(self, spec: TableSpec, base: np.uint64):
        self._spec, self._base = spec, base
        self.waiting: dict[int, int] = {}  # Key -> last step << 32 | number of steps.

    def admit(self, keys: np.ndarray, step: int) -> np.ndarray:
        """Decide which of these distinct keys [N] get a row in this step, as bool [N], and count the others."""
        if self._spec.admits_all:
            return np.ones(len(keys), dtype=bool)
        counted = np.array([self._count_step(int(key), step) for key in keys], dtype=np.int64)
        # 24 random bits of (seed, table, key, step).
        draws = splitmix64(splitmix64(keys.astype(np.uint64) ^ ~self._base) + np.uint64(step)) >> np.uint64(
            40
        )
        admitted = (counted >= self._spec.admit_count) & (draws < self._spec.admit_threshold)
        for key in keys[admitted].tolist():
            self.waiting.pop(key, None)
        return admitted

    def expire(self, slices: np.ndarray, oldest: int) -> None:
        """Remove the counts of keys that were last requested before step `oldest`; `slices` is a mask, bool [65536]."""
        keys = np.fromiter(self.waiting, dtype=np.int64, count=len(self.waiting))
        for key in keys[slices[compute_slices(keys)]].tolist():
            if self.waiting[key] >> 32 < oldest:
                del self.waiting[key]

    def _count_step(self, key: int, step: int) -> int:
        """Count this step for a key and return the number of steps counted so far."""
        if self._spec.admit_count <= 1:
            return 1
        packed = self.waiting.get(key, 0)
        count = packed & _COUNT_MASK
        if not packed or packed >> 32 != step:  # Several requests in a step count once.
            count += 1
            self.waiting[key] = (step << 32) | count
        return count


def find_due_slices(ttl_steps: int, before: int, step: int) -> np.ndarray:
    """Select the slices whose rows are checked for age when the table moves to a new step.

    Each slice is selected at least once per quarter of the TTL.

    Args:
        ttl_steps: The TTL in steps.
        before: The previous step.
        step: The new step.

    Returns:
        A mask over all slices, bool [65536].
    """
    # The check moves through all slices four times per TTL.
    start, stop = 4 * SLICES * before // ttl_steps, 4 * SLICES * step // ttl_steps
    mask = np.zeros(SLICES, dtype=bool)
    mask[np.arange(max(start, stop - SLICES), stop) % SLICES] = True
    return mask


def find_expired(spec: TableSpec, keys: np.ndarray, seen: np.ndarray, before: int, step: int) -> np.ndarray:
    """Select the rows that are removed because of their age.

    Args:
        spec: The table's spec.
        keys: Keys of all rows [R].
        seen: The step in which each row was last looked up [R].
        before: The previous step.
        step: The new step.

    Returns:
        The numbers of the rows to remove, int64.
    """
    late = seen < step - spec.ttl_steps
    return np.flatnonzero(late & find_due_slices(spec.ttl_steps, before, step)[compute_slices(keys)])


def find_surplus(
    spec: TableSpec, keys: np.ndarray, seen: np.ndarray, uses: np.ndarray, step: int
) -> np.ndarray:
    """Select the rows that are removed because their group is over its quota.

    Args:
        spec: The table's spec.
        keys: Keys of all rows [R].
        seen: The step in which each row was last looked up [R].
        uses: The number of steps that looked each row up [R].
        step: The current step.

    Returns:
        The numbers of the rows to remove, int64.
    """
    hashes = splitmix64(keys)
    bits = spec.group_bits
    group = (hashes >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(keys), dtype=np.int64)
    sizes = np.bincount(group, minlength=1 << bits)
    # LFU removes the least used rows first, LRU does not regard the uses; among equals, the row seen longest ago.
    weight = np.zeros(len(keys), dtype=np.int64) if spec.evict == "lru" else uses
    surplus_rows = []
    for full_group in np.flatnonzero(sizes > spec.quota):
        # Rows that were prefetched for a later step stay.
        rows = np.flatnonzero((group == full_group) & (seen <= step))
        rows = rows[np.lexsort((hashes[rows], seen[rows], weight[rows]))]
        # Evicting an eighth of the quota more than the surplus makes evictions of a group rare.
        surplus_rows.append(rows[: sizes[full_group] - (spec.quota - spec.quota // 8)])
    return np.concatenate(surplus_rows) if surplus_rows else np.empty(0, dtype=np.int64)

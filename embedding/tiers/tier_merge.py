"""The rows of memory and disk in one order, by slice and key, for exports."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nonet.embedding.tables import EXPORT_ROWS, BaseTable, RowColumns, join_rows, sort_by_slice
from nonet.embedding.tiers.clock import count_slices
from nonet.embedding.tiers.disk_tier import DiskTier


def merge_tiers(host: BaseTable, cold: DiskTier, slices: range, since: int | None) -> Iterator[RowColumns]:
    """Yield the rows of memory and disk by slice and key, at most 65,536 at a time; no key is in both tiers.

    Args:
        host: The table in memory.
        cold: The tier on disk.
        slices: The slices to read.
        since: Only rows that changed after this step; None: all rows.
    """
    pending: list[RowColumns] = []  # Sorted parts that have not been yielded.
    width = count_slices(EXPORT_ROWS, len(host) + len(cold))
    for start in range(slices.start, slices.stop, width):
        pending += _read_slices(host, cold, range(start, min(start + width, slices.stop)), since)
        if sum(len(part.key) for part in pending) >= EXPORT_ROWS:
            yield from _split(join_rows(pending, host.spec))
            pending = []
    if pending:
        yield from _split(join_rows(pending, host.spec))


def _read_slices(host: BaseTable, cold: DiskTier, slices: range, since: int | None) -> list[RowColumns]:
    """Read and sort the rows of these slices from both tiers; return one part, or none if there are no rows."""
    parts = list(host._iterate_rows(slices, since))
    for keys in cold.iterate_keys(slices):
        rows = cold.read(keys)
        parts.append(rows if since is None else rows.select(rows.step > since))
    all_rows = join_rows(parts, host.spec)
    return [sort_by_slice(all_rows)] if len(all_rows.key) else []


def _split(rows: RowColumns) -> Iterator[RowColumns]:
    """Split rows into parts of at most 65,536."""
    for start in range(0, len(rows.key), EXPORT_ROWS):
        chosen = np.zeros(len(rows.key), bool)
        chosen[start : start + EXPORT_ROWS] = True
        yield rows.select(chosen)

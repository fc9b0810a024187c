"""The rows of memory and disk in one order, by slice and key, as an export gives them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nonet.embedding.arrow import RowColumns
from nonet.embedding.base import EXPORT_ROWS, BaseTable
from nonet.embedding.bulk import by_slice, joined
from nonet.embedding.cold import ColdTier
from nonet.embedding.hand import slices_with


def merged(host: BaseTable, cold: ColdTier, slices: range, since: int | None) -> Iterator[RowColumns]:
    """The rows of these slices that changed after `since`, at most 65,536 at a time; no key is in both."""
    waiting: list[RowColumns] = []
    width = slices_with(EXPORT_ROWS, len(host) + len(cold))
    for start in range(slices.start, slices.stop, width):
        waiting += _part(host, cold, range(start, min(start + width, slices.stop)), since)
        if sum(len(part.key) for part in waiting) >= EXPORT_ROWS:
            yield from _cut(joined(waiting, host.spec))
            waiting = []
    if waiting:
        yield from _cut(joined(waiting, host.spec))


def _part(host: BaseTable, cold: ColdTier, slices: range, since: int | None) -> list[RowColumns]:
    parts = list(host._chosen(slices, since))
    for keys in cold.keys(slices):
        rows = cold.read(keys)
        parts.append(rows if since is None else rows.where(rows.step > since))
    every = joined(parts, host.spec)
    return [by_slice(every)] if len(every.key) else []


def _cut(rows: RowColumns) -> Iterator[RowColumns]:
    for start in range(0, len(rows.key), EXPORT_ROWS):
        chosen = np.zeros(len(rows.key), bool)
        chosen[start : start + EXPORT_ROWS] = True
        yield rows.where(chosen)

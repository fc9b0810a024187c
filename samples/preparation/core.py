"""Computes the k-core: the largest set of events in which every item and every user has enough events.

Each pass over the sorted partitions removes the events of items and users that have too few, and subtracts them from the
counts. The first pass that removes nothing is the last one. The result does not depend on the order of removal. Memory is needed
for one count per item and for one partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nonet.errors import DataError
from nonet.samples.preparation.gather import SortedPartition
from nonet.samples.sequences import mask_cold_events, parse_min_events

# Shapes: N events of a partition, I items of the catalogue.
_MASK_FILE = "kept.bin"  # which events of a partition are kept, one bit each


@dataclass(frozen=True, slots=True)
class KCoreResult:
    """The result of the k-core filter.

    Attributes:
        items: Which items are kept [I] bool.
        sizes: Number of kept users and events of each partition.
    """

    items: np.ndarray
    sizes: list[tuple[int, int]]


def compute_k_core(
    partitions: Sequence[SortedPartition],
    n_items: int,
    keep: Mapping[str, int],
    report_rows: Callable[[int], None],
) -> KCoreResult:
    """Compute the k-core of all partitions and write a mask of kept events beside each partition.

    Args:
        partitions: Sorted partitions; their columns are not changed.
        n_items: Number of catalogue rows.
        keep: Minimum `item_events` and `user_events`.
        report_rows: Called with the number of events that were processed.

    Raises:
        DataError: If no event is left.
        ConfigError: If `keep` is not valid.
    """
    min_item_events, min_user_events = parse_min_events(keep)
    counts, event_count = np.zeros(n_items, np.int64), 0  # `counts` are the kept events of each item
    for part in partitions:
        _get_mask_path(part).unlink(missing_ok=True)  # of a preparation that was killed
        item = part.read_column("item", "<i4")
        counts += np.bincount(item, minlength=n_items)
        event_count += len(item)
        report_rows(len(item))
    sizes: list[tuple[int, int]] = []
    # Every user has at least one event, so a minimum of 1 removes nothing.
    has_removed = min_item_events > 0 or min_user_events > 1
    while has_removed:
        has_removed = False
        for part in partitions:
            item = part.read_column("item", "<i4")
            kept_before = read_kept_mask(part, len(item))
            has_frequent_item = (counts >= min_item_events)[item]
            kept = _mask_short_users(part.read_offsets(), kept_before & has_frequent_item, min_user_events)
            removed = kept_before & ~kept
            if removed.any():
                has_removed = True
                counts -= np.bincount(item[removed], minlength=n_items)
                np.packbits(kept).tofile(_get_mask_path(part))
            report_rows(len(item))
    for part in partitions:
        offsets = part.read_offsets()
        sizes.append(_count_kept(offsets, read_kept_mask(part, int(offsets[-1]))))
    if not sum(kept_events for _, kept_events in sizes):
        raise DataError(f"keep {dict(keep)} leaves none of {event_count} interactions. Ask for fewer events.")
    return KCoreResult(counts >= min_item_events, sizes)


def drop_cold_events(
    partitions: Sequence[SortedPartition], core: KCoreResult, is_cold: np.ndarray, split: Mapping[str, Any]
) -> KCoreResult:
    """Leave out the training events of items that are held out whole: change the mask beside each partition.

    Args:
        partitions: Sorted partitions.
        core: Result of the k-core filter.
        is_cold: Which items are held out whole [I] bool.
        split: Options of the split.
    """
    sizes = []
    for part in partitions:
        offsets = part.read_offsets()
        kept = read_kept_mask(part, int(offsets[-1]))
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])[offsets]
        item, time = part.read_column("item", "<i4")[kept], part.read_column("time", "<i8")[kept]
        kept[kept] = mask_cold_events(before, time, is_cold[item], split)
        np.packbits(kept).tofile(_get_mask_path(part))
        sizes.append(_count_kept(offsets, kept))
    return KCoreResult(core.items, sizes)


def read_kept_mask(part: SortedPartition, event_count: int) -> np.ndarray:
    """Return which of the `event_count` events of a partition are kept, [N] bool; all if there is no mask file."""
    if not _get_mask_path(part).exists():
        return np.ones(event_count, bool)
    return np.unpackbits(np.fromfile(_get_mask_path(part), np.uint8), count=event_count).astype(bool)


def _count_kept(offsets: np.ndarray, kept: np.ndarray) -> tuple[int, int]:
    """Return the number of users with kept events, and of kept events, given which events [N] are kept."""
    has_events = np.add.reduceat(kept, offsets[:-1], dtype=np.int64) > 0 if len(kept) else kept
    return int(has_events.sum()), int(kept.sum())


def _mask_short_users(offsets: np.ndarray, kept: np.ndarray, min_user_events: int) -> np.ndarray:
    """Return the mask `kept` [N] without the events of users that have fewer than `min_user_events` kept events."""
    if not len(kept):
        return kept
    events_by_user = np.add.reduceat(kept, offsets[:-1], dtype=np.int64)
    return kept & np.repeat(events_by_user >= min_user_events, np.diff(offsets))


def _get_mask_path(part: SortedPartition) -> Path:
    return part.folder / _MASK_FILE

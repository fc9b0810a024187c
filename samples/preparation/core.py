"""Computes the k-core: the largest set of events in which every item and every user has enough events.

Each pass over the sorted partitions removes the events of items and users that have too few, and subtracts them from the
counts. The first pass that removes nothing is the last one. The result does not depend on the order of removal. Memory
holds one count per item and one partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nonet.errors import DataError
from nonet.samples.preparation.gather import SortedPartition
from nonet.samples.sequences import parse_min_events

# Shapes: N events of a partition, I items of the catalogue.
_KEPT = "kept.bin"


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
        keep: Least `item_events` and `user_events`.
        report_rows: Called with the number of events that were processed.

    Raises:
        DataError: If no event is left.
        ConfigError: If `keep` is not valid.
    """
    item_least, user_least = parse_min_events(keep)
    counts, events = np.zeros(n_items, np.int64), 0
    for part in partitions:
        _get_mask_path(part).unlink(missing_ok=True)
        item = part.read_column("item", "<i4")
        counts += np.bincount(item, minlength=n_items)
        events += len(item)
        report_rows(len(item))
    sizes: list[tuple[int, int]] = []
    took = item_least > 0 or user_least > 1
    while took:
        took = False
        for part in partitions:
            item = part.read_column("item", "<i4")
            before = read_kept_mask(part, len(item))
            after = _mask_short_users(part.read_offsets(), before & (counts >= item_least)[item], user_least)
            gone = before & ~after
            if gone.any():
                took = True
                counts -= np.bincount(item[gone], minlength=n_items)
                np.packbits(after).tofile(_get_mask_path(part))
            report_rows(len(item))
    for part in partitions:
        offsets = part.read_offsets()
        kept = read_kept_mask(part, int(offsets[-1]))
        users = np.add.reduceat(kept, offsets[:-1], dtype=np.int64) > 0 if len(kept) else kept
        sizes.append((int(users.sum()), int(kept.sum())))
    if not sum(n for _, n in sizes):
        raise DataError(f"keep {dict(keep)} leaves none of {events} interactions. Ask for fewer events.")
    return KCoreResult(counts >= item_least, sizes)


def read_kept_mask(part: SortedPartition, events: int) -> np.ndarray:
    """Return which events of a partition are kept [N] bool."""
    if not _get_mask_path(part).exists():
        return np.ones(events, bool)
    return np.unpackbits(np.fromfile(_get_mask_path(part), np.uint8), count=events).astype(bool)


def _mask_short_users(offsets: np.ndarray, kept: np.ndarray, user_least: int) -> np.ndarray:
    """Remove the events of users with fewer than `user_least` kept events from a mask [N]."""
    if not len(kept):
        return kept
    events = np.add.reduceat(kept, offsets[:-1], dtype=np.int64)
    return kept & np.repeat(events >= user_least, np.diff(offsets))


def _get_mask_path(part: SortedPartition) -> Path:
    return part.folder / _KEPT

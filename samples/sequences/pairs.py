"""Counts co-occurrences of items, one range of source items at a time, so that memory does not grow with the events.

For each part of the users, every pair is packed into one int64 code (source, other, distance) and assigned to the range that
contains its source. Codes stay in memory if there is only one range, otherwise they are written to one file per range. A range is
then sorted and the weights of equal pairs are summed, by distance, then in the order of events, so the result is bit-identical
for any number of ranges.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nonet.samples.sequences.sequences import Sequences

# Shapes: N events of a part, E pairs, I items.
RANGE_PAIRS = 1 << 24  # approximate number of pairs in a range
_SPILLED_PAIRS = 3 << 21  # approximate number of pairs in memory at once if they are written to files
EventSelector = Callable[["Sequences"], np.ndarray]
"""Returns which events of a part are counted, [N] bool."""


@dataclass(frozen=True, slots=True)
class PairCounter:
    """Counts pairs of a user's selected events that are at most `reach` apart in the selected subsequence.

    Attributes:
        n_items: Number of items I.
        reach: Largest distance of a pair.
        weight_by_distance: Weight of a pair at the distances 1, 2, ... [reach].
        both: Whether each pair is also counted with the later event as the source.
        reverse: Weight of the pair with the later event as the source, relative to the pair itself; 0 to not count it. Not with
            `both`, which sums the weights of both directions in another order.
        compute_decay: Maps the later event's unix seconds [E] to a factor of the weight; None for 1.
    """

    n_items: int
    reach: int
    weight_by_distance: np.ndarray
    both: bool = False
    reverse: float = 0.0
    compute_decay: Callable[[np.ndarray], np.ndarray] | None = None

    def count_ranges(
        self,
        seq: Sequences,
        select_events: EventSelector,
        *,
        range_pairs: int = RANGE_PAIRS,
        folder: Path | None = None,
    ) -> Iterator[tuple[range, np.ndarray, np.ndarray]]:
        """Yield the counts of one range of source items after the other.

        Args:
            seq: The sequences.
            select_events: Returns which events of a part are counted [N] bool.
            range_pairs: Approximate number of pairs in a range.
            folder: Folder for files if there is more than one range; by default the system's temporary folder.

        Yields:
            The range of sources, source * I + other [E] ascending, and the summed weights of these pairs [E] float64.
        """
        bounds = self._compute_bounds(seq, select_events, range_pairs)
        if len(bounds) == 2:
            parts = [self._encode_pairs(part, select_events) for part in seq.iterate_parts()]
            codes, decay = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            yield range(self.n_items), *self._sum_weights(codes, decay)
            return
        spill_folder = Path(tempfile.mkdtemp(prefix="pairs-", dir=folder))
        try:
            for part in seq.iterate_parts(max(1, _SPILLED_PAIRS // (self.reach * self._n_directions))):
                self._spill_codes(spill_folder, bounds, *self._encode_pairs(part, select_events))
            for number in range(len(bounds) - 1):
                codes = _read_and_delete(spill_folder / f"{number}.codes").view(np.int64)
                decay = _read_and_delete(spill_folder / f"{number}.decay")
                items = range(int(bounds[number]), int(bounds[number + 1]))
                yield items, *self._sum_weights(codes, decay)
        finally:
            shutil.rmtree(spill_folder, ignore_errors=True)

    @property
    def _distance_bits(self) -> int:
        """The number of low bits of a code that hold the distance; `reach` is added to that of a reversed pair."""
        return (2 * self.reach if self.reverse else self.reach).bit_length()

    @property
    def _n_directions(self) -> int:
        """Number of counts of a pair: 2 if pairs with the later event as the source are counted too, else 1."""
        return 2 if self.both or self.reverse else 1

    def _compute_bounds(self, seq: Sequences, select_events: EventSelector, range_pairs: int) -> np.ndarray:
        """Return the items at which ranges begin, and the end, so that ranges have about equally many pairs."""
        occurrences = np.zeros(self.n_items, np.int64)
        for part in seq.iterate_parts():
            occurrences += np.bincount(part.item[select_events(part)], minlength=self.n_items)
        cumulative_pairs = np.cumsum(occurrences) * self.reach * self._n_directions
        total = int(cumulative_pairs[-1]) if len(cumulative_pairs) else 0
        thresholds = np.arange(1, -(-total // range_pairs)) * range_pairs
        inner = np.unique(np.searchsorted(cumulative_pairs, thresholds) + 1)
        return np.array([0, *inner[(inner > 0) & (inner < self.n_items)].tolist(), self.n_items])

    def _encode_pairs(self, part: Sequences, select_events: EventSelector) -> tuple[np.ndarray, np.ndarray]:
        """Return the packed code of each pair [E], and its decay factor [E] (empty without decay)."""
        mask = select_events(part)
        item, user = part.item[mask].astype(np.int64), part.user[mask]
        time = part.time[mask] if self.compute_decay is not None else None
        codes, decay = [np.empty(0, np.int64)], [np.empty(0)]
        for distance in range(1, self.reach + 1):
            same_user = user[distance:] == user[:-distance]
            earlier, later = item[:-distance][same_user], item[distance:][same_user]
            codes.append((earlier * self.n_items + later) << self._distance_bits | distance)
            if self._n_directions == 2:
                code = distance if self.both else self.reach + distance
                codes.append((later * self.n_items + earlier) << self._distance_bits | code)
            if self.compute_decay is not None and time is not None:
                decay += [self.compute_decay(time[distance:][same_user])] * self._n_directions
        return np.concatenate(codes), np.concatenate(decay)

    def _spill_codes(self, folder: Path, bounds: np.ndarray, codes: np.ndarray, decay: np.ndarray) -> None:
        """Append codes and decay factors to the files of their ranges."""
        source = (codes >> self._distance_bits) // self.n_items
        range_number = (np.searchsorted(bounds, source, "right") - 1).astype(np.uint16)
        order = np.argsort(range_number, kind="stable")
        counts = np.bincount(range_number, minlength=len(bounds) - 1)
        starts = np.concatenate([[0], np.cumsum(counts)])
        for kind, values in (("codes", codes), ("decay", decay)):
            if not len(values):
                continue
            values = values[order]
            for number in np.flatnonzero(counts).tolist():
                with (folder / f"{number}.{kind}").open("ab") as out:
                    values[starts[number] : starts[number + 1]].tofile(out)

    def _sum_weights(self, codes: np.ndarray, decay: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct pairs, as source * I + other in ascending order, and the sum of each pair's weights."""
        if len(decay):
            order = np.argsort(codes, kind="stable")
            codes, decay = codes[order], decay[order]
        else:
            codes = np.sort(codes)
        key = codes >> self._distance_bits
        distance = codes & (1 << self._distance_bits) - 1
        weight_by_distance = np.asarray(self.weight_by_distance, np.float64)
        if self.reverse:
            weight_by_distance = np.concatenate([weight_by_distance, self.reverse * weight_by_distance])
        weight = weight_by_distance[distance - 1]
        if len(decay):
            weight = decay * weight
        is_first = np.concatenate([[True], key[1:] != key[:-1]]) if len(key) else np.empty(0, bool)
        sums = np.bincount(np.cumsum(is_first) - 1, weights=weight, minlength=0)
        return key[is_first], sums


def find_top_neighbours(
    key: np.ndarray, score: np.ndarray, n_items: int, max_neighbours: int, n_sources: int
) -> np.ndarray:
    """Find the pairs with the largest scores of each source; ties prefer the lower item.

    Args:
        key: source * n_items + other [E], ascending.
        score: Score of each pair [E].
        n_items: Number of items.
        max_neighbours: Maximum number of pairs that are kept per source.
        n_sources: Number of sources.

    Returns:
        The ascending indices of the kept pairs.
    """
    source = key // n_items
    first = np.searchsorted(source, np.arange(n_sources + 1))
    if np.diff(first).max(initial=0) <= max_neighbours:
        return np.arange(len(key))
    order = np.lexsort((key, -score, source))
    rank_in_source = np.arange(len(key)) - first[source]  # sorting keeps the sources' ranges in place
    return np.sort(order[rank_in_source < max_neighbours])


def _read_and_delete(file: Path) -> np.ndarray:
    """Read a file as float64 and delete it; an empty array if there is no file."""
    if not file.exists():
        return np.empty(0)
    values = np.fromfile(file)
    file.unlink()
    return values

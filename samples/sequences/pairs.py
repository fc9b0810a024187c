"""Counts co-occurrences of items, one range of source items at a time, so that memory does not grow with the events.

For each part of the users, every pair is packed into one int64 (source, other, distance) and assigned to a range of its
source: in memory if there are few, in files otherwise. A range is then sorted and equal codes are counted. Terms are summed
by distance, then in the order of events, so the result is bit-identical for any number of ranges.
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

# Shapes: N events of a part, F of them counted, E pairs, I items.
RANGE_PAIRS = 1 << 24  # approximate number of pairs in a range
Chosen = Callable[["Sequences"], np.ndarray]
"""Which events of a part are counted [N] bool."""


@dataclass(frozen=True, slots=True)
class PairCounter:
    """Counts pairs of a user's selected events that are at most `reach` apart in the selected subsequence.

    Attributes:
        n_items: Number of items.
        reach: Largest distance of a pair.
        worth: Weight of a pair by its distance [reach].
        both: Whether (later, earlier) counts as well.
        fade: Maps the later event's unix seconds [E] to a decay factor; None for 1.
    """

    n_items: int
    reach: int
    worth: np.ndarray
    both: bool = False
    fade: Callable[[np.ndarray], np.ndarray] | None = None

    def count_ranges(
        self,
        seq: Sequences,
        select_events: Chosen,
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
            codes, fade = (np.concatenate(each) for each in zip(*parts, strict=True))
            yield range(self.n_items), *self._sum_weights(codes, fade)
            return
        aside = Path(tempfile.mkdtemp(prefix="pairs-", dir=folder))
        try:
            for part in seq.iterate_parts(1 << 21):
                self._spill_codes(aside, bounds, *self._encode_pairs(part, select_events))
            for number in range(len(bounds) - 1):
                codes, fade = (_read_and_delete(aside / f"{number}.{kind}") for kind in ("codes", "faded"))
                items = range(int(bounds[number]), int(bounds[number + 1]))
                yield items, *self._sum_weights(codes.view(np.int64), fade)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    @property
    def _bits(self) -> int:
        return self.reach.bit_length()

    def _compute_bounds(self, seq: Sequences, chosen: Chosen, range_pairs: int) -> np.ndarray:
        """Return the items at which ranges begin, and the end, so that ranges have about equally many pairs."""
        occurs = np.zeros(self.n_items, np.int64)
        for part in seq.iterate_parts():
            occurs += np.bincount(part.item[chosen(part)], minlength=self.n_items)
        pairs = np.cumsum(occurs) * self.reach * (2 if self.both else 1)
        total = int(pairs[-1]) if len(pairs) else 0
        cuts = np.arange(1, -(-total // range_pairs)) * range_pairs
        inner = np.unique(np.searchsorted(pairs, cuts) + 1)
        return np.array([0, *inner[(inner > 0) & (inner < self.n_items)].tolist(), self.n_items])

    def _encode_pairs(self, part: Sequences, chosen: Chosen) -> tuple[np.ndarray, np.ndarray]:
        """Return the packed code of each pair [E], and its decay factor [E] (empty without decay)."""
        mask = chosen(part)
        item, user = part.item[mask].astype(np.int64), part.user[mask]
        time = part.time[mask] if self.fade is not None else None
        codes, faded = [np.empty(0, np.int64)], [np.empty(0)]
        for step in range(1, self.reach + 1):
            same = user[step:] == user[:-step]
            one, other = item[:-step][same], item[step:][same]
            codes.append((one * self.n_items + other) << self._bits | step)
            if self.both:
                codes.append((other * self.n_items + one) << self._bits | step)
            if self.fade is not None and time is not None:
                faded += [self.fade(time[step:][same])] * (2 if self.both else 1)
        return np.concatenate(codes), np.concatenate(faded)

    def _spill_codes(self, folder: Path, bounds: np.ndarray, codes: np.ndarray, faded: np.ndarray) -> None:
        """Append codes and decay factors to the files of their ranges."""
        source = (codes >> self._bits) // self.n_items
        number = (np.searchsorted(bounds, source, "right") - 1).astype(np.uint16)
        order = np.argsort(number, kind="stable")
        cuts = np.concatenate([[0], np.cumsum(np.bincount(number, minlength=len(bounds) - 1))])
        for kind, values in (("codes", codes), ("faded", faded)):
            if not len(values):
                continue
            values = values[order]
            for place in np.flatnonzero(np.diff(cuts)).tolist():
                with (folder / f"{place}.{kind}").open("ab") as out:
                    values[cuts[place] : cuts[place + 1]].tofile(out)

    def _sum_weights(self, codes: np.ndarray, faded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum the weights of equal pairs. Returns the pairs, ascending, and the sums."""
        if len(faded):
            order = np.argsort(codes, kind="stable")
            codes, faded = codes[order], faded[order]
        else:
            codes = np.sort(codes)
        key = codes >> self._bits
        worth = np.asarray(self.worth, np.float64)[(codes & (1 << self._bits) - 1) - 1]
        if len(faded):
            worth = faded * worth
        first = np.concatenate([[True], key[1:] != key[:-1]]) if len(key) else np.empty(0, bool)
        count = np.bincount(np.cumsum(first) - 1, weights=worth, minlength=0)
        return key[first], count


def select_top_neighbours(
    key: np.ndarray, count: np.ndarray, n_items: int, max_neighbours: int, n_sources: int
) -> tuple[np.ndarray, np.ndarray]:
    """Select the largest counts of each source, ordered by source, then item; ties prefer the lower item.

    Args:
        key: source * n_items + other [E], ascending.
        count: Count of each pair [E].
        n_items: Number of items.
        max_neighbours: Neighbours to keep per source.
        n_sources: Number of sources.
    """
    source = key // n_items
    first = np.searchsorted(source, np.arange(n_sources + 1))
    if np.diff(first).max(initial=0) <= max_neighbours:
        return key, count
    order = np.lexsort((key, -count, source))
    chosen = np.sort(order[np.arange(len(key)) - first[source] < max_neighbours])
    return key[chosen], count[chosen]


def _read_and_delete(file: Path) -> np.ndarray:
    """Read a file as float64 and delete it; an empty array if there is no file."""
    if not file.exists():
        return np.empty(0)
    values = np.fromfile(file)
    file.unlink()
    return values

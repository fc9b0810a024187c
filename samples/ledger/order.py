"""The order of rows in an epoch, and how an epoch is cut into global steps and slices.

An epoch is a seeded permutation of the row groups; rows within a group may be permuted too. A global step takes consecutive
places of that order and is cut into slices; slice i of a step goes to rank i mod world. So the order depends on the data,
the seed and the step, but not on the number of ranks. Only the groups that a step touches are permuted: 50,000 rows take
0.4 ms.
"""

# Shapes: G row groups, N rows.

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from nonet.errors import ConfigError
from nonet.random import rng

GROUP_ROWS = 1 << 16
"""Rows of a group where the data have no row groups of their own."""


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The order of rows.

    Attributes:
        group_rows: Rows of each group [G].
        seed: Seed of the permutations; None for the files' own order.
        name: Name that the permutations are drawn for.
        in_group: Whether rows are permuted within their group.
    """

    group_rows: np.ndarray
    seed: int | None
    name: str = ""
    in_group: bool = True

    @classmethod
    def from_rows(cls, rows: int, seed: int, name: str) -> RowOrder:
        """Create the order of rows without groups; every 65,536 of them form one."""
        whole, rest = divmod(rows, GROUP_ROWS)
        return cls(np.array([GROUP_ROWS] * whole + [rest] * bool(rest), np.int64), seed, name)

    def rename(self, name: str) -> RowOrder:
        """Return the order of the same rows that is drawn for another name."""
        return RowOrder(self.group_rows, self.seed, name, self.in_group)

    @property
    def permutes(self) -> bool:
        """Whether rows change places within their groups."""
        return self.seed is not None and self.in_group

    @cached_property
    def rows(self) -> int:
        """Rows of an epoch."""
        return int(self.group_rows.sum())

    @cached_property
    def digest(self) -> str:
        """A hash of everything that the order depends on."""
        facts = repr((self.group_rows.tolist(), self.seed, self.name, self.in_group))
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def hash_steps(self, step_rows: int) -> str:
        """Return a hash of everything that decides which rows a global step of `step_rows` reads."""
        facts = repr((self.digest, "step rows", step_rows))
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    @cached_property
    def _firsts(self) -> np.ndarray:
        return np.cumsum(self.group_rows) - self.group_rows

    def iterate_parts(self, epoch: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (group, first, past the last) for the places [start, stop) of an epoch, as places in each group's own order."""
        groups, ends = self._order_groups(epoch)
        at = int(np.searchsorted(ends, start, "right"))
        while start < stop:
            group, end = int(groups[at]), int(ends[at])
            begin = end - int(self.group_rows[group])
            upto = min(stop, end)
            if upto > start:
                yield group, start - begin, upto - begin
            start, at = upto, at + 1

    def get_group_order(self, epoch: int, group: int) -> np.ndarray | None:
        """Return the row order of a group [rows of the group]; None if it is the file's own."""
        if self.seed is None or not self.in_group:
            return None
        return _permute_rows(self.seed, self.name, epoch, group, int(self.group_rows[group]))

    def get_rows(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the rows [N] at the places [start, stop) of an epoch, numbered over all groups."""
        pieces = [np.zeros(0, np.int64)]
        for group, first, last in self.iterate_parts(epoch, start, stop):
            within = self.get_group_order(epoch, group)
            rows = np.arange(first, last) if within is None else within[first:last]
            pieces.append(rows + self._firsts[group])
        return np.concatenate(pieces)

    def _order_groups(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the groups in the order of an epoch, and the end of each."""
        if not hasattr(self, "_epochs"):
            object.__setattr__(self, "_epochs", {})
        epochs: dict[int, tuple[np.ndarray, np.ndarray]] = self._epochs  # type: ignore[attr-defined]
        if epoch not in epochs:
            count = len(self.group_rows)
            groups = np.arange(count)
            if self.seed is not None and count > 1:
                groups = rng(self.seed, self.name, epoch, "groups").permutation(count)
            epochs[epoch] = groups, np.cumsum(self.group_rows[groups])
            while len(epochs) > 4:
                epochs.pop(next(iter(epochs)))
        return epochs[epoch]


@lru_cache(maxsize=8)
def _permute_rows(seed: int, name: str, epoch: int, group: int, rows: int) -> np.ndarray:
    order = rng(seed, name, epoch, "order", *([group] if group else [])).permutation(rows)
    order.flags.writeable = False
    return order


@dataclass(frozen=True, slots=True)
class OrderSlice:
    """The unit that is leased, read and done: places [start, stop) of an epoch's order, the `part`-th part of a global step."""

    step: int
    part: int
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class EpochSteps:
    """Cuts epochs of `rows` into global steps of `step_rows` (the last may be short), and these into slices of `slice_rows`."""

    rows: int
    step_rows: int
    slice_rows: int

    def __post_init__(self) -> None:
        if min(self.rows, self.step_rows, self.slice_rows) < 1:
            raise ConfigError(
                f"{self.rows} rows in steps of {self.step_rows} and slices of {self.slice_rows}: each must be at least 1."
            )

    @property
    def an_epoch(self) -> int:
        """Number of steps that read every row once."""
        return -(-self.rows // self.step_rows)

    def get_places(self, step: int) -> tuple[int, int, int]:
        """Return (epoch, first place, past the last) of a global step, counted from 0."""
        epoch, at = divmod(step, self.an_epoch)
        start = at * self.step_rows
        return epoch, start, min(start + self.step_rows, self.rows)

    def cut_slices(self, step: int) -> list[OrderSlice]:
        """Return the slices of a global step."""
        epoch, start, stop = self.get_places(step)
        cuts = range(start, stop, self.slice_rows)
        return [
            OrderSlice(step, part, epoch, cut, min(cut + self.slice_rows, stop))
            for part, cut in enumerate(cuts)
        ]


@dataclass(frozen=True, slots=True)
class StepRange:
    """A rank's slices of the global steps from `first_step` up to `last_step` (None: endless), created on demand."""

    steps: EpochSteps
    first_step: int
    last_step: int | None
    rank: int
    world: int

    def __iter__(self) -> Iterator[OrderSlice]:
        step = self.first_step
        while self.last_step is None or step < self.last_step:
            yield from self.steps.cut_slices(step)[self.rank :: self.world]
            step += 1

    def iterate_epochs(self) -> Iterator[StepRange]:
        """Yield the range epoch by epoch."""
        first, an_epoch = self.first_step, self.steps.an_epoch
        while self.last_step is None or first < self.last_step:
            end = (first // an_epoch + 1) * an_epoch
            last = end if self.last_step is None else min(end, self.last_step)
            yield StepRange(self.steps, first, last, self.rank, self.world)
            first = last

    def iterate_starting_in(self, start: int, stop: int) -> Iterator[OrderSlice]:
        """Yield the slices of a range within one epoch that start at its places [start, stop)."""
        first_of_epoch = self.first_step // self.steps.an_epoch * self.steps.an_epoch
        first = max(self.first_step, first_of_epoch + start // self.steps.step_rows)
        last = first_of_epoch + -(-stop // self.steps.step_rows)
        last = last if self.last_step is None else min(last, self.last_step)
        for part in StepRange(self.steps, first, last, self.rank, self.world):
            if start <= part.start < stop:
                yield part

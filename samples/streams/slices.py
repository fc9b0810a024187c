"""The slices of an opened stream: where the rows of each one are, and how they are read.

The content of a slice depends on the slice alone, so both engines and any number of ranks give the same rows in the same
order.
"""

# Shapes: B rows of a slice.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError, DataError
from nonet.samples.ledger import DataManifest, EpochSteps, OrderSlice
from nonet.samples.streams.leaf import DecodedGroup, StreamLeaf
from nonet.samples.streams.node_groups import get_node_groups
from nonet.samples.streams.operators import ComposedOperators, compose_operators
from nonet.samples.streams.plan import StreamPlan, schedule_turns
from nonet.types import RowRange

ReadGroup = Callable[[int, int], DecodedGroup]  # (leaf, row group) -> decoded group


@dataclass(frozen=True)
class GroupPart:
    """Places [first, last) of a row group's own order, in one leaf.

    Attributes:
        leaf: Index of the leaf.
        epoch: Epoch of the leaf.
        group: Index of the row group among those of the leaf that are read.
        first: First place in the group.
        last: Place past the last one.
        places: Places of these rows in the stream's order [B].
    """

    leaf: int
    epoch: int
    group: int
    first: int
    last: int
    places: np.ndarray


@dataclass(frozen=True)
class RawSlice:
    """The rows of a slice before the stream's operators, with their counts."""

    slice: OrderSlice
    rows: pa.RecordBatch
    ranges: tuple[RowRange, ...] = ()
    read: int = 0
    skipped: tuple[int, ...] = ()


class SliceReader:
    """Locates and reads the slices of a stream.

    Args:
        stream: The stream.
        rows: Rows of a slice.
        step_rows: Rows of a global step.
        manifest: The files as an earlier opening found them; None to inspect them.
        name: What the order is drawn for beside the seed, such as a stage.

    Attributes:
        stream: The stream.
        leaves: The inspected files of each stream of a mixture, or of the one stream.
        rows: Rows of an epoch.
        steps: The global steps of an epoch and their slices.
    """

    def __init__(
        self, stream: StreamPlan, rows: int, step_rows: int, manifest: DataManifest | None, name: str = ""
    ):
        self.stream = stream
        streams = [part for part, _ in stream.mixed] or [stream]
        if manifest is not None and len(streams) > 1:
            raise ConfigError("open: a manifest belongs to one stream; a mixture finds its own files")
        drawn_for = f"{name} samples" if name else "samples"
        self.leaves = [
            StreamLeaf(each, f"{drawn_for} {number}", manifest) for number, each in enumerate(streams)
        ]
        self._turns = schedule_turns([share for _, share in stream.mixed]) if stream.mixed else None
        whole = self._count_epoch_rows()
        self.rows = whole if stream.most is None else min(whole, stream.most)
        self.steps = EpochSteps(self.rows, step_rows, rows)

    @cached_property
    def manifest(self) -> DataManifest:
        """The files of all streams, in the order of the streams."""
        return DataManifest(tuple(file for leaf in self.leaves for file in leaf.manifest.files))

    @cached_property
    def works(self) -> bool:
        """Whether a slice is more than a view of its row group: operators, filters or a shuffle within groups apply."""
        leaves = (leaf.stream.operators or leaf.files.where or leaf.order.permutes for leaf in self.leaves)
        return bool(self.stream.operators) or len(self.leaves) > 1 or any(leaves)

    def compute_row_ids(self, part: OrderSlice) -> np.ndarray:
        """Return the 64-bit ids [B] of a slice's rows in the order of their places."""
        ids, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for each in self.locate_parts(part):
            leaf = self.leaves[each.leaf]
            group = int(leaf.groups[each.group]) + self._get_first_group(each.leaf)
            ids.append(self.manifest.compute_row_ids(group, self._get_part_rows(each)))
            places.append(each.places)
        return np.concatenate(ids)[np.argsort(np.concatenate(places), kind="stable")]

    def read_group(self, leaf: int, group: int, shared: bool = False) -> DecodedGroup:
        """Return a decoded row group of a leaf; a `shared` one is decoded once on this machine. Raises DataError."""
        each = self.leaves[leaf]
        groups = get_node_groups(each.digest) if shared else None
        if groups is None:
            return each.read(group)
        return groups.read(str(int(each.groups[group])), lambda: each.read(group))

    def locate_parts(self, part: OrderSlice) -> list[GroupPart]:
        """Return where the rows of a slice are."""
        if self._turns is None:
            return list(self._iterate_leaf_parts(0, part.epoch, part.start, np.arange(part.start, part.stop)))
        first = part.epoch * self.rows + part.start
        places = np.arange(first, first + part.stop - part.start)
        turns = self._turns[places % len(self._turns)]
        found: list[GroupPart] = []
        for number, leaf in enumerate(self.leaves):
            mine = places[turns == number] - part.epoch * self.rows
            start, size = self._count_rows_before(number, first), leaf.order.rows
            while len(mine):
                epoch, at = divmod(start, size)
                now = min(len(mine), size - at)
                found += self._iterate_leaf_parts(number, epoch, at, mine[:now])
                mine, start = mine[now:], start + now
        return found

    def read_slice(self, part: OrderSlice, read: ReadGroup) -> RawSlice:
        """Read a slice's rows, before the operators of the whole stream.

        Args:
            part: The slice.
            read: Returns a decoded row group, given leaf and group.

        Raises:
            DataError: If rows cannot be read, or mixed streams have different columns.
        """
        tables, skipped, count = [], [], 0
        for each in self.locate_parts(part):
            group = read(each.leaf, each.group)
            rows = self._get_part_rows(each) if group.keep is not None or self._is_shuffled(each) else None
            count += each.last - each.first
            if group.bad is not None and rows is not None:
                skipped += each.places[group.bad[rows]].tolist()
            if group.rows is None:
                continue
            tables.append(self._apply_leaf_operators(each.leaf, _pick_rows(group, each, rows)))
        if not tables:
            leaf = self.leaves[0]
            tables = [
                pa.RecordBatch.from_pylist(
                    [], leaf.schema if leaf.files.columns is None else _select_schema(leaf)
                )
            ]
        try:
            rows_of_slice = tables[0] if len(tables) == 1 else pa.concat_batches(tables)
        except pa.ArrowException as error:
            raise DataError(f"the mixed streams have unlike columns: {str(error).splitlines()[0]}") from None
        return RawSlice(part, rows_of_slice, self.get_row_ranges(part), count, tuple(skipped))

    def get_row_ranges(self, part: OrderSlice) -> tuple[RowRange, ...]:
        """Return a slice as ranges of physical rows; empty if rows are shuffled within groups, see `compute_row_ids`."""
        parts = self.locate_parts(part)
        return (
            ()
            if any(self._is_shuffled(each) for each in parts)
            else tuple(self._get_row_range(each) for each in parts)
        )

    def apply_operators(self, raw: RawSlice, work: ComposedOperators) -> RawSlice:
        """Apply the stream's operators to a slice. Raises DataError that names the rows."""
        try:
            return RawSlice(raw.slice, work(raw.rows), raw.ranges, raw.read, raw.skipped)
        except DataError as error:
            first = int(self.compute_row_ids(raw.slice)[0])
            raise DataError(
                f"{error}; in a slice of {raw.read} rows, the first: {self.manifest.describe_row(first)}"
            ) from error

    def _count_epoch_rows(self) -> int:
        """Return the rows of an epoch; a mixture's epoch ends when its longest stream was read once."""
        if self._turns is None:
            return self.leaves[0].order.rows
        return max(
            round(leaf.order.rows / share)
            for leaf, (_, share) in zip(self.leaves, self.stream.mixed, strict=True)
        )

    def _iterate_leaf_parts(
        self, leaf: int, epoch: int, start: int, places: np.ndarray
    ) -> Iterator[GroupPart]:
        at = 0
        for group, first, last in self.leaves[leaf].order.iterate_parts(epoch, start, start + len(places)):
            yield GroupPart(leaf, epoch, group, first, last, places[at : at + last - first])
            at += last - first

    def _count_rows_before(self, leaf: int, place: int) -> int:
        """Count the rows of a leaf before a place of the endless mixture."""
        assert self._turns is not None
        rounds, rest = divmod(place, len(self._turns))
        mine = self._turns == leaf
        return rounds * int(mine.sum()) + int(mine[:rest].sum())

    def _is_shuffled(self, part: GroupPart) -> bool:
        return self.leaves[part.leaf].order.permutes

    def _get_part_rows(self, part: GroupPart) -> np.ndarray:
        """Return the rows of the group that a part reads."""
        within = self.leaves[part.leaf].order.get_group_order(part.epoch, part.group)
        return np.arange(part.first, part.last) if within is None else within[part.first : part.last]

    def _apply_leaf_operators(self, leaf: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Apply a mixed stream's own operators."""
        if self._turns is None:
            return rows
        return compose_operators(self.leaves[leaf].stream.operators)(rows)

    def _get_first_group(self, leaf: int) -> int:
        """Return the number of a leaf's first row group in the manifest of all leaves."""
        return sum(len(each.manifest.group_rows) for each in self.leaves[:leaf])

    def _get_row_range(self, part: GroupPart) -> RowRange:
        """Return the physical rows of a part whose group is not shuffled."""
        group = int(self.leaves[part.leaf].groups[part.group]) + self._get_first_group(part.leaf)
        return self.manifest.get_row_range(group, part.first, part.last, part.epoch)


def _pick_rows(group: DecodedGroup, part: GroupPart, rows: np.ndarray | None) -> pa.RecordBatch:
    """Select the rows of a part from its group, without those that a filter removed."""
    assert group.rows is not None
    if rows is None:
        return group.rows.slice(part.first, part.last - part.first)
    if group.keep is not None:
        rows = rows[group.keep[rows]]
    return group.rows.take(pa.array(rows))


def _select_schema(leaf: StreamLeaf) -> pa.Schema:
    return pa.schema([leaf.schema.field(name) for name in leaf.files.columns or ()])

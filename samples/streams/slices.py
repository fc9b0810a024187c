"""Locates and reads the slices of an opened stream.

A slice (`OrderSlice`) is a range of places, that is of positions in the order in which an epoch reads the rows. Its content
depends on the slice alone, so both engines and any number of ranks give the same rows in the same order. A leaf is one stream
of files: a mixture has several, any other stream has one.
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

# Takes the index of a leaf and that of a row group in its order.
ReadGroup = Callable[[int, int], DecodedGroup]


@dataclass(frozen=True)
class GroupPart:
    """Consecutive rows, in the order in which they are read, of one row group of a leaf.

    Attributes:
        leaf: Index of the leaf.
        epoch: Epoch of the leaf, which in a mixture is not that of the stream.
        group: Index of the row group among those of the leaf that are read.
        first: Position of the first row in the (maybe shuffled) order of the group.
        last: Position after the last row.
        places: Places of these rows in the stream's epoch [last - first].
    """

    leaf: int
    epoch: int
    group: int
    first: int
    last: int
    places: np.ndarray


@dataclass(frozen=True)
class RawSlice:
    """The rows of a slice, before the stream's operators or after them (`SliceReader.apply_operators`).

    Attributes:
        slice: The slice.
        rows: The rows, without bad and filtered ones.
        ranges: The slice as ranges of physical rows; see `SliceReader.get_row_ranges`.
        read: Number of rows of the slice, with bad and filtered ones.
        skipped: Places of the bad rows, which are left out.
    """

    slice: OrderSlice
    rows: pa.RecordBatch
    ranges: tuple[RowRange, ...] = ()
    read: int = 0
    skipped: tuple[int, ...] = ()


class SliceReader:
    """Locates and reads the slices of a stream.

    Args:
        stream: The stream.
        slice_rows: Number of rows of a slice.
        step_rows: Number of rows of a global step.
        manifest: The files as an earlier opening found them; None to inspect them.
        name: Name, such as that of a stage, that the random order depends on in addition to the seed.

    Attributes:
        stream: The stream.
        leaves: The inspected files of each stream of a mixture, or of the one stream.
        rows: Number of rows of an epoch.
        steps: The global steps of an epoch and their slices.
    """

    def __init__(
        self,
        stream: StreamPlan,
        slice_rows: int,
        step_rows: int,
        manifest: DataManifest | None,
        name: str = "",
    ):
        self.stream = stream
        streams = [mixed_stream for mixed_stream, _ in stream.mixed] or [stream]
        if manifest is not None and len(streams) > 1:
            raise ConfigError("open: a manifest belongs to one stream; a mixture finds its own files")
        order_name = f"{name} samples" if name else "samples"
        self.leaves = [
            StreamLeaf(leaf_stream, f"{order_name} {leaf_index}", manifest)
            for leaf_index, leaf_stream in enumerate(streams)
        ]
        # The index of the leaf that provides each of 1,000 rows; the mixture repeats this pattern. None without a mixture.
        self._turns = schedule_turns([share for _, share in stream.mixed]) if stream.mixed else None
        epoch_rows = self._count_epoch_rows()
        self.rows = epoch_rows if stream.most is None else min(epoch_rows, stream.most)
        self.steps = EpochSteps(self.rows, step_rows, slice_rows)

    @cached_property
    def manifest(self) -> DataManifest:
        """The files of all streams, in the order of the streams."""
        return DataManifest(tuple(file for leaf in self.leaves for file in leaf.manifest.files))

    @cached_property
    def needs_work(self) -> bool:
        """Whether a slice is more than a view of its row group: operators, filters or a shuffle within groups apply."""
        return (
            bool(self.stream.operators)
            or len(self.leaves) > 1
            or any(leaf.stream.operators or leaf.files.where or leaf.order.permutes for leaf in self.leaves)
        )

    def compute_row_ids(self, order_slice: OrderSlice) -> np.ndarray:
        """Return the 64-bit ids [B] of a slice's rows in the order of their places."""
        ids_of_parts, places_of_parts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for part in self.locate_parts(order_slice):
            leaf = self.leaves[part.leaf]
            # The index of the row group in the manifest of all leaves.
            group_index = int(leaf.groups[part.group]) + self._get_first_group(part.leaf)
            ids_of_parts.append(self.manifest.compute_row_ids(group_index, self._get_part_rows(part)))
            places_of_parts.append(part.places)
        return np.concatenate(ids_of_parts)[np.argsort(np.concatenate(places_of_parts), kind="stable")]

    def read_group(self, leaf_index: int, group_index: int, shared: bool = False) -> DecodedGroup:
        """Return a decoded row group of a leaf.

        Args:
            leaf_index: Index of the leaf.
            group_index: Index of the row group among those of the leaf that are read.
            shared: Whether other processes of this machine read it too, so that only one of them decodes it.

        Raises:
            DataError: If it cannot be read.
        """
        leaf = self.leaves[leaf_index]
        node_groups = get_node_groups(leaf.digest) if shared else None
        if node_groups is None:
            return leaf.read(group_index)
        return node_groups.read(str(int(leaf.groups[group_index])), lambda: leaf.read(group_index))

    def locate_parts(self, order_slice: OrderSlice) -> list[GroupPart]:
        """Return the parts of row groups that hold the rows of a slice, leaf by leaf."""
        epoch, start, stop = order_slice.epoch, order_slice.start, order_slice.stop
        if self._turns is None:
            return list(self._iterate_leaf_parts(0, epoch, start, np.arange(start, stop)))
        # In a mixture, places are counted from the first epoch on, because the leaves start over at other times.
        first_place = epoch * self.rows + start
        places = np.arange(first_place, first_place + stop - start)
        leaf_of_place = self._turns[places % len(self._turns)]
        parts: list[GroupPart] = []
        for leaf_index, leaf in enumerate(self.leaves):
            leaf_places = places[leaf_of_place == leaf_index] - epoch * self.rows
            next_row, epoch_rows = self._count_rows_before(leaf_index, first_place), leaf.order.rows
            while len(leaf_places):
                leaf_epoch, leaf_start = divmod(next_row, epoch_rows)
                # Up to the end of the leaf's epoch.
                row_count = min(len(leaf_places), epoch_rows - leaf_start)
                parts += self._iterate_leaf_parts(leaf_index, leaf_epoch, leaf_start, leaf_places[:row_count])
                leaf_places, next_row = leaf_places[row_count:], next_row + row_count
        return parts

    def read_slice(self, order_slice: OrderSlice, read: ReadGroup) -> RawSlice:
        """Read a slice's rows, before the operators of the whole stream.

        Args:
            order_slice: The slice.
            read: Function that returns a decoded row group.

        Raises:
            DataError: If rows cannot be read, or mixed streams have different columns.
        """
        batches, skipped, read_count = [], [], 0
        for part in self.locate_parts(order_slice):
            group = read(part.leaf, part.group)
            # None for all rows of the part in the order of the file, which are a view of the group.
            rows = self._get_part_rows(part) if group.keep is not None or self._is_shuffled(part) else None
            read_count += part.last - part.first
            if group.bad is not None and rows is not None:
                skipped += part.places[group.bad[rows]].tolist()
            if group.rows is None:  # The group cannot be read; all its rows are bad.
                continue
            batches.append(self._apply_leaf_operators(part.leaf, _pick_rows(group, part, rows)))
        if not batches:
            batches = [pa.RecordBatch.from_pylist([], _get_read_schema(self.leaves[0]))]
        try:
            rows_of_slice = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        except pa.ArrowException as error:
            raise DataError(f"the mixed streams have unlike columns: {str(error).splitlines()[0]}") from None
        return RawSlice(
            order_slice, rows_of_slice, self.get_row_ranges(order_slice), read_count, tuple(skipped)
        )

    def get_row_ranges(self, order_slice: OrderSlice) -> tuple[RowRange, ...]:
        """Return the physical rows of a slice as ranges.

        Returns:
            One range per part; none if rows are shuffled within groups (`compute_row_ids` gives their ids).
        """
        parts = self.locate_parts(order_slice)
        return (
            ()
            if any(self._is_shuffled(part) for part in parts)
            else tuple(self._get_row_range(part) for part in parts)
        )

    def apply_operators(self, raw: RawSlice, apply: ComposedOperators) -> RawSlice:
        """Apply the stream's operators to a slice.

        Args:
            raw: The slice before the operators.
            apply: The composed operators of the stream.

        Returns:
            The slice with the resulting rows and the same counts.

        Raises:
            DataError: If an operator raises it; the message names the first row of the slice.
        """
        try:
            return RawSlice(raw.slice, apply(raw.rows), raw.ranges, raw.read, raw.skipped)
        except DataError as error:
            first_id = int(self.compute_row_ids(raw.slice)[0])
            raise DataError(
                f"{error}; in a slice of {raw.read} rows, the first: {self.manifest.describe_row(first_id)}"
            ) from error

    def _count_epoch_rows(self) -> int:
        """Return the number of rows of an epoch; a mixture's epoch ends when the stream that lasts longest was read once."""
        if self._turns is None:
            return self.leaves[0].order.rows
        return max(
            round(leaf.order.rows / share)
            for leaf, (_, share) in zip(self.leaves, self.stream.mixed, strict=True)
        )

    def _iterate_leaf_parts(
        self, leaf_index: int, epoch: int, start: int, places: np.ndarray
    ) -> Iterator[GroupPart]:
        """Yield the parts of a leaf's row groups that hold its rows from `start` of its epoch on, one row for each place."""
        position = 0
        for group, first, last in self.leaves[leaf_index].order.iterate_parts(
            epoch, start, start + len(places)
        ):
            yield GroupPart(leaf_index, epoch, group, first, last, places[position : position + last - first])
            position += last - first

    def _count_rows_before(self, leaf_index: int, place: int) -> int:
        """Count the rows that a leaf provides before a place of the mixture, counted from the first epoch on."""
        assert self._turns is not None
        full_rounds, rest_turns = divmod(place, len(self._turns))
        is_leaf_turn = self._turns == leaf_index
        return full_rounds * int(is_leaf_turn.sum()) + int(is_leaf_turn[:rest_turns].sum())

    def _is_shuffled(self, part: GroupPart) -> bool:
        return self.leaves[part.leaf].order.permutes

    def _get_part_rows(self, part: GroupPart) -> np.ndarray:
        """Return the indices in the row group of a part's rows, in the order in which they are read."""
        group_order = self.leaves[part.leaf].order.get_group_order(part.epoch, part.group)
        return (
            np.arange(part.first, part.last) if group_order is None else group_order[part.first : part.last]
        )

    def _apply_leaf_operators(self, leaf_index: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Apply the operators of a mixed stream to rows of its leaf; a stream that is no mixture applies them later."""
        if self._turns is None:
            return rows
        return compose_operators(self.leaves[leaf_index].stream.operators)(rows)

    def _get_first_group(self, leaf_index: int) -> int:
        """Return the index of a leaf's first row group in the manifest of all leaves."""
        return sum(len(leaf.manifest.group_rows) for leaf in self.leaves[:leaf_index])

    def _get_row_range(self, part: GroupPart) -> RowRange:
        """Return the physical rows of a part whose group is not shuffled."""
        group_index = int(self.leaves[part.leaf].groups[part.group]) + self._get_first_group(part.leaf)
        return self.manifest.get_row_range(group_index, part.first, part.last, part.epoch)


def _pick_rows(group: DecodedGroup, part: GroupPart, group_rows: np.ndarray | None) -> pa.RecordBatch:
    """Select the rows of a part from its group, without bad and filtered ones.

    Args:
        group: The decoded group.
        part: The part.
        group_rows: Indices of the part's rows in the group; None for a group without a filter that is not shuffled.
    """
    assert group.rows is not None
    if group_rows is None:
        return group.rows.slice(part.first, part.last - part.first)
    if group.keep is not None:
        group_rows = group_rows[group.keep[group_rows]]
    return group.rows.take(pa.array(group_rows))


def _get_read_schema(leaf: StreamLeaf) -> pa.Schema:
    """Return the schema of the columns that a leaf reads."""
    if leaf.files.columns is None:
        return leaf.schema
    return pa.schema([leaf.schema.field(name) for name in leaf.files.columns])

"""The Ray engine: the same slices, read by Ray Data's tasks and processed by its actor pools; only this file imports ray.

The data source creates one read task per row group. A task knows the place of its group in the epoch's order and finds the
slices that start in it when it runs, so the cost of planning an epoch grows with its row groups, not its slices. A slice is sent
as one row of a table: its fields, its rows as Arrow IPC bytes, and its skipped places, so Ray may merge blocks without losing
anything. Ray restarts tasks and actors that die. It takes 2 s to start and copies data through the object store, which pays off
for many or expensive maps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, Datasource, ReadTask
from ray.data.block import BlockMetadata

from nonet.errors import DataError
from nonet.samples.ledger import OrderSlice, StepRange
from nonet.samples.streams.leaf import DecodedGroup
from nonet.samples.streams.operators import MapOperator, compose_operators
from nonet.samples.streams.slices import RawSlice, SliceReader

_CPUS = 0.5  # CPUs per task or actor; the rest is left to the run's own roles.

SliceSource = Callable[[], Iterable[OrderSlice]]  # Returns the slices of one read task when the task runs.


def read_on_ray(feed: SliceReader, slices: Iterable[OrderSlice]) -> Iterator[RawSlice]:
    """Read slices in order, with one Ray data set per epoch."""
    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    if isinstance(slices, StepRange):
        for epoch in slices.iterate_epochs():
            yield from _read_epoch(feed, epoch)
        return
    for _, slices_of_epoch in groupby(slices, lambda order_slice: order_slice.epoch):
        yield from _read_epoch(feed, list(_stop_at_epoch_end(feed, slices_of_epoch)))


def _read_epoch(feed: SliceReader, slices: StepRange | list[OrderSlice]) -> Iterator[RawSlice]:
    """Read the slices of one epoch with one Ray data set."""
    feed_ref = ray.put(feed)
    slice_sources = plan_tasks(feed, slices)
    if not slice_sources:
        return
    data = ray.data.read_datasource(
        _SliceDatasource(feed_ref, feed, slice_sources),
        override_num_blocks=len(slice_sources),
        num_cpus=_CPUS,
    )
    data.context.execution_options.preserve_order = True
    data.context.enable_progress_bars = False
    max_actors = max(
        (operator.workers for operator in feed.stream.operators if isinstance(operator, MapOperator)),
        default=0,
    )
    if max_actors:
        pool = ActorPoolStrategy(min_size=1, max_size=max_actors)
        data = data.map_batches(
            _OperatorActor,
            batch_size=None,
            batch_format="pyarrow",
            compute=pool,
            fn_constructor_args=(feed,),
            num_cpus=_CPUS,
            zero_copy_batch=True,
        )
    try:
        for table in data.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=max(1, feed.stream.ahead)
        ):
            yield from (_unpack_slice(feed, table, row) for row in range(len(table)))
    except Exception as error:
        raise _to_nonet_error(error) from error


def plan_tasks(feed: SliceReader, slices: StepRange | list[OrderSlice]) -> list[SliceSource]:
    """Return the source of slices of each read task.

    A task has the slices that start in one row group if they are a range of steps, and otherwise a run of slices of the list that
    start in the same row group.
    """
    if isinstance(slices, StepRange) and len(feed.leaves) == 1:
        assert slices.last_step is not None
        epoch, start, _ = feed.steps.get_places(slices.first_step)
        stop = feed.steps.get_places(slices.last_step - 1)[2]
        slice_sources: list[SliceSource] = []
        for _, first, last in feed.leaves[0].order.iterate_parts(epoch, start, stop):
            row_count = last - first  # Of this row group.
            slice_sources.append(partial(slices.iterate_starting_in, start, start + row_count))
            start += row_count
        return slice_sources
    return [partial(iter, run) for run in _group_runs(feed, list(slices))]


def _to_nonet_error(error: Exception) -> Exception:
    """Convert a Ray error to a DataError if its text holds a Nonet error; return other errors unchanged."""
    messages = re.findall(r"^nonet\.errors\.(?:DataError|ConfigError): (.*)$", str(error), re.MULTILINE)
    return DataError(messages[-1]) if messages else error


def _stop_at_epoch_end(feed: SliceReader, slices: Iterable[OrderSlice]) -> Iterator[OrderSlice]:
    """Yield slices up to the one that ends the epoch."""
    for order_slice in slices:
        yield order_slice
        if order_slice.stop >= feed.rows:
            return


class _SliceDatasource(Datasource):
    """A Ray data source whose read tasks produce slices, each as one row of a table (`_pack_slices`).

    Args:
        feed_ref: Reference to the feed in the object store.
        feed: The feed.
        slice_sources: The source of slices of each read task.
    """

    def __init__(self, feed_ref: Any, feed: SliceReader, slice_sources: list[SliceSource]):
        self._feed_ref, self._slice_sources = feed_ref, slice_sources
        self._bytes = sum(leaf.bytes for leaf in feed.leaves)

    def estimate_inmemory_data_size(self) -> int:
        return 4 * self._bytes  # Assumes that files are compressed to a quarter.

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        read_functions = [_make_read_function(self._feed_ref, source) for source in self._slice_sources]
        return [ReadTask(function, metadata) for function in read_functions]


def _make_read_function(feed_ref: Any, slice_source: SliceSource) -> Any:
    """Return the function that a read task calls, which yields a table per slice, or one empty table."""

    def read() -> Iterator[pa.Table]:
        feed: SliceReader = ray.get(feed_ref)
        newest_groups: dict[int, tuple[int, DecodedGroup]] = {}  # By leaf: the group's index and the group.

        def get_group(leaf: int, group: int) -> DecodedGroup:
            if leaf not in newest_groups or newest_groups[leaf][0] != group:
                newest_groups[leaf] = group, feed.leaves[leaf].read(group)
            return newest_groups[leaf][1]

        # With a `map`, the actors of the pool apply the operators.
        has_map = any(isinstance(operator, MapOperator) for operator in feed.stream.operators)
        apply = None if has_map else compose_operators(feed.stream.operators)
        is_empty = True
        for order_slice in slice_source():
            raw = feed.read_slice(order_slice, get_group)
            yield _pack_slices([raw if apply is None else feed.apply_operators(raw, apply)])
            is_empty = False
        if is_empty:
            yield _pack_slices([])

    return read


class _OperatorActor:
    """An actor of the pool, which applies the stream's operators to packed slices."""

    def __init__(self, feed: SliceReader):
        self._feed, self._apply = feed, compose_operators(feed.stream.operators)

    def __call__(self, table: pa.Table) -> pa.Table:
        raws = [_unpack_slice(self._feed, table, row) for row in range(len(table))]
        return _pack_slices([self._feed.apply_operators(raw, self._apply) for raw in raws])


def _pack_slices(raws: list[RawSlice]) -> pa.Table:
    """Convert slices to a table with one row per slice."""
    slices = pa.array([[*astuple(raw.slice)] for raw in raws], pa.list_(pa.int64()))
    skipped = pa.array([list(raw.skipped) for raw in raws], pa.list_(pa.int64()))
    serialized_rows = [_encode_rows(raw.rows) for raw in raws]
    offsets = np.cumsum([0, *(serialized.size for serialized in serialized_rows)]).astype(np.int64)
    data = serialized_rows[0] if len(serialized_rows) == 1 else pa.py_buffer(b"".join(serialized_rows))
    rows = pa.Array.from_buffers(pa.large_binary(), len(serialized_rows), [None, pa.py_buffer(offsets), data])
    return pa.table({"slice": slices, "rows": rows, "skipped": skipped})


def _encode_rows(rows: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue()


def _unpack_slice(feed: SliceReader, table: pa.Table, row: int) -> RawSlice:
    """Return the slice in one row of a table that `_pack_slices` made."""
    order_slice = OrderSlice(*table["slice"][row].as_py())
    with pa.ipc.open_stream(table["rows"][row].as_buffer()) as reader:
        rows = reader.read_next_batch()
    row_count = order_slice.stop - order_slice.start
    skipped = tuple(table["skipped"][row].as_py())
    return RawSlice(order_slice, rows, feed.get_row_ranges(order_slice), row_count, skipped)


def _group_runs(feed: SliceReader, slices: list[OrderSlice]) -> list[list[OrderSlice]]:
    """Split slices into runs of consecutive ones that start in the same row group."""
    runs: list[list[OrderSlice]] = []
    previous_group: Any = None  # A list of one (leaf, group), or an empty one for a slice without rows.
    for order_slice in slices:
        first_group = [(part.leaf, part.group) for part in feed.locate_parts(order_slice)][:1]
        if first_group != previous_group:
            runs.append([])
        runs[-1].append(order_slice)
        previous_group = first_group
    return runs

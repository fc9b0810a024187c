"""The Ray engine: the same slices, read by Ray Data's tasks and processed by its actor pools; only this file imports ray.

The data source creates one read task per row group. A task knows the place of its group in the epoch's order and finds the
slices
that start in it when it runs, so planning an epoch costs as much as its row groups, not its slices. A slice travels as one
row:
its step and part, its rows as Arrow IPC bytes, and its counts, so Ray may merge blocks without losing anything. Ray
restarts tasks
and actors that die. It takes 2 s to start and copies data through the object store, which pays off for many or expensive
maps.
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

_CPUS = 0.5  # CPUs per task or actor; the rest is left to the run's own roles


def read_on_ray(feed: SliceReader, slices: Iterable[OrderSlice]) -> Iterator[RawSlice]:
    """Yield the slices in their order; a data set per epoch."""
    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    if isinstance(slices, StepRange):
        for epoch in slices.iterate_epochs():
            yield from _read_epoch(feed, epoch)
        return
    for _, every in groupby(slices, lambda part: part.epoch):
        yield from _read_epoch(feed, list(_stop_at_epoch_end(feed, every)))


def _read_epoch(feed: SliceReader, slices: StepRange | list[OrderSlice]) -> Iterator[RawSlice]:
    """Read the slices of one epoch with one Ray data set."""
    there = ray.put(feed)
    tasks = plan_tasks(feed, slices)
    if not tasks:
        return
    data = ray.data.read_datasource(
        _SliceDatasource(there, feed, tasks), override_num_blocks=len(tasks), num_cpus=_CPUS
    )
    data.context.execution_options.preserve_order = True
    data.context.enable_progress_bars = False
    workers = max(
        (operator.workers for operator in feed.stream.operators if isinstance(operator, MapOperator)),
        default=0,
    )
    if workers:
        pool = ActorPoolStrategy(min_size=1, max_size=workers)
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
            yield from (_unpack_slice(feed, table, at) for at in range(len(table)))
    except Exception as error:
        raise _to_nonet_error(error) from error


def plan_tasks(
    feed: SliceReader, slices: StepRange | list[OrderSlice]
) -> list[Callable[[], Iterable[OrderSlice]]]:
    """Return what each read task asks for its slices: the row groups of a range, or runs of a list that share a row group."""
    if isinstance(slices, StepRange) and len(feed.leaves) == 1:
        assert slices.last_step is not None
        epoch, start, _ = feed.steps.get_places(slices.first_step)
        stop = feed.steps.get_places(slices.last_step - 1)[2]
        tasks: list[Callable[[], Iterable[OrderSlice]]] = []
        for _, first, last in feed.leaves[0].order.iterate_parts(epoch, start, stop):
            tasks.append(partial(slices.iterate_starting_in, start, start + last - first))
            start += last - first
        return tasks
    return [partial(iter, run) for run in _group_runs(feed, list(slices))]


def _to_nonet_error(error: Exception) -> Exception:
    """Convert a Ray error to a DataError if its text holds a Nonet error; return other errors unchanged."""
    said = re.findall(r"^nonet\.errors\.(?:DataError|ConfigError): (.*)$", str(error), re.MULTILINE)
    return DataError(said[-1]) if said else error


def _stop_at_epoch_end(feed: SliceReader, slices: Iterable[OrderSlice]) -> Iterator[OrderSlice]:
    """Yield slices up to the end of the epoch."""
    for part in slices:
        yield part
        if part.stop >= feed.rows:
            return


class _SliceDatasource(Datasource):
    """A Ray data source whose read tasks produce slices."""

    def __init__(self, there: Any, feed: SliceReader, tasks: list[Callable[[], Iterable[OrderSlice]]]):
        self._there, self._tasks = there, tasks
        self._bytes = sum(leaf.bytes for leaf in feed.leaves)

    def estimate_inmemory_data_size(self) -> int:
        return 4 * self._bytes

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        facts = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(_make_read_function(self._there, task), facts) for task in self._tasks]


def _make_read_function(there: Any, slices: Callable[[], Iterable[OrderSlice]]) -> Any:
    """Return the function of a read task."""

    def read() -> Iterator[pa.Table]:
        feed: SliceReader = ray.get(there)
        kept: dict[int, tuple[int, DecodedGroup]] = {}

        def group_of(leaf: int, group: int) -> DecodedGroup:
            if leaf not in kept or kept[leaf][0] != group:
                kept[leaf] = group, feed.leaves[leaf].read(group)
            return kept[leaf][1]

        heavy = any(isinstance(operator, MapOperator) for operator in feed.stream.operators)
        work = None if heavy else compose_operators(feed.stream.operators)
        none = True
        for part in slices():
            raw = feed.read_slice(part, group_of)
            yield _pack_slices([raw if work is None else feed.apply_operators(raw, work)])
            none = False
        if none:
            yield _pack_slices([])

    return read


class _OperatorActor:
    """An actor of the pool; applies the stream's operators."""

    def __init__(self, feed: SliceReader):
        self._feed, self._work = feed, compose_operators(feed.stream.operators)

    def __call__(self, table: pa.Table) -> pa.Table:
        raws = [_unpack_slice(self._feed, table, at) for at in range(len(table))]
        return _pack_slices([self._feed.apply_operators(raw, self._work) for raw in raws])


def _pack_slices(raws: list[RawSlice]) -> pa.Table:
    """Convert slices to a table with one row per slice."""
    slices = pa.array([[*astuple(raw.slice)] for raw in raws], pa.list_(pa.int64()))
    skipped = pa.array([list(raw.skipped) for raw in raws], pa.list_(pa.int64()))
    blobs = [_as_bytes(raw.rows) for raw in raws]
    ends = np.cumsum([0, *(blob.size for blob in blobs)]).astype(np.int64)
    data = blobs[0] if len(blobs) == 1 else pa.py_buffer(b"".join(blobs))
    rows = pa.Array.from_buffers(pa.large_binary(), len(blobs), [None, pa.py_buffer(ends), data])
    return pa.table({"slice": slices, "rows": rows, "skipped": skipped})


def _as_bytes(rows: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue()


def _unpack_slice(feed: SliceReader, table: pa.Table, at: int) -> RawSlice:
    """Return a slice of rows from one row of a packed table."""
    part = OrderSlice(*table["slice"][at].as_py())
    with pa.ipc.open_stream(table["rows"][at].as_buffer()) as reader:
        rows = reader.read_next_batch()
    return RawSlice(
        part, rows, feed.get_row_ranges(part), part.stop - part.start, tuple(table["skipped"][at].as_py())
    )


def _group_runs(feed: SliceReader, slices: list[OrderSlice]) -> list[list[OrderSlice]]:
    """Return slices in runs that begin in the same row group."""
    runs: list[list[OrderSlice]] = []
    last: Any = None
    for part in slices:
        key = [(each.leaf, each.group) for each in feed.locate_parts(part)][:1]
        if key != last:
            runs.append([])
        runs[-1].append(part)
        last = key
    return runs

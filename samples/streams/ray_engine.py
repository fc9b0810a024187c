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
from nonet.samples.ledger import Slice, StepRange
from nonet.samples.streams.feed import Feed, Raw, in_turn
from nonet.samples.streams.leaf import Group
from nonet.samples.streams.operators import Map

_CPUS = 0.5  # CPUs per task or actor; the rest is left to the run's own roles


def on_ray(feed: Feed, slices: Iterable[Slice]) -> Iterator[Raw]:
    """Yield the slices in their order; a data set per epoch."""
    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    if isinstance(slices, StepRange):
        for epoch in slices.epochs():
            yield from _of_epoch(feed, epoch)
        return
    for _, every in groupby(slices, lambda part: part.epoch):
        yield from _of_epoch(feed, list(_bounded(feed, every)))


def _of_epoch(feed: Feed, slices: StepRange | list[Slice]) -> Iterator[Raw]:
    """Read the slices of one epoch with one Ray data set."""
    there = ray.put(feed)
    tasks = plan_tasks(feed, slices)
    if not tasks:
        return
    data = ray.data.read_datasource(
        _Slices(there, feed, tasks), override_num_blocks=len(tasks), num_cpus=_CPUS
    )
    data.context.execution_options.preserve_order = True
    data.context.enable_progress_bars = False
    workers = max(
        (operator.workers for operator in feed.stream.operators if isinstance(operator, Map)), default=0
    )
    if workers:
        pool = ActorPoolStrategy(min_size=1, max_size=workers)
        data = data.map_batches(
            _Work,
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
            yield from (_unpacked(feed, table, at) for at in range(len(table)))
    except Exception as error:
        raise _ours(error) from error


def plan_tasks(feed: Feed, slices: StepRange | list[Slice]) -> list[Callable[[], Iterable[Slice]]]:
    """Return what each read task asks for its slices: the row groups of a range, or runs of a list that share a row group."""
    if isinstance(slices, StepRange) and len(feed.leaves) == 1:
        assert slices.last_step is not None
        epoch, start, _ = feed.steps.places(slices.first_step)
        stop = feed.steps.places(slices.last_step - 1)[2]
        tasks: list[Callable[[], Iterable[Slice]]] = []
        for _, first, last in feed.leaves[0].order.parts(epoch, start, stop):
            tasks.append(partial(slices.starting_in, start, start + last - first))
            start += last - first
        return tasks
    return [partial(iter, run) for run in _runs(feed, list(slices))]


def _ours(error: Exception) -> Exception:
    """Convert a Ray error to a DataError if its text holds a Nonet error; return other errors unchanged."""
    said = re.findall(r"^nonet\.errors\.(?:DataError|ConfigError): (.*)$", str(error), re.MULTILINE)
    return DataError(said[-1]) if said else error


def _bounded(feed: Feed, slices: Iterable[Slice]) -> Iterator[Slice]:
    """Yield slices up to the end of the epoch."""
    for part in slices:
        yield part
        if part.stop >= feed.rows:
            return


class _Slices(Datasource):
    """A Ray data source whose read tasks produce slices."""

    def __init__(self, there: Any, feed: Feed, tasks: list[Callable[[], Iterable[Slice]]]):
        self._there, self._tasks = there, tasks
        self._bytes = sum(leaf.bytes for leaf in feed.leaves)

    def estimate_inmemory_data_size(self) -> int:
        return 4 * self._bytes

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        facts = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(_reading(self._there, task), facts) for task in self._tasks]


def _reading(there: Any, slices: Callable[[], Iterable[Slice]]) -> Any:
    """Return the function of a read task."""

    def read() -> Iterator[pa.Table]:
        feed: Feed = ray.get(there)
        kept: dict[int, tuple[int, Group]] = {}

        def group_of(leaf: int, group: int) -> Group:
            if leaf not in kept or kept[leaf][0] != group:
                kept[leaf] = group, feed.leaves[leaf].read(group)
            return kept[leaf][1]

        heavy = any(isinstance(operator, Map) for operator in feed.stream.operators)
        work = None if heavy else in_turn(feed.stream.operators)
        none = True
        for part in slices():
            raw = feed.raw(part, group_of)
            yield _packed([raw if work is None else feed.worked(raw, work)])
            none = False
        if none:
            yield _packed([])

    return read


class _Work:
    """An actor of the pool; applies the stream's operators."""

    def __init__(self, feed: Feed):
        self._feed, self._work = feed, in_turn(feed.stream.operators)

    def __call__(self, table: pa.Table) -> pa.Table:
        raws = [_unpacked(self._feed, table, at) for at in range(len(table))]
        return _packed([self._feed.worked(raw, self._work) for raw in raws])


def _packed(raws: list[Raw]) -> pa.Table:
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


def _unpacked(feed: Feed, table: pa.Table, at: int) -> Raw:
    part = Slice(*table["slice"][at].as_py())
    with pa.ipc.open_stream(table["rows"][at].as_buffer()) as reader:
        rows = reader.read_next_batch()
    return Raw(part, rows, feed.ranges(part), part.stop - part.start, tuple(table["skipped"][at].as_py()))


def _runs(feed: Feed, slices: list[Slice]) -> list[list[Slice]]:
    """Return slices in runs that begin in the same row group."""
    runs: list[list[Slice]] = []
    last: Any = None
    for part in slices:
        key = [(each.leaf, each.group) for each in feed.parts(part)][:1]
        if key != last:
            runs.append([])
        runs[-1].append(part)
        last = key
    return runs

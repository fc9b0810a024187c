"""The Ray engine: the same slices, read by Ray Data's tasks and worked on by its actor pools; only this file imports ray.

Our datasource gives a read task for each run of slices that share row groups. A slice travels as one row: its number, its rows
as Arrow IPC bytes and its account, so that blocks may be merged as Ray likes and nothing is lost between them. Ray restarts
tasks and actors that die; it costs 2 s to start and a copy through the object store, which pays where maps are heavy or many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, Datasource, ReadTask
from ray.data.block import BlockMetadata

from nonet.errors import DataError
from nonet.samples.ledger import Slice
from nonet.samples.streams.feed import Feed, Raw, in_turn
from nonet.samples.streams.leaf import Group
from nonet.samples.streams.operators import Map

_RUN = 64  # slices of a read task at most
_CPUS = 0.5  # that a task or an actor asks for: a run's own roles have the rest


def on_ray(feed: Feed, slices: Iterable[Slice]) -> Iterator[Raw]:
    """The slices in their order; a data set an epoch."""
    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    for _, every in groupby(slices, lambda part: part.epoch):
        yield from _of_epoch(feed, every)


def _of_epoch(feed: Feed, slices: Iterable[Slice]) -> Iterator[Raw]:
    parts = list(_bounded(feed, slices))
    if not parts:
        return
    there = ray.put(feed)
    data = ray.data.read_datasource(
        _Slices(there, feed, parts), override_num_blocks=len(_runs(feed, parts)), num_cpus=_CPUS
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
            fn_constructor_args=(feed, parts),
            num_cpus=_CPUS,
            zero_copy_batch=True,
        )
    try:
        for table in data.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=max(1, feed.stream.ahead)
        ):
            yield from (_unpacked(feed, parts, table, at) for at in range(len(table)))
    except Exception as error:
        raise _ours(error) from error


def _ours(error: Exception) -> Exception:
    """Our own error, of which Ray passes on the words alone; the error itself where it is none of ours."""
    said = re.findall(r"^nonet\.errors\.(?:DataError|ConfigError): (.*)$", str(error), re.MULTILINE)
    return DataError(said[-1]) if said else error


def _bounded(feed: Feed, slices: Iterable[Slice]) -> Iterator[Slice]:
    """All slices of what is asked for, up to the end of the epoch."""
    for part in slices:
        yield part
        if part.stop >= feed.rows:
            return


class _Slices(Datasource):
    """Runs of slices as read tasks."""

    def __init__(self, there: Any, feed: Feed, parts: list[Slice]):
        self._there, self._parts, self._all = there, _runs(feed, parts), parts
        self._bytes = sum(leaf.bytes for leaf in feed.leaves)

    def estimate_inmemory_data_size(self) -> int:
        return 4 * self._bytes

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        tasks = []
        for numbers in self._parts:
            facts = BlockMetadata(num_rows=len(numbers), size_bytes=None, input_files=None, exec_stats=None)
            tasks.append(
                ReadTask(_reading(self._there, self._all[numbers[0] : numbers[-1] + 1], numbers[0]), facts)
            )
        return tasks


def _reading(there: Any, parts: list[Slice], first: int) -> Any:
    def read() -> Iterator[pa.Table]:
        feed: Feed = ray.get(there)
        kept: dict[int, tuple[int, Group]] = {}

        def group_of(leaf: int, group: int) -> Group:
            if leaf not in kept or kept[leaf][0] != group:
                kept[leaf] = group, feed.leaves[leaf].read(group)
            return kept[leaf][1]

        heavy = any(isinstance(operator, Map) for operator in feed.stream.operators)
        work = None if heavy else in_turn(feed.stream.operators)
        for number, part in enumerate(parts, first):
            raw = feed.raw(part, group_of)
            yield _packed([(number, raw if work is None else feed.worked(raw, work))])

    return read


class _Work:
    """One actor of the pool: the stream's operators."""

    def __init__(self, feed: Feed, parts: list[Slice]):
        self._feed = feed
        self._parts, self._work = parts, in_turn(self._feed.stream.operators)

    def __call__(self, table: pa.Table) -> pa.Table:
        raws = [_unpacked(self._feed, self._parts, table, at) for at in range(len(table))]
        numbers = table["slice"].to_pylist()
        return _packed(
            [(n, self._feed.worked(raw, self._work)) for n, raw in zip(numbers, raws, strict=True)]
        )


def _packed(raws: list[tuple[int, Raw]]) -> pa.Table:
    numbers = pa.array([number for number, _ in raws], pa.int64())
    skipped = pa.array([list(raw.skipped) for _, raw in raws], pa.list_(pa.int64()))
    blobs = [_as_bytes(raw.rows) for _, raw in raws]
    ends = np.cumsum([0, *(blob.size for blob in blobs)]).astype(np.int64)
    data = blobs[0] if len(blobs) == 1 else pa.py_buffer(b"".join(blobs))
    rows = pa.Array.from_buffers(pa.large_binary(), len(blobs), [None, pa.py_buffer(ends), data])
    return pa.table({"slice": numbers, "rows": rows, "skipped": skipped})


def _as_bytes(rows: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue()


def _unpacked(feed: Feed, parts: list[Slice], table: pa.Table, at: int) -> Raw:
    part = parts[table["slice"][at].as_py()]
    with pa.ipc.open_stream(table["rows"][at].as_buffer()) as reader:
        rows = reader.read_next_batch()
    return Raw(part, rows, feed.ranges(part), part.stop - part.start, tuple(table["skipped"][at].as_py()))


def _runs(feed: Feed, parts: list[Slice]) -> list[list[int]]:
    """Numbers of slices that begin in the same row groups, at most `_RUN` of them."""
    runs: list[list[int]] = []
    last: Any = None
    for number, part in enumerate(parts):
        key = [(each.leaf, each.group) for each in feed.parts(part)][:1]
        if key != last or len(runs[-1]) >= _RUN:
            runs.append([])
        runs[-1].append(number)
        last = key
    return runs

"""The local engine: reads slices with threads in the trainer's process, without an object store.

Two threads decode the current row group and the next ones. If slices need work (`SliceReader.needs_work`), as many threads as the
operators have `workers` process slices before the caller takes them, at most `ahead` of them; otherwise the caller takes views of
the row groups. Memory holds a few row groups. Slices are returned in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import tee
from threading import local

from nonet.samples.ledger import OrderSlice
from nonet.samples.streams.leaf import DecodedGroup
from nonet.samples.streams.operators import MapOperator, compose_operators
from nonet.samples.streams.slices import RawSlice, SliceReader

_DECODE_THREADS = 2
_GROUPS_AHEAD = 2  # Row groups that are decoded ahead of the current slice.

GroupKey = tuple[int, int, int]  # (leaf, epoch, row group)


def read_locally(feed: SliceReader, slices: Iterable[OrderSlice], shared: bool = False) -> Iterator[RawSlice]:
    """Read slices in order, ahead of the caller in threads, or in the caller's thread if the stream has `prefetch(0)`.

    Args:
        feed: The opened stream.
        slices: The slices to read.
        shared: Whether other processes of this machine read the same row groups.
    """
    if feed.stream.ahead < 1:
        yield from _read_without_threads(feed, slices, shared)
        return
    worker_count = max(
        [1, *(operator.workers for operator in feed.stream.operators if isinstance(operator, MapOperator))]
    )
    decode_pool, slice_pool = (
        ThreadPoolExecutor(_DECODE_THREADS, "samples-read"),
        ThreadPoolExecutor(worker_count, "samples-make"),
    )
    try:
        group_cache = _GroupCache(feed, decode_pool, shared)
        slices_to_read, slices_to_plan = tee(slices)  # Planning is ahead of reading.
        parts_of_slices = ((order_slice, feed.locate_parts(order_slice)) for order_slice in slices_to_plan)
        per_thread = local()  # `apply`: the thread's own instances of the operators.

        def make(order_slice: OrderSlice, decoded: dict[tuple[int, int], Future[DecodedGroup]]) -> RawSlice:
            if not hasattr(per_thread, "apply"):
                per_thread.apply = compose_operators(feed.stream.operators)
            raw = feed.read_slice(order_slice, lambda leaf, group: decoded[leaf, group].result())
            return feed.apply_operators(raw, per_thread.apply)

        if not feed.needs_work:
            for order_slice in slices_to_read:
                group_cache.plan(parts_of_slices, order_slice)
                raw = make(order_slice, group_cache.get_groups(order_slice))
                group_cache.release_groups(order_slice)
                yield raw
            return
        pending: deque[tuple[OrderSlice, Future[RawSlice]]] = deque()
        for order_slice in slices_to_read:
            group_cache.plan(parts_of_slices, order_slice)
            future = slice_pool.submit(make, order_slice, group_cache.get_groups(order_slice))
            pending.append((order_slice, future))
            if len(pending) > feed.stream.ahead:
                yield _finish_next(pending, group_cache)
        while pending:
            yield _finish_next(pending, group_cache)
    finally:
        for pool in (slice_pool, decode_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def _finish_next(pending: deque[tuple[OrderSlice, Future[RawSlice]]], group_cache: _GroupCache) -> RawSlice:
    """Remove the next pending slice, wait for it, release its row groups and return it."""
    order_slice, future = pending.popleft()
    raw = future.result()
    group_cache.release_groups(order_slice)
    return raw


class _GroupCache:
    """Cache of the decoded row groups of planned slices; a group is released when no planned slice needs it any more.

    Args:
        feed: The opened stream.
        decode_pool: Threads that decode groups.
        shared: Whether other processes of this machine read the same row groups.
    """

    def __init__(self, feed: SliceReader, decode_pool: ThreadPoolExecutor, shared: bool):
        self._feed, self._decode_pool, self._shared = feed, decode_pool, shared
        self._decoded: dict[GroupKey, Future[DecodedGroup]] = {}
        self._use_counts: dict[GroupKey, int] = {}
        self._keys_by_slice: dict[OrderSlice, list[GroupKey]] = {}

    def plan(self, parts_of_slices: Iterator, order_slice: OrderSlice) -> None:
        """Start decoding the groups of the next slices, until `order_slice` is planned and enough groups are in the cache.

        Args:
            parts_of_slices: Iterator over the slices, each with its `GroupPart`s; it is advanced.
            order_slice: The slice that is read next.
        """
        while order_slice not in self._keys_by_slice or len(self._decoded) <= _GROUPS_AHEAD:
            next_slice = next(parts_of_slices, None)
            if next_slice is None:
                return
            planned_slice, parts = next_slice
            keys = list(dict.fromkeys((part.leaf, part.epoch, part.group) for part in parts))
            self._keys_by_slice[planned_slice] = keys
            for key in keys:
                leaf, _, group = key
                if key not in self._decoded:
                    decode = self._feed.read_group
                    self._decoded[key] = self._decode_pool.submit(decode, leaf, group, self._shared)
                self._use_counts[key] = self._use_counts.get(key, 0) + 1

    def get_groups(self, order_slice: OrderSlice) -> dict[tuple[int, int], Future[DecodedGroup]]:
        """Return the groups of a planned slice by leaf and group index."""
        keys = self._keys_by_slice[order_slice]
        return {(leaf, group): self._decoded[leaf, epoch, group] for leaf, epoch, group in keys}

    def release_groups(self, order_slice: OrderSlice) -> None:
        """Remove a finished slice from the plan, and the groups that no other planned slice needs from the cache."""
        for key in self._keys_by_slice.pop(order_slice):
            self._use_counts[key] -= 1
            if not self._use_counts[key]:
                del self._use_counts[key], self._decoded[key]


def _read_without_threads(
    feed: SliceReader, slices: Iterable[OrderSlice], shared: bool
) -> Iterator[RawSlice]:
    """Read slices in the caller's thread, keeping the newest group of each leaf."""
    newest_groups: dict[int, tuple[int, DecodedGroup]] = {}  # By leaf: the group's index and the group.
    apply = compose_operators(feed.stream.operators)

    def read(leaf: int, group: int) -> DecodedGroup:
        if leaf not in newest_groups or newest_groups[leaf][0] != group:
            newest_groups[leaf] = group, feed.read_group(leaf, group, shared)
        return newest_groups[leaf][1]

    for order_slice in slices:
        yield feed.apply_operators(feed.read_slice(order_slice, read), apply)

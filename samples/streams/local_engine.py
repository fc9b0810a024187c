"""The local engine: reader threads in the trainer's process, without an object store.

Two threads decode the current row group and the next ones. If slices need work, `workers` threads process them `ahead` of
the reader; otherwise the reader takes views directly. Memory holds a few row groups. Slices are returned in order.
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

_READERS = 2
_GROUPS = 2  # groups that are decoded ahead of the current slices

Key = tuple[int, int, int]  # leaf, epoch, row group


def read_locally(feed: SliceReader, slices: Iterable[OrderSlice], shared: bool = False) -> Iterator[RawSlice]:
    """Read slices in order, ahead of the reader in threads, or in the caller's thread if the stream has `prefetch(0)`.

    Args:
        feed: The opened stream.
        slices: The slices to read.
        shared: Whether other processes of this machine read the same row groups.
    """
    if feed.stream.ahead < 1:
        yield from _read_without_threads(feed, slices, shared)
        return
    workers = max(
        [1, *(operator.workers for operator in feed.stream.operators if isinstance(operator, MapOperator))]
    )
    readers, makers = (
        ThreadPoolExecutor(_READERS, "samples-read"),
        ThreadPoolExecutor(workers, "samples-make"),
    )
    try:
        groups = _GroupCache(feed, readers, shared)
        mine, ahead = tee(slices)
        planned = ((part, feed.locate_parts(part)) for part in ahead)
        per_thread = local()

        def make(part: OrderSlice, decoded: dict[tuple[int, int], Future[DecodedGroup]]) -> RawSlice:
            if not hasattr(per_thread, "work"):
                per_thread.work = compose_operators(feed.stream.operators)
            return feed.apply_operators(
                feed.read_slice(part, lambda *key: decoded[key].result()), per_thread.work
            )

        if not feed.works:
            for part in mine:
                groups.plan(planned, part)
                raw = make(part, groups.get_groups(part))
                groups.release_groups(part)
                yield raw
            return
        waiting: deque[tuple[OrderSlice, Future[RawSlice]]] = deque()
        for part in mine:
            groups.plan(planned, part)
            waiting.append((part, makers.submit(make, part, groups.get_groups(part))))
            if len(waiting) > feed.stream.ahead:
                yield _take_next(waiting, groups)
        while waiting:
            yield _take_next(waiting, groups)
    finally:
        for pool in (makers, readers):
            pool.shutdown(wait=False, cancel_futures=True)


def _take_next(waiting: deque[tuple[OrderSlice, Future[RawSlice]]], groups: _GroupCache) -> RawSlice:
    part, made = waiting.popleft()
    raw = made.result()
    groups.release_groups(part)
    return raw


class _GroupCache:
    """Decoded row groups, each kept as long as a planned slice needs it."""

    def __init__(self, feed: SliceReader, readers: ThreadPoolExecutor, shared: bool):
        self._feed, self._readers, self._shared = feed, readers, shared
        self._decoded: dict[Key, Future[DecodedGroup]] = {}
        self._uses: dict[Key, int] = {}
        self._slices: dict[OrderSlice, list[Key]] = {}

    def plan(self, planned: Iterator, part: OrderSlice) -> None:
        """Plan slices until `part` is planned and enough groups are on their way."""
        while part not in self._slices or len(self._decoded) <= _GROUPS:
            following = next(planned, None)
            if following is None:
                return
            each, parts = following
            keys = self._slices[each] = list(dict.fromkeys((p.leaf, p.epoch, p.group) for p in parts))
            for key in keys:
                if key not in self._decoded:
                    self._decoded[key] = self._readers.submit(
                        self._feed.read_group, key[0], key[2], self._shared
                    )
                self._uses[key] = self._uses.get(key, 0) + 1

    def get_groups(self, part: OrderSlice) -> dict[tuple[int, int], Future[DecodedGroup]]:
        """Return the groups of a planned slice by leaf and group index."""
        return {(leaf, group): self._decoded[leaf, epoch, group] for leaf, epoch, group in self._slices[part]}

    def release_groups(self, part: OrderSlice) -> None:
        """Release the groups of a finished slice that no other planned slice needs."""
        for key in self._slices.pop(part):
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key], self._decoded[key]


def _read_without_threads(
    feed: SliceReader, slices: Iterable[OrderSlice], shared: bool
) -> Iterator[RawSlice]:
    """Read slices without threads, keeping the newest group of each leaf."""
    kept: dict[int, tuple[int, DecodedGroup]] = {}
    work = compose_operators(feed.stream.operators)

    def read(leaf: int, group: int) -> DecodedGroup:
        if leaf not in kept or kept[leaf][0] != group:
            kept[leaf] = group, feed.read_group(leaf, group, shared)
        return kept[leaf][1]

    for part in slices:
        yield feed.apply_operators(feed.read_slice(part, read), work)

"""The local engine: reader threads in the trainer's process, without an object store.

Two threads decode the current row group and the next ones. If slices need work, `workers` threads process them `ahead` of
the
reader; otherwise the reader takes views directly. Memory holds a few row groups. Slices are returned in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import tee
from threading import local

from nonet.samples.ledger import Slice
from nonet.samples.streams.feed import Feed, Raw, in_turn
from nonet.samples.streams.leaf import Group
from nonet.samples.streams.operators import Map

_READERS = 2
_GROUPS = 2  # groups that are decoded ahead of the current slices

Key = tuple[int, int, int]  # leaf, epoch, row group


def locally(feed: Feed, slices: Iterable[Slice], shared: bool = False) -> Iterator[Raw]:
    """Read slices in order, ahead of the reader in threads, or in the caller's thread if the stream has `prefetch(0)`.

    Args:
        feed: The opened stream.
        slices: The slices to read.
        shared: Whether other processes of this machine read the same row groups.
    """
    if feed.stream.ahead < 1:
        yield from _at_once(feed, slices, shared)
        return
    workers = max([1, *(operator.workers for operator in feed.stream.operators if isinstance(operator, Map))])
    readers, makers = (
        ThreadPoolExecutor(_READERS, "samples-read"),
        ThreadPoolExecutor(workers, "samples-make"),
    )
    try:
        groups = _Groups(feed, readers, shared)
        mine, ahead = tee(slices)
        planned = ((part, feed.parts(part)) for part in ahead)
        per_thread = local()

        def make(part: Slice, decoded: dict[tuple[int, int], Future[Group]]) -> Raw:
            if not hasattr(per_thread, "work"):
                per_thread.work = in_turn(feed.stream.operators)
            return feed.worked(feed.raw(part, lambda *key: decoded[key].result()), per_thread.work)

        if not feed.works:
            for part in mine:
                groups.plan(planned, part)
                raw = make(part, groups.of(part))
                groups.made(part)
                yield raw
            return
        waiting: deque[tuple[Slice, Future[Raw]]] = deque()
        for part in mine:
            groups.plan(planned, part)
            waiting.append((part, makers.submit(make, part, groups.of(part))))
            if len(waiting) > feed.stream.ahead:
                yield _next(waiting, groups)
        while waiting:
            yield _next(waiting, groups)
    finally:
        for pool in (makers, readers):
            pool.shutdown(wait=False, cancel_futures=True)


def _next(waiting: deque[tuple[Slice, Future[Raw]]], groups: _Groups) -> Raw:
    part, made = waiting.popleft()
    raw = made.result()
    groups.made(part)
    return raw


class _Groups:
    """Decoded row groups, each kept as long as a planned slice needs it."""

    def __init__(self, feed: Feed, readers: ThreadPoolExecutor, shared: bool):
        self._feed, self._readers, self._shared = feed, readers, shared
        self._decoded: dict[Key, Future[Group]] = {}
        self._uses: dict[Key, int] = {}
        self._slices: dict[Slice, list[Key]] = {}

    def plan(self, planned: Iterator, part: Slice) -> None:
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

    def of(self, part: Slice) -> dict[tuple[int, int], Future[Group]]:
        """Return the groups of a planned slice by leaf and group index."""
        return {(leaf, group): self._decoded[leaf, epoch, group] for leaf, epoch, group in self._slices[part]}

    def made(self, part: Slice) -> None:
        """Release the groups of a finished slice that no other planned slice needs."""
        for key in self._slices.pop(part):
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key], self._decoded[key]


def _at_once(feed: Feed, slices: Iterable[Slice], shared: bool) -> Iterator[Raw]:
    """Read slices without threads, keeping the newest group of each leaf."""
    kept: dict[int, tuple[int, Group]] = {}
    work = in_turn(feed.stream.operators)

    def read(leaf: int, group: int) -> Group:
        if leaf not in kept or kept[leaf][0] != group:
            kept[leaf] = group, feed.read_group(leaf, group, shared)
        return kept[leaf][1]

    for part in slices:
        yield feed.worked(feed.raw(part, read), work)

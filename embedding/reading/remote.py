"""A reader of rows on other workers: each key once, one call per shard and batch, with a cache per version.

A batch has one version. If a shard has moved to another version, the reader reloads the published version and slice
map, clears its cache and reads the whole batch again, for at most `timeout_s`. A replicated hot set is read without
a call.
"""

# Shapes: N requested keys, U distinct keys, D width.

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nonet.embedding import SliceMap
from nonet.embedding.exchange import get_codec, make_route, select_router
from nonet.embedding.reading.publisher import RowResponse
from nonet.embedding.reading.reader import ReplicaReader
from nonet.embedding.tables import BaseTable, KeyIndex, RowColumns, TableSpec, make_table
from nonet.errors import ConfigError, StaleVersion

# table, keys [N], version, codec -> rows; what a shard's Publisher.rows answers
Ask = Callable[[str, np.ndarray, int, str], RowResponse]
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_MOST_CALLS = 16


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The published version, its slice map, and the functions that read from each shard."""

    version: int
    slices: SliceMap
    shards: Sequence[Ask]


class RemoteReader:
    """A SparseReader over calls to shards.

    `refresh` returns the published version, `cache_rows` is the size of the cache per table, `hot` is a replica.
    """

    def __init__(
        self,
        specs: Mapping[str, TableSpec],
        refresh: Callable[[], PublishedVersion],
        *,
        wire: str = "fp32",
        cache_rows: int = 1 << 18,
        hot: ReplicaReader | None = None,
        timeout_s: float = 30.0,
    ):
        self._specs = {name: TableSpec(spec.dim, "sgd", default=spec.default) for name, spec in specs.items()}
        self._timeout_s = timeout_s
        self._refresh, self._codec, self._cache_rows, self._hot = refresh, get_codec(wire), cache_rows, hot
        self.absent, self.calls, self.asked = 0, 0, 0
        self._pool = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="sparse-read")
        self._lock = threading.Lock()  # Cached rows have one version.
        self._load_published()

    @property
    def version(self) -> int:
        """The version of the last batch."""
        return self._now.version

    def refresh(self) -> int:
        """Move to the published version and return it."""
        self._load_published()
        return self.version

    def read_rows(self, table: str, keys: Tensor) -> Tensor:
        """Read the rows [N, D] of keys [N], all of one version; absent keys read the default and are counted."""
        if table not in self._specs:
            raise ConfigError(f"there is no sparse table {table!r}; there are: {', '.join(self._specs)}")
        until, pause = time.monotonic() + self._timeout_s, _PAUSE_S
        while True:
            try:
                with self._lock:
                    return self._read_rows(table, keys.numpy())
            except StaleVersion:
                if time.monotonic() > until:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            self._load_published()

    def close(self) -> None:
        """Stop the threads that make calls."""
        self._pool.shutdown()

    def _read_rows(self, table: str, keys: np.ndarray) -> Tensor:
        """Return the rows of keys [N] from the hot set and the cache, and fetch missing rows from the shards."""
        slices = self._now.slices
        plan = make_route(keys, slices, slices.shards, 0, select_router())
        hot, here = self._read_hot_set(table, plan.keys)
        known = here | self._kept[table]._contains(plan.keys) | (self._gone[table].find(plan.keys) >= 0)
        self._fetch(table, plan.keys, plan.counts, ~known)
        out = self._kept[table].lookup(plan.keys, train=False)
        out[torch.from_numpy(here)] = hot
        absent = self._gone[table].find(plan.keys) >= 0
        self.absent += int(absent[plan.place].sum())
        self._limit_cache(table)
        return plan.spread_rows(out)

    def _fetch(self, table: str, keys: np.ndarray, counts: list[int], missing: np.ndarray) -> None:
        """Call every shard that owns missing keys once, all in parallel, and cache the rows."""
        ends = np.cumsum(counts)
        pieces = [
            (shard, keys[end - count : end][missing[end - count : end]])
            for shard, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True))
        ]
        pieces = [(shard, piece) for shard, piece in pieces if len(piece)]
        calls = [(self._now.shards[shard], table, piece) for shard, piece in pieces]
        self.calls, self.asked = self.calls + len(calls), self.asked + sum(len(piece) for _, piece in pieces)
        answers = [self._ask(calls[0])] if len(calls) == 1 else list(self._pool.map(self._ask, calls))
        for (_, piece), answer in zip(pieces, answers, strict=True):
            self._cache_answer(table, piece, answer)

    def _ask(self, call: tuple[Ask, str, np.ndarray]) -> RowResponse:
        ask, table, keys = call
        return ask(table, keys, self._now.version, self._codec.name)

    def _cache_answer(self, table: str, keys: np.ndarray, answer: RowResponse) -> None:
        """Cache the rows of an answer, and the keys that have no row."""
        rows = self._codec.decode(torch.from_numpy(answer.data), self._specs[table].dim).numpy()
        count = len(keys)
        none, zero = np.zeros((count, 0), np.float32), np.zeros(count, np.int64)
        part = RowColumns(keys, rows, none, zero, np.zeros(count, dtype=bool))
        self._kept[table]._upsert(part.select(answer.there))
        self._gone[table].add(keys[~answer.there])

    def _read_hot_set(self, table: str, keys: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Read the rows of keys [N] that the hot set has at this version, and return which they are."""
        if self._hot is None:
            return torch.empty(0, self._specs[table].dim), np.zeros(len(keys), dtype=bool)
        return self._hot.find_rows(table, keys, self._now.version)

    def _limit_cache(self, table: str) -> None:
        if len(self._kept[table]) + len(self._gone[table]) > self._cache_rows:
            self._clear_cache(table)

    def _clear_cache(self, table: str) -> None:
        self._kept[table], self._gone[table] = make_table(table, self._specs[table], 0), KeyIndex()

    def _load_published(self) -> None:
        """Switch to the newest published version and clear the caches."""
        with self._lock:
            self._now = self._refresh()
            self._kept: dict[str, BaseTable] = {}
            self._gone: dict[str, KeyIndex] = {}
            for table in self._specs:
                self._clear_cache(table)

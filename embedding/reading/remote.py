"""A reader of rows on other workers: each key once, one call per shard and batch, with a cache per version.

A batch has one version. If a shard has moved to another version, the reader reloads the published version and slice
map, clears its cache and reads the whole batch again, for at most `timeout_s`.
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
from nonet.embedding.tables import BaseTable, KeyIndex, RowColumns, TableSpec, make_table
from nonet.errors import ConfigError, StaleVersion

# (table, keys [N], version, codec) -> rows: `VersionPublisher.read_rows` of a shard.
ReadShard = Callable[[str, np.ndarray, int, str], RowResponse]
# The pause before a batch is read again: it starts short, because shards publish at nearly the same time, and doubles.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.1
_MAX_CALLS = 16  # Concurrent calls to shards.


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The published version of all shards.

    Attributes:
        version: The version.
        slices: The slice map of the version.
        shards: By shard, the function that reads rows from it.
    """

    version: int
    slices: SliceMap
    shards: Sequence[ReadShard]


class RemoteReader:
    """A SparseReader over calls to shards.

    Args:
        specs: The specs of the tables by name.
        refresh: Returns the published version.
        wire: The codec of the rows.
        cache_rows: The number of keys in the cache of a table above which it is cleared.
        timeout_s: The longest time for which a batch is read again because shards have moved to another version.

    Attributes:
        absent: The number of positions whose key had no row.
        calls: The number of calls to shards.
        asked: The number of keys in these calls.
    """

    def __init__(
        self,
        specs: Mapping[str, TableSpec],
        refresh: Callable[[], PublishedVersion],
        *,
        wire: str = "fp32",
        cache_rows: int = 1 << 18,
        timeout_s: float = 30.0,
    ):
        self._specs = {name: TableSpec(spec.dim, "sgd", default=spec.default) for name, spec in specs.items()}
        self._timeout_s = timeout_s
        self._refresh, self._codec, self._cache_rows = refresh, get_codec(wire), cache_rows
        self.absent, self.calls, self.asked = 0, 0, 0
        self._pool = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="sparse-read")
        self._lock = threading.Lock()  # Cached rows and the rows of a batch must be of one version.
        self._load_published()

    @property
    def version(self) -> int:
        """The version of the last batch."""
        return self._published.version

    def refresh(self) -> int:
        """Move to the published version and return it."""
        self._load_published()
        return self.version

    def read_rows(self, table: str, keys: Tensor) -> Tensor:
        """Read the rows [N, D] of keys [N], all of one version; absent keys read the default and are counted."""
        if table not in self._specs:
            raise ConfigError(f"there is no sparse table {table!r}; there are: {', '.join(self._specs)}")
        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                with self._lock:
                    return self._read_rows(table, keys.numpy())
            except StaleVersion:
                if time.monotonic() > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            self._load_published()

    def close(self) -> None:
        """Stop the threads that make calls."""
        self._pool.shutdown()

    def _read_rows(self, table: str, keys: np.ndarray) -> Tensor:
        """Return the rows of keys [N] from the cache, and fetch missing rows from the shards."""
        slices = self._published.slices
        route = make_route(keys, slices, slices.shards, 0, select_router())
        known = self._cached_rows[table]._contains(route.keys) | (
            self._absent_keys[table].find(route.keys) >= 0
        )
        self._fetch(table, route.keys, route.counts, ~known)
        out = self._cached_rows[table].lookup(route.keys, train=False)
        is_absent = self._absent_keys[table].find(route.keys) >= 0
        self.absent += int(is_absent[route.place].sum())
        self._limit_cache(table)
        return route.spread_rows(out)

    def _fetch(self, table: str, keys: np.ndarray, counts: list[int], missing: np.ndarray) -> None:
        """Call every shard that owns missing keys once, all in parallel, and cache the rows.

        Args:
            table: The name of the table.
            keys: The distinct keys, sorted by shard [U].
            counts: The number of these keys for each shard.
            missing: Whether each key is in no cache, bool [U].
        """
        stops = np.cumsum(counts)
        missing_by_shard = [
            (shard, keys[stop - count : stop][missing[stop - count : stop]])
            for shard, (stop, count) in enumerate(zip(stops.tolist(), counts, strict=True))
        ]
        calls = [
            (self._published.shards[shard], table, shard_keys)
            for shard, shard_keys in missing_by_shard
            if len(shard_keys)
        ]
        self.calls += len(calls)
        self.asked += sum(len(shard_keys) for *_, shard_keys in calls)
        responses = [self._call(calls[0])] if len(calls) == 1 else list(self._pool.map(self._call, calls))
        for (*_, shard_keys), response in zip(calls, responses, strict=True):
            self._cache_response(table, shard_keys, response)

    def _call(self, call: tuple[ReadShard, str, np.ndarray]) -> RowResponse:
        """Read rows of the published version from one shard."""
        read_shard, table, keys = call
        return read_shard(table, keys, self._published.version, self._codec.name)

    def _cache_response(self, table: str, keys: np.ndarray, response: RowResponse) -> None:
        """Cache the rows of a response, and the keys that have no row."""
        rows = self._codec.decode(torch.from_numpy(response.data), self._specs[table].dim).numpy()
        count = len(keys)
        no_state, zero_step = np.zeros((count, 0), np.float32), np.zeros(count, np.int64)
        part = RowColumns(keys, rows, no_state, zero_step, np.zeros(count, dtype=bool))
        self._cached_rows[table]._upsert(part.select(response.there))
        self._absent_keys[table].add(keys[~response.there])

    def _limit_cache(self, table: str) -> None:
        """Clear a table's cache if it has become too large."""
        if len(self._cached_rows[table]) + len(self._absent_keys[table]) > self._cache_rows:
            self._clear_cache(table)

    def _clear_cache(self, table: str) -> None:
        self._cached_rows[table], self._absent_keys[table] = (
            make_table(table, self._specs[table], 0),
            KeyIndex(),
        )

    def _load_published(self) -> None:
        """Switch to the newest published version and clear the caches."""
        with self._lock:
            self._published = self._refresh()
            # By table: the cached rows, and the keys that are known to have no row.
            self._cached_rows: dict[str, BaseTable] = {}
            self._absent_keys: dict[str, KeyIndex] = {}
            for table in self._specs:
                self._clear_cache(table)

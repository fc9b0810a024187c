"""A store in a Redis server: one value per key, or with versions a sorted set of values by time.

    open_store("redis://cache-1:6379/users")

The row of key 7 is in the Redis key `users:7`; `users` itself holds the description of the columns. With versions, a Redis key
holds a sorted set of entries: the eight bytes of a time, followed by the row, with the time as the score. The password is read
from NONET_REDIS_PASSWORD and the user from NONET_REDIS_USER. Install with `pip install 'nonet[stores]'`. Reads and writes are
idempotent, so both are retried.
"""

# Shapes: K requested or written keys, U distinct keys, or distinct (key, time) pairs if there are versions.

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError, DataError, StoreError
from nonet.samples.stores.base import (
    Store,
    StoreDescription,
    StoreNotFoundError,
    StoreRows,
    align_rows,
    find_distinct,
)
from nonet.samples.stores.rows import RowCodec, decode_keys, encode_keys

_META = "nonet"  # The field of the Redis hash `users` that holds the description.
_MAX_TIME = 1 << 53  # Scores of sorted sets are doubles, which hold integers exactly up to this one.
_TIME_BYTES = 8  # The length of the time at the start of an entry.


class RedisStore(Store):
    """A store in a Redis server; see the module.

    Args:
        address: HOST:PORT/NAME.
        db: Database of the server.
        batch: Maximum number of keys per call.
        timeout_s: Seconds until a call times out.
        attempts: Maximum number of attempts of a read or write.

    Raises:
        ConfigError: If there is no such store.
        StoreError: If the server does not respond.
    """

    def __init__(
        self, address: str, *, db: int = 0, batch: int = 1000, timeout_s: float = 5, attempts: int = 3
    ):
        self.name, self._host_and_port, self._prefix = _parse_address(address)
        self._batch, self._attempts, self._timeout_s = batch, attempts, timeout_s
        self._server = _connect(self._host_and_port, db, timeout_s, attempts, self.name)
        meta = self._call_server(lambda: self._server.hget(self._prefix, _META))
        if meta is None:
            raise StoreNotFoundError(
                f"{self.name}: there is no store; `nonet pack SRC redis://{address}` writes one from Parquet"
            )
        self.schema, self.key, self.versions = StoreDescription.from_json(json.loads(meta), self.name)
        self._codec = RowCodec(self.schema, self.name)

    @classmethod
    def create(
        cls, address: str, schema: pa.Schema, *, key: pa.DataType, versions: bool = False, **options: Any
    ) -> RedisStore:
        """Create an empty store. Raises ConfigError if there is one already."""
        name, host_and_port, prefix = _parse_address(address)
        description = StoreDescription.create(schema, key, versions, name)
        RowCodec(description.schema, name)  # Raises DataError for a column type that cannot be stored.
        limits = {"timeout_s": 5, "attempts": 3} | {
            option: options[option] for option in ("timeout_s", "attempts") if option in options
        }
        server = _connect(host_and_port, options.get("db", 0), limits["timeout_s"], limits["attempts"], name)
        description_json = json.dumps(description.to_json())
        was_created = _call_with_errors(
            lambda: server.hsetnx(prefix, _META, description_json),
            name,
            limits["attempts"],
            limits["timeout_s"],
        )
        if not was_created:
            raise ConfigError(f"{name}: there is one already; put into it, or give another name")
        server.close()
        return cls(address, **options)

    def put(self, keys: Any, values: pa.Table | pa.RecordBatch, times: Any = None) -> None:
        """Write rows in atomic batches; a version that is written again replaces the one before."""
        checked_keys, rows = self.check_put(keys, values)
        times_K = self.check_times(times, len(rows))
        if times_K is not None and len(times_K) and np.abs(times_K).max() >= _MAX_TIME:
            raise DataError(f"{self.name}: times are seconds below 2^53, got {np.abs(times_K).max()}")
        redis_keys, row_bytes = self._make_redis_keys(checked_keys), self._codec.encode(rows)
        for start in range(0, len(redis_keys), self._batch):
            part = slice(start, start + self._batch)
            part_times = None if times_K is None else times_K[part]
            self._call_server(
                lambda part=part, times=part_times: self._write(redis_keys[part], row_bytes[part], times)
            )

    def _write(self, redis_keys: list[str], row_bytes: list[bytes], times: np.ndarray | None) -> None:
        """Write one batch in a transaction."""
        with self._server.pipeline(transaction=True) as pipeline:
            if times is None:
                pipeline.mset(dict(zip(redis_keys, row_bytes, strict=True)))
            else:
                entries = [time + row for time, row in zip(encode_keys(times), row_bytes, strict=True)]
                for redis_key, entry, time in zip(redis_keys, entries, times.tolist(), strict=True):
                    pipeline.zremrangebyscore(redis_key, time, time)  # Removes the version that is replaced.
                    pipeline.zadd(redis_key, {entry: time})
            pipeline.execute()

    def _get(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the rows of keys, newest or as of a time per key."""
        if self.versions:
            return self._get_versions(keys, columns, before)
        distinct_keys, distinct_index = find_distinct(keys)
        redis_keys = self._make_redis_keys(distinct_keys)
        row_bytes: list[bytes | None] = []
        for start in range(0, len(redis_keys), self._batch):
            part = redis_keys[start : start + self._batch]
            row_bytes += self._call_server(lambda part=part: self._server.mget(part))
        return self._decode_rows(row_bytes, columns, distinct_index)

    def _get_versions(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the newest version before each (key, time); a pair that occurs twice is read once."""
        entries, pair_index = self._read_entries(keys, before)
        return self._decode_rows([entry and entry[_TIME_BYTES:] for entry in entries], columns, pair_index)

    def _get_times(self, keys: Any, before: np.ndarray | None) -> np.ndarray:
        """Return the time of the newest version of each key, or of its newest version before a time."""
        entries, pair_index = self._read_entries(keys, before)
        times = decode_keys([(entry or bytes(_TIME_BYTES))[:_TIME_BYTES] for entry in entries], pa.int64())
        return times.to_numpy()[pair_index]

    def _read_entries(self, keys: Any, before: np.ndarray | None) -> tuple[list[bytes | None], np.ndarray]:
        """Return the newest entry before each distinct (key, time), None if there is none, and the index [K] of each pair."""
        redis_keys = self._make_redis_keys(keys)
        before_K: list[int | None] = [None] * len(redis_keys) if before is None else before.tolist()
        pairs = list(zip(redis_keys, before_K, strict=True))
        distinct_pairs = list(dict.fromkeys(pairs))
        index_of_pair = {pair: index for index, pair in enumerate(distinct_pairs)}
        newest: list[bytes | None] = []
        for start in range(0, len(distinct_pairs), self._batch):
            part = distinct_pairs[start : start + self._batch]
            entries_of_pairs = self._call_server(lambda part=part: self._read_newest(part))
            newest += [entries[0] if entries else None for entries in entries_of_pairs]
        return newest, np.array([index_of_pair[pair] for pair in pairs], np.int64)

    def _read_newest(self, pairs: list[tuple[str, int | None]]) -> list[list[bytes]]:
        """Return for each (Redis key, time) the newest entry before the time, or an empty list; None reads the newest of all."""
        with self._server.pipeline(transaction=False) as pipeline:
            for redis_key, before in pairs:
                max_score = "+inf" if before is None else f"({before}"
                pipeline.zrevrangebyscore(redis_key, max_score, "-inf", start=0, num=1)
            return pipeline.execute()

    def _decode_rows(
        self, row_bytes: list[bytes | None], columns: list[str], distinct_index: np.ndarray
    ) -> StoreRows:
        """Decode the rows that were found and align them to the keys.

        Args:
            row_bytes: The bytes of each distinct row [U]; None for a missing one.
            columns: Names of the columns.
            distinct_index: Index [K] into `row_bytes` of each key's row.
        """
        is_present = np.array([row is not None for row in row_bytes], bool)
        row_U = np.where(is_present, np.cumsum(is_present) - 1, -1)
        return align_rows(
            self._codec.decode([row for row in row_bytes if row is not None], columns),
            row_U[distinct_index] if len(row_U) else np.empty(0, np.int64),
        )

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Iterate over all rows in the server's order; a row that is written meanwhile may occur twice or not at all."""
        names, cursor = self.check_columns(columns), 0
        while True:
            cursor, redis_keys = self._call_server(
                lambda cursor=cursor: self._server.scan(cursor, f"{self._prefix}:*", self._batch)
            )
            if redis_keys:
                yield self._read_scanned(redis_keys, names)
            if not cursor:
                return

    def _read_scanned(self, redis_keys: list[bytes], names: list[str]) -> pa.RecordBatch:
        """Read all rows of some Redis keys, as a batch of `key`, `time` (if there are versions), and the columns."""
        if self.versions:
            with self._server.pipeline(transaction=False) as pipeline:
                for redis_key in redis_keys:
                    pipeline.zrange(redis_key, 0, -1)
                entries_by_key = self._call_server(pipeline.execute)
            redis_keys = [
                key for key, entries in zip(redis_keys, entries_by_key, strict=True) for _ in entries
            ]
            all_entries = [entry for entries in entries_by_key for entry in entries]
            time_column = {"time": decode_keys([entry[:_TIME_BYTES] for entry in all_entries], pa.int64())}
            row_bytes = [entry[_TIME_BYTES:] for entry in all_entries]
        else:
            # A key that was deleted since the scan listed it has no row.
            rows_or_none = self._call_server(lambda: self._server.mget(redis_keys))
            redis_keys = [key for key, row in zip(redis_keys, rows_or_none, strict=True) if row is not None]
            row_bytes, time_column = [row for row in rows_or_none if row is not None], {}
        key_texts = [redis_key[len(self._prefix) + 1 :].decode() for redis_key in redis_keys]
        key_columns = {"key": pa.array(key_texts, pa.string()).cast(self.key)} | time_column
        batch = self._codec.decode(row_bytes, names)
        return pa.RecordBatch.from_pydict(key_columns | {name: batch.column(name) for name in names})

    def collect_stats(self) -> dict[str, Any]:
        """Return the number of keys and rows, and the server (HOST:PORT)."""
        row_count_by_key: dict[Any, int] = {}
        for batch in self.scan(self.schema.names[:1]):
            for key in batch["key"].to_pylist():
                row_count_by_key[key] = row_count_by_key.get(key, 0) + 1
        row_count = sum(row_count_by_key.values())
        return {"keys": len(row_count_by_key), "rows": row_count, "place": self._host_and_port}

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _make_redis_keys(self, keys: Any) -> list[str]:
        return [
            f"{self._prefix}:{key}"
            for key in (keys.tolist() if isinstance(keys, np.ndarray) else keys.to_pylist())
        ]

    def _call_server(self, call: Callable[[], Any]) -> Any:
        return _call_with_errors(call, self.name, self._attempts, self._timeout_s)


def _call_with_errors(call: Callable[[], Any], name: str, attempts: int, timeout_s: float) -> Any:
    """Return the result of a call; convert Redis errors to one-line Nonet errors."""
    import redis

    try:
        return call()
    except redis.AuthenticationError as error:
        raise ConfigError(f"{name}: {error}; set NONET_REDIS_USER and NONET_REDIS_PASSWORD") from None
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise StoreError(
            f"{name}: no answer, asked {attempts} times within {timeout_s:g} s each ({cause}); is redis-server there?"
        ) from error
    except redis.ResponseError as error:
        raise DataError(f"{name}: the server refused: {error}") from None


def _parse_address(address: str) -> tuple[str, str, str]:
    """Parse an address HOST:PORT/NAME.

    Returns:
        The store's name in messages, "host:port", and the prefix of its Redis keys (NAME).
    """
    host_and_port, _, prefix = address.partition("/")
    host, _, port = host_and_port.partition(":")
    if not host or not (port or "6379").isdecimal() or not re.fullmatch(r"[\w.:-]+", prefix):
        raise ConfigError(
            f"store redis://{address}: wanted redis://HOST:PORT/NAME, the name of letters, digits and _.:-"
        )
    return f"store redis://{address}", f"{host}:{port or 6379}", prefix


def _connect(host_and_port: str, db: int, timeout_s: float, attempts: int, name: str) -> Any:
    """Connect to the server with retries. Raises ConfigError if redis is not installed."""
    try:
        import redis
        from redis.backoff import EqualJitterBackoff
        from redis.retry import Retry
    except ImportError:
        raise ConfigError(f"{name} needs redis: pip install 'nonet[stores]'") from None
    host, _, port = host_and_port.partition(":")
    return redis.Redis(
        host,
        int(port),
        db,
        username=os.environ.get("NONET_REDIS_USER"),
        password=os.environ.get("NONET_REDIS_PASSWORD"),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(EqualJitterBackoff(cap=2, base=0.05), attempts - 1),  # Back-off from 0.05 s to 2 s.
        health_check_interval=30,  # Seconds idle after which a connection is checked before its next use.
    )

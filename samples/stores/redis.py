"""A store in a Redis server: one value per key, or with versions a sorted set of values by time.

    open_store("redis://cache-1:6379/users")

Keys are `users:7`; `users` itself holds the description of the columns. The password is read from NONET_REDIS_PASSWORD and
the user
from NONET_REDIS_USER. Install with `pip install 'nonet[stores]'`. Reads and writes are idempotent, so both are retried.
"""

# Shapes: K keys asked for, U distinct ones.

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

_META = "nonet"
_EXACT = 1 << 53  # a score of a sorted set is a double


class RedisStore(Store):
    """A store in a Redis server; see the module.

    Args:
        address: HOST:PORT/NAME.
        db: Database of the server.
        batch: Most keys of a call.
        timeout_s: Seconds until a call times out.
        attempts: Calls before a read or write fails.

    Raises:
        ConfigError: If there is no such store.
        StoreError: If the server does not respond.
    """

    def __init__(
        self, address: str, *, db: int = 0, batch: int = 1000, timeout_s: float = 5, attempts: int = 3
    ):
        self.name, self._place, self._prefix = _parse_address(address)
        self._batch, self._attempts, self._timeout_s = batch, attempts, timeout_s
        self._server = _connect(self._place, db, timeout_s, attempts, self.name)
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
        name, place, prefix = _parse_address(address)
        described = StoreDescription.create(schema, key, versions, name)
        RowCodec(described.schema, name)
        limits = {"timeout_s": 5, "attempts": 3} | {
            key: options[key] for key in ("timeout_s", "attempts") if key in options
        }
        server = _connect(place, options.get("db", 0), limits["timeout_s"], limits["attempts"], name)
        written = json.dumps(described.to_json())
        if not _call_with_errors(
            lambda: server.hsetnx(prefix, _META, written), name, limits["attempts"], limits["timeout_s"]
        ):
            raise ConfigError(f"{name}: there is one already; put into it, or give another name")
        server.close()
        return cls(address, **options)

    def put(self, keys: Any, values: pa.Table | pa.RecordBatch, times: Any = None) -> None:
        """Write rows in atomic batches; a version that is written again replaces the one before."""
        asked, rows = self.check_put(keys, values)
        when = self.check_times(times, len(rows))
        if when is not None and len(when) and np.abs(when).max() >= _EXACT:
            raise DataError(f"{self.name}: times are seconds below 2^53, got {np.abs(when).max()}")
        names, cells = self._make_names(asked), self._codec.encode(rows)
        for at in range(0, len(names), self._batch):
            part = slice(at, at + self._batch)
            self._call_server(
                lambda part=part: self._write(names[part], cells[part], None if when is None else when[part])
            )

    def _write(self, names: list[str], cells: list[bytes], times: np.ndarray | None) -> None:
        """Write one batch in a transaction."""
        with self._server.pipeline(transaction=True) as sent:
            if times is None:
                sent.mset(dict(zip(names, cells, strict=True)))
            else:
                stamps = encode_keys(times)
                for name, cell, time, stamp in zip(names, cells, times.tolist(), stamps, strict=True):
                    sent.zremrangebyscore(name, time, time)
                    sent.zadd(name, {stamp + cell: time})
            sent.execute()

    def _get(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the rows of keys, newest or as of a time per key."""
        if self.versions:
            return self._get_versions(keys, columns, before)
        values, place = find_distinct(keys)
        names = self._make_names(values)
        found: list[bytes | None] = []
        for at in range(0, len(names), self._batch):
            found += self._call_server(lambda at=at: self._server.mget(names[at : at + self._batch]))
        return self._decode_rows(found, columns, place)

    def _get_versions(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the newest version before each (key, time); a pair that occurs twice is read once."""
        names = self._make_names(keys)
        until: list[int | None] = [None] * len(names) if before is None else before.tolist()
        pairs = list(zip(names, until, strict=True))
        once = list(dict.fromkeys(pairs))
        number = {pair: at for at, pair in enumerate(once)}
        found: list[bytes | None] = []
        for at in range(0, len(once), self._batch):
            answers = self._call_server(lambda at=at: self._read_newest(once[at : at + self._batch]))
            found += [answer[0][8:] if answer else None for answer in answers]
        return self._decode_rows(found, columns, np.array([number[pair] for pair in pairs], np.int64))

    def _read_newest(self, pairs: list[tuple[str, int | None]]) -> list[list[bytes]]:
        with self._server.pipeline(transaction=False) as asked:
            for name, until in pairs:
                most = "+inf" if until is None else f"({until}"
                asked.zrevrangebyscore(name, most, "-inf", start=0, num=1)
            return asked.execute()

    def _decode_rows(self, found: list[bytes | None], columns: list[str], place: np.ndarray) -> StoreRows:
        """Decode the rows that were found and align them to the keys."""
        there = np.array([row is not None for row in found], bool)
        row_U = np.where(there, np.cumsum(there) - 1, -1)
        return align_rows(
            self._codec.decode([row for row in found if row is not None], columns),
            row_U[place] if len(row_U) else np.empty(0, np.int64),
        )

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Iterate over all rows in the server's order; a row that is written meanwhile may occur twice or not at all."""
        names, cursor = self.check_columns(columns), 0
        while True:
            cursor, keys = self._call_server(
                lambda cursor=cursor: self._server.scan(cursor, f"{self._prefix}:*", self._batch)
            )
            if keys:
                yield self._read_scanned(keys, names)
            if not cursor:
                return

    def _read_scanned(self, keys: list[bytes], names: list[str]) -> pa.RecordBatch:
        """Read the rows of some keys of a scan."""
        if self.versions:
            with self._server.pipeline(transaction=False) as asked:
                for key in keys:
                    asked.zrange(key, 0, -1)
                answers = self._call_server(asked.execute)
            keys = [key for key, rows in zip(keys, answers, strict=True) for _ in rows]
            cells = [row for rows in answers for row in rows]
            fixed = {"time": decode_keys([row[:8] for row in cells], pa.int64())}
            cells = [row[8:] for row in cells]
        else:
            cells = self._call_server(lambda: self._server.mget(keys))
            keys = [key for key, row in zip(keys, cells, strict=True) if row is not None]
            cells, fixed = [row for row in cells if row is not None], {}
        told = [key[len(self._prefix) + 1 :].decode() for key in keys]
        key = pa.array(told, pa.string()).cast(self.key)
        whole = self._codec.decode(cells, names)
        return pa.RecordBatch.from_pydict({"key": key} | fixed | {name: whole.column(name) for name in names})

    def collect_stats(self) -> dict[str, Any]:
        """Return the number of keys and rows, and the server."""
        seen: dict[Any, int] = {}
        for part in self.scan(self.schema.names[:1]):
            for key in part["key"].to_pylist():
                seen[key] = seen.get(key, 0) + 1
        rows = sum(seen.values())
        return {"keys": len(seen), "rows": rows, "place": self._place}

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _make_names(self, keys: Any) -> list[str]:
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
    """Parse an address to the store's name in messages, host:port, and the name in the server."""
    where, _, prefix = address.partition("/")
    host, _, port = where.partition(":")
    if not host or not (port or "6379").isdecimal() or not re.fullmatch(r"[\w.:-]+", prefix):
        raise ConfigError(
            f"store redis://{address}: wanted redis://HOST:PORT/NAME, the name of letters, digits and _.:-"
        )
    return f"store redis://{address}", f"{host}:{port or 6379}", prefix


def _connect(place: str, db: int, timeout_s: float, attempts: int, name: str) -> Any:
    """Connect to the server with retries. Raises ConfigError if redis is not installed."""
    try:
        import redis
        from redis.backoff import EqualJitterBackoff
        from redis.retry import Retry
    except ImportError:
        raise ConfigError(f"{name} needs redis: pip install 'nonet[stores]'") from None
    host, _, port = place.partition(":")
    return redis.Redis(
        host,
        int(port),
        db,
        username=os.environ.get("NONET_REDIS_USER"),
        password=os.environ.get("NONET_REDIS_PASSWORD"),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(EqualJitterBackoff(cap=2, base=0.05), attempts - 1),
        health_check_interval=30,
    )

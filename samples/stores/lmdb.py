"""A store in one LMDB environment, embedded and mutable; many processes may read while one writes.

    open_store("lmdb:/data/users.lmdb")

The row of a key is one value. With versions, an LMDB key is the store's key, a zero byte and the time (eight bytes), so the
newest version before a time is one step back in the order of LMDB keys. Install with `pip install 'nonet[stores]'`. See
https://lmdb.readthedocs.io.
"""

# Shapes: K requested or written keys, U distinct keys.

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError, StoreError
from nonet.samples.stores.base import (
    Store,
    StoreDescription,
    StoreNotFoundError,
    StoreRows,
    align_rows,
    find_distinct,
)
from nonet.samples.stores.rows import RowCodec, decode_keys, encode_keys

_META = b"nonet"  # The LMDB key of the description, in the database "meta".
_MAX_KEY_BYTES = 400  # Of a text key. LMDB's own limit is 511, with the time.
_TIME_BYTES = 8  # The length of the time at the end of an LMDB key.
_SCAN_ROWS = 1 << 14  # Maximum number of rows of a batch that `scan` yields and reads in one transaction.
_NEWEST = np.iinfo(np.int64).max  # A time after every version.


class LMDBStore(Store):
    """A store in an LMDB folder.

    Args:
        folder: The folder.
        map_gb: Maximum size of the environment in GiB; disk space is used only as it fills.

    Raises:
        ConfigError: If the folder is not a store of Nonet.
    """

    is_in_files = True

    def __init__(self, folder: str | os.PathLike[str], *, map_gb: float = 256):
        self._folder = Path(folder)
        self.name = f"store lmdb:{self._folder}"
        if not (self._folder / "data.mdb").exists():
            raise StoreNotFoundError(
                f"{self.name}: there is no store; `nonet pack SRC lmdb:{self._folder}` writes one from Parquet"
            )
        self._env = _open_environment(self._folder, map_gb, self.name)
        self._rows_db = self._env.open_db(b"rows")
        with self._env.begin(db=self._env.open_db(b"meta")) as transaction:
            meta = transaction.get(_META)
        if meta is None:
            raise ConfigError(f"{self.name}: this is an LMDB environment, but no store of Nonet")
        self.schema, self.key, self.versions = StoreDescription.from_json(json.loads(bytes(meta)), self.name)
        self._codec = RowCodec(self.schema, self.name)

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        schema: pa.Schema,
        *,
        key: pa.DataType,
        versions: bool = False,
        map_gb: float = 256,
    ) -> LMDBStore:
        """Create an empty store. Raises ConfigError if there is one already."""
        path, name = Path(folder), f"store lmdb:{folder}"
        if (path / "data.mdb").exists():
            raise ConfigError(f"{name}: there is one already; put into it, or give another folder")
        description = StoreDescription.create(schema, key, versions, name)
        RowCodec(description.schema, name)  # Raises DataError for a column type that cannot be stored.
        path.mkdir(parents=True, exist_ok=True)
        env = _open_environment(path, map_gb, name)
        with env.begin(write=True, db=env.open_db(b"meta")) as transaction:
            transaction.put(_META, json.dumps(description.to_json()).encode())
        return cls(path, map_gb=map_gb)

    def put(self, keys: Any, values: pa.Table | pa.RecordBatch, times: Any = None) -> None:
        """Write all rows or none, in one transaction."""
        checked_keys, rows = self.check_put(keys, values)
        times_K = self.check_times(times, len(rows))
        lmdb_keys = self._encode_keys(checked_keys, times_K)
        with self._translate_errors(), self._env.begin(write=True, db=self._rows_db) as transaction:
            entries = zip(lmdb_keys, self._codec.encode(rows), strict=True)
            transaction.cursor().putmulti(entries, overwrite=True)

    def _get(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the rows of keys, newest or as of a time per key."""
        if self.versions:
            return self._get_versions(keys, columns, before)
        distinct_keys, distinct_index = find_distinct(keys)
        lmdb_keys = encode_keys(distinct_keys)
        with self._env.begin(db=self._rows_db, buffers=True) as transaction:
            entries = [(bytes(key), bytes(row)) for key, row in transaction.cursor().getmulti(lmdb_keys)]
        # Missing keys have no entry.
        row_of_key = {lmdb_key: index for index, (lmdb_key, _) in enumerate(entries)}
        row_U = np.fromiter((row_of_key.get(key, -1) for key in lmdb_keys), np.int64, len(lmdb_keys))
        return align_rows(self._codec.decode([row for _, row in entries], columns), row_U[distinct_index])

    def _get_versions(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the newest version before each (key, time); a pair that occurs twice is read once."""
        before_K = np.full(len(keys), _NEWEST) if before is None else before
        lmdb_keys = self._encode_keys(keys, before_K)
        rows: list[bytes] = []
        row_index: dict[
            bytes, int
        ] = {}  # The index in `rows` by LMDB key; -1 if there is no version before it.
        with self._env.begin(db=self._rows_db, buffers=True) as transaction:
            cursor = transaction.cursor()
            for lmdb_key in lmdb_keys:
                if lmdb_key in row_index:
                    continue
                row_index[lmdb_key] = -1
                if _move_to_version(cursor, lmdb_key):
                    row_index[lmdb_key] = len(rows)
                    rows.append(bytes(cursor.value()))
        row_K = np.fromiter((row_index[key] for key in lmdb_keys), np.int64, len(lmdb_keys))
        return align_rows(self._codec.decode(rows, columns), row_K)

    def _get_times(self, keys: Any, before: np.ndarray | None) -> np.ndarray:
        """Return the time of the newest version of each key, or of its newest version before a time."""
        before_K = np.full(len(keys), _NEWEST) if before is None else before
        with self._env.begin(db=self._rows_db) as transaction:
            cursor = transaction.cursor()
            found_keys = [
                cursor.key() if _move_to_version(cursor, lmdb_key) else lmdb_key
                for lmdb_key in self._encode_keys(keys, before_K)
            ]
        return decode_keys([key[-_TIME_BYTES:] for key in found_keys], pa.int64()).to_numpy()

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Iterate over all rows in the order of keys."""
        names = self.check_columns(columns)
        last_key: bytes | None = None
        while True:
            with self._env.begin(db=self._rows_db) as transaction:
                cursor = transaction.cursor()
                has_next = cursor.first() if last_key is None else cursor.set_range(last_key + b"\0")
                entries = list(islice(cursor.iternext(), _SCAN_ROWS)) if has_next else []
            if not entries:
                return
            last_key = entries[-1][0]
            keys = [key for key, _ in entries]
            if self.versions:
                times = decode_keys([key[-_TIME_BYTES:] for key in keys], pa.int64())
                keys = [key[: -_TIME_BYTES - 1] for key in keys]  # A zero byte is between key and time.
                key_columns = {"key": decode_keys(keys, self.key), "time": times}
            else:
                key_columns = {"key": decode_keys(keys, self.key)}
            batch = self._codec.decode([bytes(row) for _, row in entries], names)
            yield pa.RecordBatch.from_pydict(key_columns | {name: batch.column(name) for name in names})

    def collect_stats(self) -> dict[str, Any]:
        """Return the number of keys and rows, and the bytes on disk."""
        with self._env.begin(db=self._rows_db) as transaction:
            row_count = transaction.stat()["entries"]
        key_count = row_count
        if self.versions:
            batches = self.scan(self.schema.names[:1])
            key_count = len({key for batch in batches for key in batch["key"].to_pylist()})
        bytes_on_disk = (
            self._folder / "data.mdb"
        ).stat().st_blocks * 512  # `st_blocks` counts units of 512 bytes.
        return {"keys": key_count, "rows": row_count, "bytes": bytes_on_disk}

    def _encode_keys(self, keys: Any, times: np.ndarray | None) -> list[bytes]:
        """Return the LMDB key of each key and its time, if there are times. Raises ConfigError for an unsupported text."""
        encoded_keys = encode_keys(keys)
        for key in encoded_keys if isinstance(keys, pa.Array) else ():
            if len(key) > _MAX_KEY_BYTES or b"\0" in key or not key:
                raise ConfigError(
                    f"{self.name}: a key is text of 1 to {_MAX_KEY_BYTES} bytes without a zero byte, got {key[:40]!r}"
                )
        if times is None:
            return encoded_keys
        encoded_times = encode_keys(np.asarray(times, np.int64))
        return [key + b"\0" + time for key, time in zip(encoded_keys, encoded_times, strict=True)]

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert LMDB's write errors to StoreError."""
        import lmdb

        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreError(
                f"{self.name}: it is full; open it with a larger map_gb. Nothing was written"
            ) from error
        except lmdb.Error as error:
            raise StoreError(f"{self.name}: {error}. Nothing was written") from error


_ENVIRONMENTS: dict[
    Path, Any
] = {}  # The open environments by folder; LMDB allows one per process and folder.
_OPEN_LOCK = Lock()


def _move_to_version(cursor: Any, lmdb_key: bytes) -> bool:
    """Move a cursor to the last entry before an LMDB key; return whether it is a version of the same key."""
    has_previous = cursor.prev() if cursor.set_range(lmdb_key) else cursor.last()
    return has_previous and bytes(cursor.key())[:-_TIME_BYTES] == lmdb_key[:-_TIME_BYTES]


def _open_environment(folder: Path, map_gb: float, name: str) -> Any:
    """Return the LMDB environment of a folder, which is opened once per process.

    Args:
        folder: Folder of the store.
        map_gb: Maximum size in GiB.
        name: Name of the store in messages.

    Raises:
        ConfigError: If lmdb is not installed or the environment cannot be opened.
    """
    try:
        import lmdb
    except ImportError:
        raise ConfigError(f"{name} needs lmdb: pip install 'nonet[stores]'") from None
    path = folder.resolve()
    with _OPEN_LOCK:
        if path not in _ENVIRONMENTS or not (path / "data.mdb").exists():
            try:
                _ENVIRONMENTS[path] = lmdb.open(
                    str(path), map_size=int(map_gb * 2**30), max_dbs=2, max_readers=1024
                )
            except lmdb.Error as error:
                raise ConfigError(f"{name}: cannot be opened ({error})") from None
        return _ENVIRONMENTS[path]

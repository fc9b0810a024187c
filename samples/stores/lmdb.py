"""A store in one LMDB environment, embedded and mutable; many processes may read while one writes.

    open_store("lmdb:/data/users.lmdb")

The row of a key is one value. With versions, the key ends in its time (eight bytes), so the newest version before a time is
one step back. Install with `pip install 'nonet[stores]'`. See https://lmdb.readthedocs.io.
"""

# Shapes: K keys asked for, U distinct ones.

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

_META = b"nonet"
_LONGEST = 400  # bytes of a text key; LMDB's own limit is 511 with the time
_SCANNED = 1 << 14
_NEWEST = np.iinfo(np.int64).max


class LMDBStore(Store):
    """A store in an LMDB folder.

    Args:
        folder: The folder.
        map_gb: Largest size of the environment; disk space is used only as it fills.

    Raises:
        ConfigError: If the folder is not a store of Nonet.
    """

    def __init__(self, folder: str | os.PathLike[str], *, map_gb: float = 256):
        self._folder = Path(folder)
        self.name = f"store lmdb:{self._folder}"
        if not (self._folder / "data.mdb").exists():
            raise StoreNotFoundError(
                f"{self.name}: there is no store; `nonet pack SRC lmdb:{self._folder}` writes one from Parquet"
            )
        self._env = _open_environment(self._folder, map_gb, self.name)
        self._rows = self._env.open_db(b"rows")
        with self._env.begin(db=self._env.open_db(b"meta")) as reading:
            meta = reading.get(_META)
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
        place, name = Path(folder), f"store lmdb:{folder}"
        if (place / "data.mdb").exists():
            raise ConfigError(f"{name}: there is one already; put into it, or give another folder")
        described = StoreDescription.create(schema, key, versions, name)
        RowCodec(described.schema, name)
        place.mkdir(parents=True, exist_ok=True)
        env = _open_environment(place, map_gb, name)
        with env.begin(write=True, db=env.open_db(b"meta")) as writing:
            writing.put(_META, json.dumps(described.to_json()).encode())
        return cls(place, map_gb=map_gb)

    def put(self, keys: Any, values: pa.Table | pa.RecordBatch, times: Any = None) -> None:
        """Write all rows or none, in one transaction."""
        asked, rows = self.check_put(keys, values)
        when = self.check_times(times, len(rows))
        places = self._encode_places(asked, when)
        with self._translate_errors(), self._env.begin(write=True, db=self._rows) as writing:
            writing.cursor().putmulti(zip(places, self._codec.encode(rows), strict=True), overwrite=True)

    def _get(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the rows of keys, newest or as of a time per key."""
        if self.versions:
            return self._get_versions(keys, columns, before)
        values, place = find_distinct(keys)
        names = encode_keys(values)
        with self._env.begin(db=self._rows, buffers=True) as reading:
            found = [(bytes(name), bytes(row)) for name, row in reading.cursor().getmulti(names)]
        at = {name: number for number, (name, _) in enumerate(found)}
        row_U = np.fromiter((at.get(name, -1) for name in names), np.int64, len(names))
        return align_rows(self._codec.decode([row for _, row in found], columns), row_U[place])

    def _get_versions(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Step back once from each (key, time); a pair that occurs twice is read once."""
        when = np.full(len(keys), _NEWEST) if before is None else before
        places = self._encode_places(keys, when)
        rows: list[bytes] = []
        known: dict[bytes, int] = {}
        with self._env.begin(db=self._rows, buffers=True) as reading:
            cursor = reading.cursor()
            for place in places:
                if place in known:
                    continue
                known[place] = -1
                back = cursor.prev() if cursor.set_range(place) else cursor.last()
                if back and bytes(cursor.key())[:-8] == place[:-8]:
                    known[place] = len(rows)
                    rows.append(bytes(cursor.value()))
        row_K = np.fromiter((known[place] for place in places), np.int64, len(places))
        return align_rows(self._codec.decode(rows, columns), row_K)

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Iterate over all rows in the order of keys."""
        names = self.check_columns(columns)
        after: bytes | None = None
        while True:
            with self._env.begin(db=self._rows) as reading:
                cursor = reading.cursor()
                there = cursor.first() if after is None else cursor.set_range(after + b"\0")
                part = [cell for cell, _ in zip(cursor.iternext(), range(_SCANNED))] if there else []  # noqa: B905
            if not part:
                return
            after = part[-1][0]
            places = [name for name, _ in part]
            fixed = {"key": decode_keys([name[:-9] if self.versions else name for name in places], self.key)}
            if self.versions:
                fixed["time"] = decode_keys([name[-8:] for name in places], pa.int64())
            whole = self._codec.decode([bytes(row) for _, row in part], names)
            yield pa.RecordBatch.from_pydict(fixed | {name: whole.column(name) for name in names})

    def collect_stats(self) -> dict[str, Any]:
        """Return the number of keys and rows, and the bytes on disk."""
        with self._env.begin(db=self._rows) as reading:
            rows = reading.stat()["entries"]
        keys = rows
        if self.versions:
            keys = len({key for part in self.scan(self.schema.names[:1]) for key in part["key"].to_pylist()})
        return {"keys": keys, "rows": rows, "bytes": (self._folder / "data.mdb").stat().st_blocks * 512}

    def _encode_places(self, keys: Any, times: np.ndarray | None) -> list[bytes]:
        """Return the bytes of each key, followed by its time. Raises ConfigError for an unsupported text."""
        names = encode_keys(keys)
        for name in names if isinstance(keys, pa.Array) else ():
            if len(name) > _LONGEST or b"\0" in name or not name:
                raise ConfigError(
                    f"{self.name}: a key is text of 1 to {_LONGEST} bytes without a zero byte, got {name[:40]!r}"
                )
        if times is None:
            return names
        stamps = encode_keys(np.asarray(times, np.int64))
        return [name + b"\0" + stamp for name, stamp in zip(names, stamps, strict=True)]

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


_ENVIRONMENTS: dict[Path, Any] = {}  # LMDB allows one environment per process and folder
_OPENING = Lock()


def _open_environment(folder: Path, map_gb: float, name: str) -> Any:
    """Open the environment of a folder once per process. Raises ConfigError."""
    try:
        import lmdb
    except ImportError:
        raise ConfigError(f"{name} needs lmdb: pip install 'nonet[stores]'") from None
    whole = folder.resolve()
    with _OPENING:
        if whole not in _ENVIRONMENTS or not (whole / "data.mdb").exists():
            try:
                _ENVIRONMENTS[whole] = lmdb.open(
                    str(whole), map_size=int(map_gb * 2**30), max_dbs=2, max_readers=1024
                )
            except lmdb.Error as error:
                raise ConfigError(f"{name}: cannot be opened ({error})") from None
        return _ENVIRONMENTS[whole]

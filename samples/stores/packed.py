"""A store of immutable segments in memory-mapped files; a later segment takes precedence over an earlier one.

A segment is sorted by key, then time: `keys.npy` [U] holds distinct keys, `first.npy` [U + 1] the first row of each,
`times.npy` [R] the times if there are versions, and `rows.arrow` one Arrow batch that is never copied. A read is one binary
search and one gather, without a Python object per key. With more than eight segments, `put` merges all of them. There may
be one writer at a time; readers see complete segments.
"""

# Shapes: K keys asked for, U distinct keys of a segment, R its rows.

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.atomic import make_folder, sync, write_whole
from nonet.errors import ConfigError, DataError
from nonet.samples.stores.base import (
    Store,
    StoreDescription,
    StoreNotFoundError,
    StoreRows,
    align_rows,
    simplify_type,
)
from nonet.samples.tables import as_numbers

_META = "store.json"
_MOST = 8  # segments before they are merged
_SCANNED = 1 << 16


class PackedStore(Store):
    """A store in a folder. Raises ConfigError if the folder holds no store that this version reads."""

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = Path(folder)
        self.name = f"store {self._folder}"
        try:
            self._read_meta(json.loads((self._folder / _META).read_text()))
        except FileNotFoundError:
            raise StoreNotFoundError(
                f"{self.name}: there is no store; `nonet pack SRC {self._folder}` writes one from Parquet"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.name}: {_META} cannot be read ({error}); write the store again"
            ) from None

    def _read_meta(self, meta: dict[str, Any]) -> None:
        """Read the description and open the segments."""
        self._described = StoreDescription.from_json(meta, self.name)
        self.schema, self.key, self.versions = self._described
        self._names: list[str] = meta["segments"]
        known = {segment.folder.name: segment for segment in getattr(self, "_segments", [])}
        self._segments = [
            known.get(name) or StoreSegment(self._folder / name, self.versions) for name in self._names
        ]

    @classmethod
    def create(
        cls, folder: str | os.PathLike[str], schema: pa.Schema, *, key: pa.DataType, versions: bool = False
    ) -> PackedStore:
        """Create an empty store with the columns of a schema. Raises ConfigError if there is one already."""
        place = Path(folder)
        if (place / _META).exists():
            raise ConfigError(f"store {place}: there is one already; put into it, or give another folder")
        described = StoreDescription.create(schema, key, versions, f"store {place}")
        make_folder(place)
        _write_meta(place, described._replace(schema=_widen_schema(schema)), [])
        return cls(place)

    def put(self, keys: Any, values: pa.Table | pa.RecordBatch, times: Any = None) -> None:
        """Write rows as a new segment; merge the segments if there are too many."""
        asked, rows = self.check_put(keys, values)
        when = self.check_times(times, len(rows))
        if not len(rows):
            return
        name = write_segment(self._folder, asked, rows, when, self.name)
        self._names.append(name)
        self._publish()
        if len(self._names) > _MOST:
            self._merge()

    def refresh(self) -> None:
        """Open the segments that another process has written since."""
        self._read_meta(json.loads((self._folder / _META).read_text()))

    def _publish(self) -> None:
        _write_meta(self._folder, self._described, self._names)
        self.refresh()

    def _merge(self) -> None:
        """Merge all segments and delete the old files; readers keep what they have mapped."""
        old, parts = list(self._names), list(self.scan())
        table = pa.Table.from_batches(parts)
        rows = table.select(self.schema.names).combine_chunks().to_batches()[0]
        keys = self.check_keys(table["key"].combine_chunks())
        when = table["time"].to_numpy() if self.versions else None
        self._names = [write_segment(self._folder, keys, rows, when, self.name)]
        self._publish()
        for name in old:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _get(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the rows of keys, newest or as of a time per key."""
        numbers = keys if isinstance(keys, np.ndarray) else as_numbers(keys)
        if len(self._segments) == 1:
            segment = self._segments[0]
            return gather_rows(segment, columns, segment.find_rows(numbers, before))
        best, best_time = (
            np.full((2, len(numbers)), -1, np.int64),
            np.full(len(numbers), np.iinfo(np.int64).min),
        )
        for at, segment in enumerate(self._segments):
            row = segment.find_rows(numbers, before)
            time = segment.times[np.maximum(row, 0)] if self.versions else np.zeros(len(row), np.int64)
            newer = (row >= 0) & (time >= best_time)
            best[0, newer], best[1, newer], best_time[newer] = at, row[newer], time[newer]
        return self._gather_segments(columns, best[0], best[1])

    def _gather_segments(self, columns: list[str], segment_K: np.ndarray, row_K: np.ndarray) -> StoreRows:
        """Gather rows from several segments."""
        place, parts, count = np.full(len(row_K), -1, np.int64), [], 0
        for at, segment in enumerate(self._segments):
            mine = np.flatnonzero(segment_K == at)
            parts.append(segment.batch.select(columns).take(pa.array(row_K[mine])))
            place[mine] = np.arange(count, count + len(mine))
            count += len(mine)
        schema = pa.schema([self.schema.field(name) for name in columns])
        whole = pa.concat_batches(parts) if parts else pa.RecordBatch.from_pylist([], schema)
        return align_rows(whole, place)

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Iterate over all rows in the order of key and time."""
        names = self.check_columns(columns)
        if len(self._segments) == 1:
            yield from self._segments[0].scan(names)
            return
        batches = [batch for segment in self._segments for batch in segment.scan(names)]
        if not batches:
            return
        table = pa.Table.from_batches(batches)
        yield from table.take(pa.array(self._find_latest(table))).combine_chunks().to_batches(_SCANNED)

    def _find_latest(self, table: pa.Table) -> np.ndarray:
        """Return the rows of a scan in order of key and time; of duplicate versions only the later segment's."""
        order = np.arange(len(table))
        numbers = as_numbers(table["key"].combine_chunks())
        time = table["time"].to_numpy() if self.versions else np.zeros(len(table), np.int64)
        order = np.lexsort((order, time, numbers))
        key, when = numbers[order], time[order]
        last = np.append((key[1:] != key[:-1]) | (when[1:] != when[:-1]), True)
        return order[last]

    def collect_stats(self) -> dict[str, Any]:
        """Return the number of keys, rows and segments, and the bytes on disk."""
        keys = [segment.keys for segment in self._segments]
        return {
            "keys": len(np.unique(np.concatenate([np.empty(0, np.int64), *keys]))),
            "rows": sum(len(segment.batch) for segment in self._segments),
            "bytes": sum(f.stat().st_size for name in self._names for f in (self._folder / name).iterdir()),
            "segments": len(self._segments),
        }


class StoreSegment:
    """One segment, mapped when it is first read."""

    def __init__(self, folder: Path, versions: bool):
        self.folder, self._versions = folder, versions

    @cached_property
    def keys(self) -> np.ndarray:
        """Distinct keys [U] ascending: numbers, or of text their hashes."""
        return np.load(self.folder / "keys.npy", mmap_mode="r")

    @cached_property
    def first(self) -> np.ndarray:
        """The first row of each key [U + 1]."""
        return np.load(self.folder / "first.npy", mmap_mode="r")

    @cached_property
    def times(self) -> np.ndarray:
        """The time of each row [R]."""
        return np.load(self.folder / "times.npy", mmap_mode="r")

    @cached_property
    def batch(self) -> pa.RecordBatch:
        """The rows, a view of the file."""
        with pa.memory_map(str(self.folder / "rows.arrow")) as source:
            return pa.ipc.open_file(source).get_batch(0)

    def find_rows(self, numbers: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        """Return the row of each key [K], -1 if there is none, or none before its time."""
        place = np.searchsorted(self.keys, numbers)
        place = np.minimum(place, len(self.keys) - 1)
        there = self.keys[place] == numbers
        if not self._versions:
            return np.where(there, place, -1)
        low, high = self.first[place], self.first[place + 1]
        if before is not None:
            high = _find_last_before(self.times, low, high, before)
        return np.where(there & (high > low), high - 1, -1)

    def scan(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Iterate over the rows with their keys and times."""
        names = self.batch.schema.names
        for start in range(0, len(self.batch), _SCANNED):
            part = self.batch.slice(start, _SCANNED)
            if "key:" in names:
                key = part.column("key:").cast(pa.string())
            else:
                rows = (
                    np.searchsorted(self.first, np.arange(start, start + len(part)), "right") - 1
                    if self._versions
                    else slice(start, start + len(part))
                )
                key = pa.array(self.keys[rows])
            fixed = {"key": key} | (
                {"time": pa.array(self.times[start : start + len(part)])} if self._versions else {}
            )
            yield pa.RecordBatch.from_pydict(fixed | {name: part.column(name) for name in columns})


def gather_rows(segment: StoreSegment, columns: list[str], row_K: np.ndarray) -> StoreRows:
    """Gather the rows of a segment for keys."""
    found = row_K >= 0
    offsets = np.zeros(len(row_K) + 1, np.int64)
    np.cumsum(found, out=offsets[1:])
    index = row_K if offsets[-1] == len(row_K) else row_K[found]
    return StoreRows(segment.batch.select(columns).take(pa.array(index)), offsets)


def _find_last_before(times: np.ndarray, low: np.ndarray, high: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return one past the last row in [low, high) whose time is before `before`, for all keys at once."""
    left, right = low.copy(), high.copy()
    for _ in range(int((high - low).max(initial=0)).bit_length()):
        open_ = left < right
        middle = np.where(open_, (left + right) // 2, 0)
        earlier = open_ & (times[middle] < before)
        left = np.where(earlier, middle + 1, left)
        right = np.where(open_ & ~earlier, middle, right)
    return left


def write_segment(folder: Path, keys: Any, rows: pa.RecordBatch, times: np.ndarray | None, label: str) -> str:
    """Write rows as a new segment atomically and return its name. Raises DataError for a duplicate version."""
    numbers = keys if isinstance(keys, np.ndarray) else as_numbers(keys)
    when = np.zeros(len(numbers), np.int64) if times is None else times
    order = np.lexsort((when, numbers))
    key, time = numbers[order], when[order]
    twice = np.flatnonzero((key[1:] == key[:-1]) & (time[1:] == time[:-1]))
    if len(twice):
        first = keys[int(order[twice[0]])]
        raise DataError(
            f"{label}: {len(twice)} rows repeat a key{' and its time' if times is not None else ''}, the first: {first}"
            + ("" if times is not None else "; name the column of their times, and they become versions")
        )
    starts = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    rows = rows.take(pa.array(order)) if not (order == np.arange(len(order))).all() else rows
    if not isinstance(keys, np.ndarray):
        rows = rows.append_column("key:", keys.take(pa.array(order)).cast(pa.large_string()))
    name = f"segment-{uuid.uuid4().hex[:12]}"
    draft = folder / f".{name}"
    draft.mkdir()
    np.save(draft / "keys.npy", key[starts])
    if times is not None:
        np.save(draft / "times.npy", time)
        np.save(draft / "first.npy", np.append(starts, len(key)).astype(np.int64))
    with pa.OSFile(str(draft / "rows.arrow"), "wb") as out, pa.ipc.new_file(out, rows.schema) as writer:
        writer.write_batch(rows)
    for path in draft.iterdir():
        sync(path)
    os.replace(draft, folder / name)
    sync(folder)
    return name


def _write_meta(folder: Path, described: StoreDescription, segments: Sequence[str]) -> None:
    meta = described.to_json() | {"segments": list(segments)}
    write_whole(folder / _META, json.dumps(meta, indent=1).encode())


def _widen_schema(schema: pa.Schema) -> pa.Schema:
    """Use large offsets for all types of variable length, because a segment is one batch of any size."""
    return pa.schema([pa.field(field.name, _widen_type(field.type)) for field in schema])


def _widen_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with 64-bit offsets."""
    kind = simplify_type(kind)
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    return pa.large_list(_widen_type(kind.value_type)) if pa.types.is_list(kind) else kind

"""A store of immutable segments in memory-mapped files; a later segment takes precedence over an earlier one.

A segment is sorted by key, then time. `keys.npy` [U] has the distinct keys as integers (text keys are hashed) and `rows.arrow`
the rows as one Arrow batch, with text keys in the column `key:`. If the store has versions, `first.npy` [U + 1] has the first
row of each key and `times.npy` [R] the times in unix seconds. A read is one binary search and one gather, without a Python
object per key. If there are more than eight segments, `put` merges all of them. There can be one writer at a time; readers see
only complete segments.
"""

# Shapes: K requested keys, U distinct keys of a segment, R rows of a segment.

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
_MAX_SEGMENTS = 8  # Maximum number of segments before they are merged, because a read searches each of them.
_SCAN_ROWS = 1 << 16  # Maximum number of rows of a batch that `scan` yields.


class PackedStore(Store):
    """A store in a folder; see the module.

    Args:
        folder: The folder.

    Raises:
        StoreNotFoundError: If the folder has no store.
        ConfigError: If this version cannot read the store.
    """

    is_in_files = True

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = Path(folder)
        self.name = f"store {self._folder}"
        try:
            self._apply_meta(json.loads((self._folder / _META).read_text()))
        except FileNotFoundError:
            raise StoreNotFoundError(
                f"{self.name}: there is no store; `nonet pack SRC {self._folder}` writes one from Parquet"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.name}: {_META} cannot be read ({error}); write the store again"
            ) from None

    def _apply_meta(self, meta: dict[str, Any]) -> None:
        """Set the description from the store's metadata and open the segments that are not open yet."""
        self._description = StoreDescription.from_json(meta, self.name)
        self.schema, self.key, self.versions = self._description
        self._names: list[str] = meta["segments"]
        known = {segment.folder.name: segment for segment in getattr(self, "_segments", [])}
        self._segments = [
            known.get(name) or StoreSegment(self._folder / name, self.versions) for name in self._names
        ]

    @classmethod
    def create(
        cls, folder: str | os.PathLike[str], schema: pa.Schema, *, key: pa.DataType, versions: bool = False
    ) -> PackedStore:
        """Create an empty store with the columns of a schema. Raises ConfigError if the folder has a store."""
        path = Path(folder)
        if (path / _META).exists():
            raise ConfigError(f"store {path}: there is one already; add rows to it, or use another folder")
        description = StoreDescription.create(schema, key, versions, f"store {path}")
        make_folder(path)
        _write_meta(path, description._replace(schema=_widen_schema(schema)), [])
        return cls(path)

    def put(self, keys: Any, values: pa.Table | pa.RecordBatch, times: Any = None) -> None:
        """Write rows as a new segment, and merge all segments if there are more than eight."""
        checked_keys, rows = self.check_put(keys, values)
        times_R = self.check_times(times, len(rows))
        if not len(rows):
            return
        name = write_segment(self._folder, checked_keys, rows, times_R, self.name)
        self._names.append(name)
        self._publish()
        if len(self._names) > _MAX_SEGMENTS:
            self._merge()

    def refresh(self) -> None:
        """Open the segments that another process has written since the store was opened or refreshed."""
        self._apply_meta(json.loads((self._folder / _META).read_text()))

    def _publish(self) -> None:
        """Write the list of segments to the store's metadata, and open the new ones."""
        _write_meta(self._folder, self._description, self._names)
        self.refresh()

    def _merge(self) -> None:
        """Merge all segments and delete the old files; other processes can still read files that they have mapped."""
        old_names = list(self._names)
        table = pa.Table.from_batches(list(self.scan()))
        rows = table.select(self.schema.names).combine_chunks().to_batches()[0]
        keys = self.check_keys(table["key"].combine_chunks())
        times_R = table["time"].to_numpy() if self.versions else None
        self._names = [write_segment(self._folder, keys, rows, times_R, self.name)]
        self._publish()
        for name in old_names:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _get(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the newest row of each key, or its newest row before a time."""
        key_numbers = keys if isinstance(keys, np.ndarray) else as_numbers(keys)
        if len(self._segments) == 1:
            segment = self._segments[0]
            return gather_rows(segment, columns, segment.find_rows(key_numbers, before))
        segment_K, row_K = np.full((2, len(key_numbers)), -1, np.int64)
        best_time = np.full(len(key_numbers), np.iinfo(np.int64).min)
        for segment_index, segment in enumerate(self._segments):
            rows = segment.find_rows(key_numbers, before)
            times = segment.times[np.maximum(rows, 0)] if self.versions else np.zeros(len(rows), np.int64)
            is_newer = (rows >= 0) & (times >= best_time)
            segment_K[is_newer], row_K[is_newer] = segment_index, rows[is_newer]
            best_time[is_newer] = times[is_newer]
        return self._gather_segments(columns, segment_K, row_K)

    def _get_times(self, keys: Any, before: np.ndarray | None) -> np.ndarray:
        """Return the time of the newest version of each key, or of its newest version before a time."""
        key_numbers = keys if isinstance(keys, np.ndarray) else as_numbers(keys)
        newest = np.full(len(key_numbers), np.iinfo(np.int64).min)
        for segment in self._segments:
            rows = segment.find_rows(key_numbers, before)
            times = segment.times[np.maximum(rows, 0)]
            newest = np.where(rows >= 0, np.maximum(newest, times), newest)
        return newest

    def _gather_segments(self, columns: list[str], segment_K: np.ndarray, row_K: np.ndarray) -> StoreRows:
        """Gather the row of each key from its segment.

        Args:
            columns: Names of the columns.
            segment_K: Index of each key's segment; -1 for a key without a row.
            row_K: Index of each key's row in its segment.
        """
        gathered_row, batches, gathered_count = np.full(len(row_K), -1, np.int64), [], 0
        for segment_index, segment in enumerate(self._segments):
            key_indices = np.flatnonzero(segment_K == segment_index)
            batches.append(segment.batch.select(columns).take(pa.array(row_K[key_indices])))
            gathered_row[key_indices] = np.arange(gathered_count, gathered_count + len(key_indices))
            gathered_count += len(key_indices)
        schema = pa.schema([self.schema.field(name) for name in columns])
        gathered = pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema)
        return align_rows(gathered, gathered_row)

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
        yield from table.take(pa.array(self._find_latest(table))).combine_chunks().to_batches(_SCAN_ROWS)

    def _find_latest(self, table: pa.Table) -> np.ndarray:
        """Return row indices in order of key and time; of rows with equal key and time, only that of the latest segment."""
        row_order = np.arange(len(table))
        key_numbers = as_numbers(table["key"].combine_chunks())
        times = table["time"].to_numpy() if self.versions else np.zeros(len(table), np.int64)
        # Among rows of equal key and time, that of the latest segment is last, because its rows are last in the table.
        row_order = np.lexsort((row_order, times, key_numbers))
        sorted_keys, sorted_times = key_numbers[row_order], times[row_order]
        is_last = np.append(
            (sorted_keys[1:] != sorted_keys[:-1]) | (sorted_times[1:] != sorted_times[:-1]), True
        )
        return row_order[is_last]

    def collect_stats(self) -> dict[str, Any]:
        """Return the numbers of keys, rows and segments, and the bytes on disk."""
        keys_by_segment = [segment.keys for segment in self._segments]
        return {
            "keys": len(np.unique(np.concatenate([np.empty(0, np.int64), *keys_by_segment]))),
            "rows": sum(len(segment.batch) for segment in self._segments),
            "bytes": sum(
                file.stat().st_size for name in self._names for file in (self._folder / name).iterdir()
            ),
            "segments": len(self._segments),
        }


class StoreSegment:
    """A segment, whose files are mapped when they are first read.

    Args:
        folder: Folder of the segment.
        versions: Whether its rows have times.
    """

    def __init__(self, folder: Path, versions: bool):
        self.folder, self._versions = folder, versions

    @cached_property
    def keys(self) -> np.ndarray:
        """The distinct keys [U], ascending; text keys are hashed."""
        return np.load(self.folder / "keys.npy", mmap_mode="r")

    @cached_property
    def first(self) -> np.ndarray:
        """The first row of each key, and the number of rows as the end of the last one, [U + 1]."""
        return np.load(self.folder / "first.npy", mmap_mode="r")

    @cached_property
    def times(self) -> np.ndarray:
        """The time of each row in unix seconds [R], ascending within a key."""
        return np.load(self.folder / "times.npy", mmap_mode="r")

    @cached_property
    def batch(self) -> pa.RecordBatch:
        """The rows [R], a view of the file."""
        with pa.memory_map(str(self.folder / "rows.arrow")) as source:
            return pa.ipc.open_file(source).get_batch(0)

    def find_rows(self, key_numbers: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        """Find the newest row of each key, or its newest row before a time.

        Args:
            key_numbers: Keys [K] as integers; text keys are hashed.
            before: Unix seconds [K]; None for the newest row.

        Returns:
            Row indices [K]; -1 if there is no such row.
        """
        key_index = np.searchsorted(self.keys, key_numbers)
        key_index = np.minimum(key_index, len(self.keys) - 1)
        has_key = self.keys[key_index] == key_numbers
        if not self._versions:
            return np.where(has_key, key_index, -1)  # Without versions, each key has one row.
        low, high = self.first[key_index], self.first[key_index + 1]
        if before is not None:
            high = _find_end_before(self.times, low, high, before)
        return np.where(has_key & (high > low), high - 1, -1)

    def scan(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Iterate over the rows, with the keys as column `key` and the times as column `time`."""
        stored_names = self.batch.schema.names
        for start in range(0, len(self.batch), _SCAN_ROWS):
            part = self.batch.slice(start, _SCAN_ROWS)
            if "key:" in stored_names:  # Text keys are in the rows; `self.keys` has their hashes.
                keys = part.column("key:").cast(pa.string())
            else:
                key_index = (
                    np.searchsorted(self.first, np.arange(start, start + len(part)), "right") - 1
                    if self._versions
                    else slice(start, start + len(part))
                )
                keys = pa.array(self.keys[key_index])
            key_columns = {"key": keys} | (
                {"time": pa.array(self.times[start : start + len(part)])} if self._versions else {}
            )
            yield pa.RecordBatch.from_pydict(key_columns | {name: part.column(name) for name in columns})


def gather_rows(segment: StoreSegment, columns: list[str], row_K: np.ndarray) -> StoreRows:
    """Gather the rows of a segment by their indices [K]; -1 for a key without a row."""
    has_row = row_K >= 0
    offsets = np.zeros(len(row_K) + 1, np.int64)
    np.cumsum(has_row, out=offsets[1:])
    found_rows = row_K if offsets[-1] == len(row_K) else row_K[has_row]
    return StoreRows(segment.batch.select(columns).take(pa.array(found_rows)), offsets)


def _find_end_before(times: np.ndarray, low: np.ndarray, high: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Find, for all keys at once by binary search, where the rows of a key that are older than its time end.

    Args:
        times: Times [R] of the rows, ascending within a key.
        low: First row of each key [K].
        high: End of the rows of each key [K].
        before: Time of each key [K].

    Returns:
        The end [K] of the rows in [low, high) whose time is below `before`.
    """
    next_low, next_high = low.copy(), high.copy()
    for _ in range(int((high - low).max(initial=0)).bit_length()):
        unresolved = next_low < next_high
        middle = np.where(unresolved, (next_low + next_high) // 2, 0)
        earlier = unresolved & (times[middle] < before)
        next_low = np.where(earlier, middle + 1, next_low)
        next_high = np.where(unresolved & ~earlier, middle, next_high)
    return next_low


def write_segment(folder: Path, keys: Any, rows: pa.RecordBatch, times: np.ndarray | None, label: str) -> str:
    """Write rows as a new segment atomically.

    Args:
        folder: Folder of the store.
        keys: Keys [R], int64 or an Arrow array of text.
        rows: Rows [R] in any order.
        times: Unix seconds [R]; None without versions.
        label: Prefix of error messages.

    Returns:
        The name of the segment, which is not in the store's metadata yet.

    Raises:
        DataError: If two rows have the same key and time.
    """
    key_numbers = keys if isinstance(keys, np.ndarray) else as_numbers(keys)
    times_R = np.zeros(len(key_numbers), np.int64) if times is None else times
    order = np.lexsort((times_R, key_numbers))
    sorted_numbers, sorted_times = key_numbers[order], times_R[order]
    duplicates = np.flatnonzero(
        (sorted_numbers[1:] == sorted_numbers[:-1]) & (sorted_times[1:] == sorted_times[:-1])
    )
    if len(duplicates):
        first = keys[int(order[duplicates[0]])]
        raise DataError(
            f"{label}: {len(duplicates)} rows repeat a key{' and its time' if times is not None else ''}, the first: {first}"
            + ("" if times is not None else "; to store them as versions, name the column of their times")
        )
    # First row of each key.
    starts = np.flatnonzero(np.append(True, sorted_numbers[1:] != sorted_numbers[:-1]))
    rows = rows.take(pa.array(order)) if not (order == np.arange(len(order))).all() else rows
    if not isinstance(keys, np.ndarray):
        rows = rows.append_column("key:", keys.take(pa.array(order)).cast(pa.large_string()))
    name = f"segment-{uuid.uuid4().hex[:12]}"
    draft = folder / f".{name}"
    draft.mkdir()
    np.save(draft / "keys.npy", sorted_numbers[starts])
    if times is not None:
        np.save(draft / "times.npy", sorted_times)
        np.save(draft / "first.npy", np.append(starts, len(sorted_numbers)).astype(np.int64))
    with pa.OSFile(str(draft / "rows.arrow"), "wb") as out, pa.ipc.new_file(out, rows.schema) as writer:
        writer.write_batch(rows)
    for path in draft.iterdir():
        sync(path)
    os.replace(draft, folder / name)
    sync(folder)
    return name


def _write_meta(folder: Path, description: StoreDescription, segments: Sequence[str]) -> None:
    """Write the description and the names of the segments, in order, to the store's metadata file atomically."""
    meta = description.to_json() | {"segments": list(segments)}
    write_whole(folder / _META, json.dumps(meta, indent=1).encode())


def _widen_schema(schema: pa.Schema) -> pa.Schema:
    """Use 64-bit offsets for all types of variable length, because a segment is one batch of any size."""
    return pa.schema([pa.field(field.name, _widen_type(field.type)) for field in schema])


def _widen_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with 64-bit offsets."""
    kind = simplify_type(kind)
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    return pa.large_list(_widen_type(kind.value_type)) if pa.types.is_list(kind) else kind

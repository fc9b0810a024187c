"""The cold tier: rows that do not fit into memory, in files of one size on a local disk.

A row is appended to the newest file and read through a memory map. If more than half of the bytes on disk are dead,
the file with the fewest live rows is rewritten, so that the tier never takes more than twice the live rows and two
files. The tier is scratch space: after a crash, rows come from the checkpoint, which has all of them. The next
process that starts deletes the files of processes that have ended.
"""

# Shapes: N keys, D width, S numbers of optimizer state in a row.

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from nonet.embedding.tables import ALL_SLICES, RowColumns, TableSpec, get_state_width
from nonet.embedding.tiers.slot_index import SlotIndex
from nonet.errors import NonetError

SEGMENT_BYTES = 64 << 20
_PREFIX = "cold-"
_AGAIN = "the run's commits have all rows, start again from the newest"
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _RecordFile:
    """One file with space for `records` records, filled from its start."""

    def __init__(self, path: Path, kind: np.dtype, records: int):
        self.path, self._kind = path, kind
        self.used, self.live = 0, 0
        try:
            self._file = path.open("xb", buffering=0)
            os.truncate(path, records * kind.itemsize)
        except OSError as error:
            raise NonetError(
                f"the cold tier cannot make {path}: {error.strerror}; free some disk, or name another folder"
            ) from error
        self._map = np.memmap(path, dtype=kind, mode="r", shape=(records,))

    def append(self, records: np.ndarray) -> None:
        """Append records with write calls, so that a full disk raises an error instead of a signal."""
        left, at = records.view(np.uint8).data, self.used * self._kind.itemsize
        while len(left):
            done = os.pwrite(self._file.fileno(), left, at)
            left, at = left[done:], at + done
        self.used += len(records)

    @property
    def records(self) -> np.ndarray:
        """The records, to be read at once: reading a map beyond the end of its file would kill the process."""
        if os.fstat(self._file.fileno()).st_size < self._map.nbytes:
            raise NonetError(f"the cold tier's file {self.path} was cut short by somebody else; {_AGAIN}")
        return self._map

    def remove(self) -> None:
        """Close and delete the file."""
        self._file.close()
        del self._map
        self.path.unlink()


class DiskTier:
    """Rows by key in a new folder below `folder`, which is deleted together with this object."""

    def __init__(self, folder: str | Path, spec: TableSpec, *, segment_bytes: int = SEGMENT_BYTES):
        self.spec = spec
        number = np.float32 if spec.dtype == "fp32" else np.int16
        self._kind = np.dtype(
            [("key", np.int64), ("step", np.int64), ("row", number, (spec.dim,)), ("state", np.float32, (get_state_width(spec),))]
        )  # fmt: skip
        self._records = max(1, segment_bytes // self._kind.itemsize)
        self.folder, lock = _create_own_folder(Path(folder))
        weakref.finalize(self, _sweep, self.folder, lock)
        self._index = SlotIndex("cold")
        self._segments: dict[int, _RecordFile] = {}
        self._head = -1
        self.moved = 0  # Rows rewritten by compaction.

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """The bytes written to existing files, including dead rows."""
        return sum(segment.used for segment in self._segments.values()) * self._kind.itemsize

    @property
    def live_bytes(self) -> int:
        """The bytes of live rows."""
        return len(self) * self._kind.itemsize

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Return which keys [N] are in the tier, as bool [N]."""
        return self._index.find(keys) >= 0

    def iterate_keys(self, slices: range = ALL_SLICES) -> Iterator[np.ndarray]:
        """Yield the keys of these slices in parts, by slice and key."""
        for keys, _ in self._index.items(slices):
            yield keys

    def put(self, rows: RowColumns) -> None:
        """Add or replace distinct rows; on a full disk none is added."""
        if len(rows.key):
            places = self._append(self._pack(rows))
            self._count_live(self._index.find(rows.key), -1)
            self._index.put(rows.key, places)
            self._count_live(places, 1)
            self._compact()

    def read(self, keys: np.ndarray) -> RowColumns:
        """Read the rows of keys [N], in that order; a key that is not in the tier is marked as deleted."""
        places = self._index.find(keys)
        records = np.zeros(len(keys), dtype=self._kind)
        for number, at in self._group_by_segment(places):
            records[at] = self._segments[number].records[places[at] % self._records]
        wrong = np.flatnonzero((places >= 0) & (records["key"] != keys))
        if len(wrong):
            raise _make_changed_error(self.folder, len(wrong))
        return self._unpack(keys, records, places < 0)

    def drop(self, keys: np.ndarray) -> None:
        """Remove the rows of these distinct keys; unknown keys are ignored."""
        places = self._index.find(keys)
        self._count_live(places, -1)
        self._index.drop(keys[places >= 0])
        self._compact()

    def clear(self) -> None:
        """Remove every row."""
        self._index.clear()
        for segment in self._segments.values():
            segment.remove()
        self._segments, self._head = {}, -1

    def _count_live(self, places: np.ndarray, sign: int) -> None:
        for number, at in self._group_by_segment(places):
            self._segments[number].live += sign * len(at)

    def _group_by_segment(self, places: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (segment, positions in `places`) in the order of the file; places below 0 are skipped."""
        order = np.argsort(places, kind="stable")
        order = order[np.searchsorted(places[order], 0) :]
        numbers = places[order] // self._records
        for part in np.split(order, np.flatnonzero(np.diff(numbers)) + 1):
            if len(part):
                yield int(places[part[0]] // self._records), part

    def _append(self, records: np.ndarray) -> np.ndarray:
        """Write records to the newest files and return their places [N]."""
        places, done = np.empty(len(records), np.int64), 0
        while done < len(records):
            head = self._get_writable()
            count = min(len(records) - done, self._records - head.used)
            places[done : done + count] = self._head * self._records + head.used + np.arange(count)
            try:
                head.append(records[done : done + count])
            except OSError as error:
                raise NonetError(
                    f"the cold tier in {self.folder} cannot write {count} rows ({error.strerror}); it holds "
                    f"{self.nbytes} bytes: free some disk, or give the table more memory (host_rows)"
                ) from error
            done += count
        return places

    def _get_writable(self) -> _RecordFile:
        """Return the newest file, or a new one if it is full."""
        head = self._segments.get(self._head)
        if head is None or head.used == self._records:
            self._head += 1
            head = _RecordFile(self.folder / f"{self._head:08d}.rows", self._kind, self._records)
            self._segments[self._head] = head
        return head

    def _compact(self) -> None:
        """Delete files without live rows, and rewrite files while more than half of all rows are dead."""
        for number in [number for number, segment in self._list_full() if not segment.live]:
            self._segments.pop(number).remove()
        while sum(segment.used for _, segment in self._list_full()) > 2 * len(self) + self._records:
            number = min(self._list_full(), key=lambda item: item[1].live)[0]
            self._rewrite(number)

    def _list_full(self) -> list[tuple[int, _RecordFile]]:
        return [(number, segment) for number, segment in self._segments.items() if number != self._head]

    def _rewrite(self, number: int) -> None:
        """Append the live rows of a file to the newest file and delete it."""
        segment = self._segments[number]
        keys = np.array(segment.records["key"])
        live = self._index.find(keys) == number * self._records + np.arange(len(keys))
        records = segment.records[live]
        if len(records) != segment.live:
            raise _make_changed_error(self.folder, segment.live - len(records))
        places = self._append(records)
        self._index.put(keys[live], places)
        self._count_live(places, 1)
        self.moved += len(records)
        self._segments.pop(number).remove()

    def _pack(self, rows: RowColumns) -> np.ndarray:
        """Convert rows to records."""
        records = np.empty(len(rows.key), dtype=self._kind)
        half = _HALVES.get(self.spec.dtype)
        row = rows.row if half is None else torch.from_numpy(rows.row).to(half).view(torch.int16).numpy()
        records["key"], records["step"], records["row"], records["state"] = (
            rows.key,
            rows.step,
            row,
            rows.state,
        )
        return records

    def _unpack(self, keys: np.ndarray, records: np.ndarray, gone: np.ndarray) -> RowColumns:
        """Convert records to rows."""
        row, half = np.ascontiguousarray(records["row"]), _HALVES.get(self.spec.dtype)
        if half is not None:
            row = torch.from_numpy(row).view(half).float().numpy()
        return RowColumns(
            keys, row, np.ascontiguousarray(records["state"]), np.ascontiguousarray(records["step"]), gone
        )


def _make_changed_error(folder: Path, rows: int) -> NonetError:
    return NonetError(
        f"{rows} rows of the cold tier in {folder} are not where they were written: its files were changed by somebody else; "
        f"{_AGAIN}"
    )


def _create_own_folder(parent: Path) -> tuple[Path, int]:
    """Create a folder and lock it while this process runs.

    Folders without a lock were left by processes that were killed; they are deleted.
    """
    parent.mkdir(parents=True, exist_ok=True)
    gate = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(
            gate, fcntl.LOCK_EX
        )  # Two processes that start at once could delete each other's folder before it is locked.
        for left in parent.glob(f"{_PREFIX}*"):
            lock = _try_lock(left)
            if lock is not None:
                _sweep(left, lock)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(gate)
    return folder, lock


def _sweep(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Lock this folder and return the lock, or None if another process has it."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock

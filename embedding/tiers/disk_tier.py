"""The cold tier: rows that do not fit into memory, in files of equal size on a local disk.

Rows are appended to the newest file and read through memory maps. A replaced or removed row stays in its file as a dead record.
While more than about half of the records are dead, the file with the fewest live rows is rewritten, so that the tier never takes
more disk than twice the live rows plus two files. The files are temporary: after a crash, all rows are restored from the
checkpoint, and the next process that starts deletes the files of processes that have ended.
"""

# Shapes: N keys, D width, S elements of optimizer state per row.

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

SEGMENT_BYTES = 64 << 20  # The size of a file.
_PREFIX = "cold-"
_RESTART_HINT = "the run's checkpoints have all rows; restart from the newest one"
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _RecordFile:
    """One file with space for `records` records, filled from its start.

    Attributes:
        used: The number of records that have been written.
        live: The number of these that were not replaced or removed since; the tier updates it.
    """

    def __init__(self, path: Path, record_dtype: np.dtype, records: int):
        self.path, self._record_dtype = path, record_dtype
        self.used, self.live = 0, 0
        try:
            self._file = path.open("xb", buffering=0)
            os.truncate(path, records * record_dtype.itemsize)
        except OSError as error:
            raise NonetError(
                f"the cold tier cannot create {path}: {error.strerror}; free disk space, or select another folder"
            ) from error
        self._map = np.memmap(path, dtype=record_dtype, mode="r", shape=(records,))

    def append(self, records: np.ndarray) -> None:
        """Append records with write calls: on a full disk they raise OSError, where a memory map would raise SIGBUS."""
        remaining, offset = records.view(np.uint8).data, self.used * self._record_dtype.itemsize
        while len(remaining):
            written = os.pwrite(self._file.fileno(), remaining, offset)
            remaining, offset = remaining[written:], offset + written
        self.used += len(records)

    @property
    def records(self) -> np.ndarray:
        """The records; read them immediately, because reading a map of a truncated file kills the process."""
        if os.fstat(self._file.fileno()).st_size < self._map.nbytes:
            raise NonetError(
                f"the cold tier's file {self.path} was truncated by another process; {_RESTART_HINT}"
            )
        return self._map

    def remove(self) -> None:
        """Close and delete the file."""
        self._file.close()
        del self._map
        self.path.unlink()


class DiskTier:
    """Rows by key, stored in a new directory below `folder` that is deleted together with this object.

    A key's place is a number that encodes where its record is: file number * records per file + position in the file.

    Attributes:
        moved: The number of rows that compaction has rewritten.
    """

    def __init__(self, folder: str | Path, spec: TableSpec, *, segment_bytes: int = SEGMENT_BYTES):
        self.spec = spec
        element_dtype = np.float32 if spec.dtype == "fp32" else np.int16
        self._record_dtype = np.dtype(
            [("key", np.int64), ("step", np.int64), ("row", element_dtype, (spec.dim,)), ("state", np.float32,
            (get_state_width(spec),))]
        )  # fmt: skip
        self._records_per_file = max(1, segment_bytes // self._record_dtype.itemsize)
        self.folder, lock = _create_own_folder(Path(folder))
        weakref.finalize(self, _delete_folder, self.folder, lock)
        self._index = SlotIndex("cold")  # Key -> place.
        self._files: dict[int, _RecordFile] = {}
        self._newest_number = -1  # The number of the newest file, -1 if there is none.
        self.moved = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """The bytes written to existing files, including dead rows."""
        return sum(file.used for file in self._files.values()) * self._record_dtype.itemsize

    @property
    def live_bytes(self) -> int:
        """The bytes of live rows."""
        return len(self) * self._record_dtype.itemsize

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Return which keys [N] are in the tier, as bool [N]."""
        return self._index.find(keys) >= 0

    def iterate_keys(self, slices: range = ALL_SLICES) -> Iterator[np.ndarray]:
        """Yield the keys of these slices in arrays, in the order of slice and key."""
        for keys, _ in self._index.items(slices):
            yield keys

    def put(self, rows: RowColumns) -> None:
        """Add or replace rows with distinct keys; if the disk is full, none of them is added."""
        if len(rows.key):
            places = self._append(self._pack(rows))
            self._count_live(self._index.find(rows.key), -1)
            self._index.put(rows.key, places)
            self._count_live(places, 1)
            self._compact()

    def read(self, keys: np.ndarray) -> RowColumns:
        """Read the rows of keys [N] in their order; keys that are not in the tier get zeros and are marked as deleted."""
        places = self._index.find(keys)
        records = np.zeros(len(keys), dtype=self._record_dtype)
        for number, indices in self._group_by_file(places):
            records[indices] = self._files[number].records[places[indices] % self._records_per_file]
        mismatched = np.flatnonzero((places >= 0) & (records["key"] != keys))
        if len(mismatched):
            raise _make_changed_files_error(self.folder, len(mismatched))
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
        for file in self._files.values():
            file.remove()
        self._files, self._newest_number = {}, -1

    def _count_live(self, places: np.ndarray, sign: int) -> None:
        """Add `sign` to the number of live rows of each place's file; places below 0 are skipped."""
        for number, indices in self._group_by_file(places):
            self._files[number].live += sign * len(indices)

    def _group_by_file(self, places: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (file number, indices into `places`) in the order of the files; places below 0 are skipped."""
        order = np.argsort(places, kind="stable")
        order = order[np.searchsorted(places[order], 0) :]  # Without the places below 0.
        numbers = places[order] // self._records_per_file
        for part in np.split(order, np.flatnonzero(np.diff(numbers)) + 1):
            if len(part):
                yield int(places[part[0]] // self._records_per_file), part

    def _append(self, records: np.ndarray) -> np.ndarray:
        """Append records to the newest file, and to new ones when it is full, and return their places [N]."""
        places, appended = np.empty(len(records), np.int64), 0
        while appended < len(records):
            file = self._get_or_create_newest()
            count = min(len(records) - appended, self._records_per_file - file.used)
            places[appended : appended + count] = (
                self._newest_number * self._records_per_file + file.used + np.arange(count)
            )
            try:
                file.append(records[appended : appended + count])
            except OSError as error:
                raise NonetError(
                    f"the cold tier in {self.folder} cannot write {count} rows ({error.strerror}); it has "
                    f"{self.nbytes} bytes. Free disk space, or give the table more memory (host_rows)"
                ) from error
            appended += count
        return places

    def _get_or_create_newest(self) -> _RecordFile:
        """Return the newest file, after creating one if there is none or the newest is full."""
        file = self._files.get(self._newest_number)
        if file is None or file.used == self._records_per_file:
            self._newest_number += 1
            file = _RecordFile(
                self.folder / f"{self._newest_number:08d}.rows", self._record_dtype, self._records_per_file
            )
            self._files[self._newest_number] = file
        return file

    def _compact(self) -> None:
        """Delete full files without live rows, and rewrite full files while more than about half of their records are dead."""
        for number in [number for number, file in self._list_full() if not file.live]:
            self._files.pop(number).remove()
        while sum(file.used for _, file in self._list_full()) > 2 * len(self) + self._records_per_file:
            fewest_live, _ = min(self._list_full(), key=lambda item: item[1].live)
            self._rewrite(fewest_live)

    def _list_full(self) -> list[tuple[int, _RecordFile]]:
        """Return the numbers and files of all files except the newest, which alone can have free space."""
        return [(number, file) for number, file in self._files.items() if number != self._newest_number]

    def _rewrite(self, number: int) -> None:
        """Append the live rows of a file to the newest file and delete it."""
        file = self._files[number]
        keys = np.array(file.records["key"])
        is_live = self._index.find(keys) == number * self._records_per_file + np.arange(len(keys))
        records = file.records[is_live]
        if len(records) != file.live:
            raise _make_changed_files_error(self.folder, file.live - len(records))
        places = self._append(records)
        self._index.put(keys[is_live], places)
        self._count_live(places, 1)
        self.moved += len(records)
        self._files.pop(number).remove()

    def _pack(self, rows: RowColumns) -> np.ndarray:
        """Convert rows to records."""
        records = np.empty(len(rows.key), dtype=self._record_dtype)
        half_dtype = _HALF_DTYPES.get(self.spec.dtype)
        row = (
            rows.row
            if half_dtype is None
            else torch.from_numpy(rows.row).to(half_dtype).view(torch.int16).numpy()
        )
        records["key"], records["step"], records["row"], records["state"] = (
            rows.key,
            rows.step,
            row,
            rows.state,
        )
        return records

    def _unpack(self, keys: np.ndarray, records: np.ndarray, deleted: np.ndarray) -> RowColumns:
        """Convert records to the rows of keys [N], of which `deleted` [N] are not in the tier."""
        row, half_dtype = np.ascontiguousarray(records["row"]), _HALF_DTYPES.get(self.spec.dtype)
        if half_dtype is not None:
            row = torch.from_numpy(row).view(half_dtype).float().numpy()
        return RowColumns(
            keys, row, np.ascontiguousarray(records["state"]), np.ascontiguousarray(records["step"]), deleted
        )


def _make_changed_files_error(folder: Path, rows: int) -> NonetError:
    return NonetError(
        f"{rows} rows of the cold tier in {folder} are not where they were written: another process changed its files; "
        f"{_RESTART_HINT}"
    )


def _create_own_folder(parent: Path) -> tuple[Path, int]:
    """Create a directory for this process, lock it while the process runs, and return it with the lock's file descriptor.

    Directories without a lock were left by processes that were killed; they are deleted.
    """
    parent.mkdir(parents=True, exist_ok=True)
    parent_lock = os.open(parent, os.O_RDONLY)
    try:
        # Without this lock, two processes that start at once could delete each other's folder before it is locked.
        fcntl.flock(parent_lock, fcntl.LOCK_EX)
        for other in parent.glob(f"{_PREFIX}*"):
            lock = _try_lock(other)
            if lock is not None:
                _delete_folder(other, lock)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(parent_lock)
    return folder, lock


def _delete_folder(folder: Path, lock: int) -> None:
    """Delete a directory and release its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Lock a directory and return the lock's file descriptor; None if it is locked by another process or missing."""
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

"""Rows that memory has no room for, in files of one size on a disk of this machine.

A row is written once, at the end of the newest file, and read through a memory map; when more than half of what lies on disk is
dead, the emptiest file is written anew: never more than twice the live rows and two files. The tier is scratch: after a
crash rows come from the checkpoint, which has them all; files whose process is gone are swept by the next that starts.
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
    """One file of `records` records, filled from its start."""

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
        """Through a write call, so that a full disk is an error, not a signal."""
        left, at = records.view(np.uint8).data, self.used * self._kind.itemsize
        while len(left):
            done = os.pwrite(self._file.fileno(), left, at)
            left, at = left[done:], at + done
        self.used += len(records)

    @property
    def records(self) -> np.ndarray:
        """All of them, to be read at once: reading a map beyond a file's end would kill the process."""
        if os.fstat(self._file.fileno()).st_size < self._map.nbytes:
            raise NonetError(f"the cold tier's file {self.path} was cut short by somebody else; {_AGAIN}")
        return self._map

    def remove(self) -> None:
        self._file.close()
        del self._map
        self.path.unlink()


class DiskTier:
    """Rows by key in a folder of their own under `folder`; it goes with this object."""

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
        self.moved = 0  # rows written anew by compaction

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes written to files that are still there, dead rows included."""
        return sum(segment.used for segment in self._segments.values()) * self._kind.itemsize

    @property
    def live_bytes(self) -> int:
        """Bytes of the rows held."""
        return len(self) * self._kind.itemsize

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Which keys [N] are held."""
        return self._index.find(keys) >= 0

    def iterate_keys(self, slices: range = ALL_SLICES) -> Iterator[np.ndarray]:
        """The keys held of these slices, by slice and key, some at a time."""
        for keys, _ in self._index.items(slices):
            yield keys

    def put(self, rows: RowColumns) -> None:
        """Take distinct rows in; a row that is held already is replaced. On a full disk none is."""
        if len(rows.key):
            places = self._append(self._pack(rows))
            self._count_live(self._index.find(rows.key), -1)
            self._index.put(rows.key, places)
            self._count_live(places, 1)
            self._compact()

    def read(self, keys: np.ndarray) -> RowColumns:
        """The rows of keys [N], in that order; a key that is not held is marked deleted."""
        places = self._index.find(keys)
        records = np.zeros(len(keys), dtype=self._kind)
        for number, at in self._group_by_segment(places):
            records[at] = self._segments[number].records[places[at] % self._records]
        wrong = np.flatnonzero((places >= 0) & (records["key"] != keys))
        if len(wrong):
            raise _make_changed_error(self.folder, len(wrong))
        return self._unpack(keys, records, places < 0)

    def drop(self, keys: np.ndarray) -> None:
        """Forget the rows of these distinct keys; unknown ones are passed over."""
        places = self._index.find(keys)
        self._count_live(places, -1)
        self._index.drop(keys[places >= 0])
        self._compact()

    def clear(self) -> None:
        """Forget every row."""
        self._index.clear()
        for segment in self._segments.values():
            segment.remove()
        self._segments, self._head = {}, -1

    def _count_live(self, places: np.ndarray, sign: int) -> None:
        for number, at in self._group_by_segment(places):
            self._segments[number].live += sign * len(at)

    def _group_by_segment(self, places: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(segment, positions in `places`), in the order of the file; places below 0 are left out."""
        order = np.argsort(places, kind="stable")
        order = order[np.searchsorted(places[order], 0) :]
        numbers = places[order] // self._records
        for part in np.split(order, np.flatnonzero(np.diff(numbers)) + 1):
            if len(part):
                yield int(places[part[0]] // self._records), part

    def _append(self, records: np.ndarray) -> np.ndarray:
        """Write records to the newest files; returns their places [N]."""
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
        head = self._segments.get(self._head)
        if head is None or head.used == self._records:
            self._head += 1
            head = _RecordFile(self.folder / f"{self._head:08d}.rows", self._kind, self._records)
            self._segments[self._head] = head
        return head

    def _compact(self) -> None:
        """Free files without a live row; write the emptiest anew while more than half of all is dead."""
        for number in [number for number, segment in self._list_full() if not segment.live]:
            self._segments.pop(number).remove()
        while sum(segment.used for _, segment in self._list_full()) > 2 * len(self) + self._records:
            number = min(self._list_full(), key=lambda item: item[1].live)[0]
            self._rewrite(number)

    def _list_full(self) -> list[tuple[int, _RecordFile]]:
        return [(number, segment) for number, segment in self._segments.items() if number != self._head]

    def _rewrite(self, number: int) -> None:
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
    """A fresh folder and its lock, held while this process lives; unlocked ones are what a killed process left, and go."""
    parent.mkdir(parents=True, exist_ok=True)
    gate = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(
            gate, fcntl.LOCK_EX
        )  # two that start at once would sweep each other's folder before it is locked
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
    """A lock on this folder, None where somebody has it."""
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

"""Snapshots of a table at the end of a step while later steps change it; only rows that change are copied.

Before a step changes a row for the first time, the row is kept as it was. The step of a row tells which rows those
are: up to the snapshot's step s it is unchanged, from s + 2 on it has been kept. Only at s + 1, the step of rows
that were created and not yet trained, the kept and new keys are looked up. A snapshot therefore takes memory for
the rows that change while it is open, and a reader or writer of slices sees one version. A table that evicts also
changes rows by itself: the core keeps those as well, and the NumPy table is copied completely when the snapshot is
opened.

`StepLock` is the lock between training steps and background readers: a step waits for one holder, never for a
queue. A thread that releases a lock and takes it again at once usually gets it before a sleeping thread wakes up,
so a writer of many short pieces could delay a step by all of them. The background therefore uses `hold_patiently`,
which waits while a step waits.
"""

from __future__ import annotations

import threading
import time

# Shapes: N requested keys, R kept rows.
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from nonet.embedding import SLICES, compute_slices
from nonet.embedding.tables import (
    ALL_SLICES,
    BaseTable,
    RowColumns,
    iterate_rows,
    iterate_waiting,
    join_rows,
    make_absent_rows,
    make_table,
    sort_by_slice,
    take,
)
from nonet.embedding.versions.native_snapshot import KeptRows, NativeVersion, ReadBuffers
from nonet.errors import ConfigError, StaleVersion

_READ_SLICES = 1 << 12
_PIECE_SLICES, _PIECE_BYTES = 64, 300_000


class TableHistory:
    """The open snapshots of a table; every change of the table goes through `hold_for_update`."""

    def __init__(self, table: BaseTable):
        self.table, self.lock = table, StepLock()
        self._open: list[TableSnapshot] = []
        self._spare: KeptRows | None = None

    @property
    def snapshots(self) -> list[TableSnapshot]:
        """The open snapshots."""
        return list(self._open)

    def open(self) -> TableSnapshot:
        """Open a snapshot at the table's last step; changed rows are kept until it is closed."""
        with self.lock:
            snapshot = TableSnapshot(self, self._spare)
            self._spare = None
            self._open.append(snapshot)
            return snapshot

    def close(self, snapshot: TableSnapshot) -> None:
        """Remove the kept rows of a snapshot, which cannot be read afterwards."""
        with self.lock:
            self._open.remove(snapshot)
        memory = snapshot.release_memory()
        if memory is not None:
            memory.clear()
            self._spare = memory

    @contextmanager
    def hold_for_update(self, keys: np.ndarray, step: int) -> Iterator[None]:
        """Hold the lock around `apply` of these keys at `step`."""
        with self.lock:
            if self._open:
                self._keep_rows(keys, step)
            yield

    @contextmanager
    def hold_for_insert(self, keys: np.ndarray) -> Iterator[None]:
        """Hold the lock around a lookup of these keys that may create rows."""
        with self.lock:
            # Rows created after a later step have a later step, so they do not belong to the version.
            young = [snapshot for snapshot in self._open if snapshot.step == self.table.step]
            if young:
                absent = keys[~self.table._contains(keys)]
                for snapshot in young if len(absent) else ():
                    snapshot.add_new_keys(absent)
            yield

    def _keep_rows(self, keys: np.ndarray, step: int) -> None:
        """Copy rows that are about to change into all open snapshots."""
        behind = [snapshot.step for snapshot in self._open if step <= snapshot.step]
        if behind:
            raise ConfigError(
                f"table {self.table.name!r} changes at step {step} while a snapshot of step {behind[0]} is open; "
                "open snapshots between steps"
            )
        for snapshot in self._open:
            snapshot.keep_rows(keys)


def open_all(histories: Mapping[str, TableHistory]) -> dict[str, TableSnapshot]:
    """Open a snapshot of every table, or of none if one of them has no memory for it."""
    opened: dict[str, TableSnapshot] = {}
    try:
        for name, history in histories.items():
            opened[name] = history.open()
    except BaseException:
        for snapshot in opened.values():
            snapshot.close()
        raise
    return opened


class TableSnapshot:
    """A snapshot of a table at the end of step `step`, opened by TableHistory.

    Rows can be read by key (`read_rows`), and each slice once (`read_slices`).
    """

    def __init__(self, history: TableHistory, spare: KeptRows | None = None):
        self.step = history.table.step
        self._history, self._table = history, history.table
        self.spec = history.table.spec
        table = history.table
        self._given = np.zeros(SLICES, dtype=bool)
        self._born, self._moved = np.empty(0, dtype=np.int64), False
        self._deleted = table.deleted.copy()
        self._gone: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._waits = join_rows(list(iterate_waiting(table)), table.spec)
        self._pieces = NativeVersion.create(table, self.step, self._given, spare)
        self._copied = table.spec.evicts and self._pieces is None
        if self._pieces is None:
            self._kept = make_table(table.name, table.spec, 0)
        for part in table._iterate_rows(ALL_SLICES, None) if self._copied else ():
            self._kept._upsert(part)

    @property
    def kept_rows(self) -> int:
        """The number of rows that were kept."""
        return len(self._kept if self._pieces is None else self._pieces)

    def release_memory(self) -> KeptRows | None:
        """Stop keeping rows and return the core's memory for another snapshot, if any."""
        if self._pieces is None:
            return None
        self._pieces.close()
        return self._pieces.memory

    def keep_rows(self, keys: np.ndarray) -> None:
        """Keep this version's rows of keys that are about to change."""
        if self._pieces is not None:
            self._pieces.keep_rows(keys)
        elif not self._copied:
            before = take(self._table, np.unique(keys))
            first = self._find_unchanged(before) & ~self._given[compute_slices(before.key)]
            if first.any():
                self._kept._upsert(before if first.all() else before.select(first))

    def add_new_keys(self, keys: np.ndarray) -> None:
        """Record keys that had no row in this version and may get one."""
        self._born = np.union1d(self._born, keys)
        if self._pieces is not None:
            self._pieces.set_new_keys(self._born, self._moved)

    def add_moved_keys(self, keys: np.ndarray) -> None:
        """Record keys whose rows came from another shard and do not belong to this version here."""
        self._moved = True
        self.add_new_keys(keys)

    def read_slices(
        self, slices: range, since: int | None = None, room: ReadBuffers | None = None
    ) -> RowColumns:
        """Yield the rows of slices by slice and key; each slice can be read once.

        Rows are read in pieces of about 0.3 MB, so that a training step never waits for long.

        Args:
            slices: The slices to read.
            since: Only rows that changed after this step; None: all rows.
            room: Buffers to read into; rows are then valid only until the next use of the buffers.
        """
        old, parts = self._select_waiting(slices), []
        if self._pieces is not None:
            room = ReadBuffers(self.spec) if room is None else room
            for piece in self._cut(slices, 1):
                with self._hold_for_read(patient=True):
                    self._pieces.read(piece, since, room)
                    self._given[piece.start : piece.stop] = True
            parts.append(room.take_rows())
        for piece in self._cut(slices, _PIECE_SLICES) if self._pieces is None else ():
            with self._hold_for_read(patient=True):
                if not self._copied:
                    parts.extend(
                        self._select_unchanged(part) for part in iterate_rows(self._table, piece, since)
                    )
                old.extend(iterate_rows(self._kept, piece, since))
                self._given[piece.start : piece.stop] = True
        every = join_rows([*parts, *old], self.spec)
        return sort_by_slice(every) if old else every

    def _cut(self, slices: range, least: int) -> Iterator[range]:
        """Split slices into ranges of about 0.3 MB, of at least `least` slices."""
        whole = max(1, len(self._table)) * self.spec.row_bytes
        step = max(least, SLICES * _PIECE_BYTES // whole)
        for start in range(slices.start, slices.stop, step):
            yield range(start, min(start + step, slices.stop))

    def is_complete_since(self, since: int) -> bool:
        """Return whether every key that was deleted after step `since` is known."""
        return self._deleted.is_complete_since(since)

    def list_deleted(self, slices: range, since: int) -> list[RowColumns]:
        """List keys of these slices deleted after `since`, or raise StaleVersion (see `is_complete_since`)."""
        if since not in self._gone:
            self._gone[since] = self._deleted.list_since(since)
        keys, steps = self._gone[since]
        place = compute_slices(keys)
        mine = (place >= slices.start) & (place < slices.stop)
        return [make_absent_rows(self.spec, keys[mine], steps[mine])] if mine.any() else []

    def read_changes(self, since: int | None = None) -> RowColumns:
        """Yield every row of this version that changed after step `since`, the deletes first.

        Without the core, a row that changes during this call may be yielded twice, with the same contents.
        """
        every = [] if since is None else self.list_deleted(ALL_SLICES, since)
        if self._pieces is not None:
            room = ReadBuffers(self.spec)
            for piece in self._cut(ALL_SLICES, 1):
                with self._hold_for_read(patient=True):
                    self._pieces.read(piece, since, room)
            return join_rows([*every, room.take_rows()], self.spec)
        for start in range(0, SLICES, _READ_SLICES) if not self._copied else ():
            with self._hold_for_read(patient=True):
                parts = iterate_rows(self._table, range(start, start + _READ_SLICES), since)
                every.extend(self._select_unchanged(part) for part in parts)
        with self._hold_for_read():
            every.extend(iterate_rows(self._kept, ALL_SLICES, since))
        return join_rows(every, self.spec)

    def read_rows(self, keys: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Read the rows [N, D] of keys [N], the default row if absent, and return which were present [N]."""
        with self._hold_for_read():
            now = take(self._table, keys)
            there = self._find_unchanged(now) & (not self._copied)
            out = np.where(there[:, None], now.row, np.float32(self.spec.default)).astype(np.float32)
            if self._pieces is not None:
                old = self._pieces.find_kept(keys, out)
            else:
                old = ~there
                old[old] = self._kept._contains(keys[old])
                if old.any():
                    out[old] = self._kept.lookup(keys[old], train=False).numpy()
        return torch.from_numpy(out), there | old

    def close(self) -> None:
        """Close the snapshot, so that the table changes without keeping rows."""
        self._history.close(self)

    @contextmanager
    def _hold_for_read(self, patient: bool = False) -> Iterator[None]:
        """Hold the table's lock, with `hold_patiently` if `hold_patiently`; raise StaleVersion after `close`."""
        with self._history.lock.hold_patiently() if patient else self._history.lock:
            if self not in self._history.snapshots:
                raise StaleVersion(
                    f"the version of table {self._table.name!r} at step {self.step} was read after it was closed"
                )
            yield

    def _find_unchanged(self, live: RowColumns) -> np.ndarray:
        """Return which rows [N] of the table still belong to this version."""
        same = ~live.deleted & (live.step <= self.step)
        if self._moved:
            unsure = np.flatnonzero(~live.deleted & (live.step <= self.step + 1))
        else:
            unsure = np.flatnonzero(~live.deleted & (live.step == self.step + 1))
        if len(unsure):
            keys = live.key[unsure]
            copied = self._kept._contains(keys) if self._pieces is None else self._pieces.find_kept(keys)
            same[unsure] = ~copied & ~np.isin(keys, self._born)
        return same

    def _select_unchanged(self, live: RowColumns) -> RowColumns:
        same = self._find_unchanged(live)
        return live if same.all() else live.select(same)

    def _select_waiting(self, slices: range) -> list[RowColumns]:
        if not len(self._waits.key):
            return []
        place = compute_slices(self._waits.key)
        mine = (place >= slices.start) & (place < slices.stop)
        return [self._waits.select(mine)] if mine.any() else []


_LOOK_S = 1e-4  # A waiting step takes the lock within tens of microseconds of its release.


class StepLock:
    """A re-entrant lock that gives training steps priority.

    Steps use `with lock:`, the background uses `with lock.hold_patiently():`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting, self._count = 0, threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wait()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextmanager
    def hold_patiently(self) -> Iterator[None]:
        """Hold the lock once no step waits for it."""
        while True:
            while self._waiting:
                time.sleep(_LOOK_S)
            self._lock.acquire()
            if not self._waiting:
                break
            self._lock.release()
        try:
            yield
        finally:
            self._lock.release()

    def _wait(self) -> None:
        """Acquire the lock and be counted as waiting meanwhile."""
        with self._count:
            self._waiting += 1
        try:
            self._lock.acquire()
        finally:
            with self._count:
                self._waiting -= 1

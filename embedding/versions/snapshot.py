"""Snapshots of a table at the end of a step while later steps change it; only rows that change are copied.

Before a step changes a row for the first time after the snapshot, a copy of the row is kept. The step of a row shows
whether the table's row still belongs to a snapshot of step s: up to s it is unchanged, from s + 2 on a copy has been
kept. A row of step s + 1 was changed by that step, or created for it, perhaps before the snapshot, so its key is
looked up among the kept and the new keys. A snapshot therefore takes memory only for the rows that change while it
is open, and a reader or writer of slices sees one version. A table that evicts also changes rows by itself: the core
keeps copies of those as well, and the NumPy table is copied completely when the snapshot is opened.

`StepLock` is the lock between training steps and background readers: a step waits for one holder, never for a
queue. A thread that releases a lock and takes it again at once usually gets it before a sleeping thread wakes up,
so a writer of many short pieces could delay a step by all of them. The background therefore uses `hold_patiently`,
which waits while a step waits.
"""

from __future__ import annotations

import threading
import time
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

# Shapes: N requested keys, D width.

_READ_SLICES = 1 << 12  # `read_changes` reads this many slices at a time without the core.
# Slices are read in pieces of about 0.3 MB, between which a step can take the lock. Without the core a piece has at least
# 64 slices, because every piece searches the whole table.
_PIECE_SLICES, _PIECE_BYTES = 64, 300_000


class TableHistory:
    """The open snapshots of a table; every change of the table goes through `hold_for_update`."""

    def __init__(self, table: BaseTable):
        self.table, self.lock = table, StepLock()
        self._open: list[TableSnapshot] = []
        self._spare: KeptRows | None = None  # The empty memory of a closed snapshot, for the next one.

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
        """Keep the rows of these keys in the open snapshots and hold the lock, for an `apply` at `step` in the body."""
        with self.lock:
            if self._open:
                self._keep_rows(keys, step)
            yield

    @contextmanager
    def hold_for_insert(self, keys: np.ndarray) -> Iterator[None]:
        """Record the absent keys in the open snapshots and hold the lock, for a lookup in the body that may create rows."""
        with self.lock:
            # In older snapshots the step of a new row shows that it does not belong to the version.
            current_snapshots = [snapshot for snapshot in self._open if snapshot.step == self.table.step]
            if current_snapshots:
                absent_keys = keys[~self.table._contains(keys)]
                for snapshot in current_snapshots if len(absent_keys) else ():
                    snapshot.add_new_keys(absent_keys)
            yield

    def _keep_rows(self, keys: np.ndarray, step: int) -> None:
        """Copy rows that are about to change into all open snapshots."""
        reached_steps = [snapshot.step for snapshot in self._open if step <= snapshot.step]
        if reached_steps:
            raise ConfigError(
                f"table {self.table.name!r} changes at step {step} while a snapshot of step {reached_steps[0]} is open; "
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
        # For each slice, whether `read_slices` has read it; its rows need not be kept any more.
        self._given = np.zeros(SLICES, dtype=bool)
        # The keys that got a row after the snapshot, and whether some of these rows came from another shard.
        self._new_keys, self._moved = np.empty(0, dtype=np.int64), False
        self._deleted = table.deleted.copy()
        # By `since`: the keys that were deleted after that step, and the steps at which they were.
        self._deleted_since: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._waiting_rows = join_rows(list(iterate_waiting(table)), table.spec)
        # The core's version of the table, or None for a NumPy table, which is copied completely if it evicts.
        self._pieces = NativeVersion.create(table, self.step, self._given, spare)
        self._copied = table.spec.evicts and self._pieces is None
        if self._pieces is None:
            self._kept = make_table(table.name, table.spec, 0)
        for part in table._iterate_rows(ALL_SLICES, None) if self._copied else ():
            self._kept._upsert(part)

    @property
    def kept_rows(self) -> int:
        """The number of rows that have been copied into this snapshot."""
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
            rows = take(self._table, np.unique(keys))
            is_needed = self._find_unchanged(rows) & ~self._given[compute_slices(rows.key)]
            if is_needed.any():
                self._kept._upsert(rows if is_needed.all() else rows.select(is_needed))

    def add_new_keys(self, keys: np.ndarray) -> None:
        """Record keys that had no row in this version and may get one."""
        self._new_keys = np.union1d(self._new_keys, keys)
        if self._pieces is not None:
            self._pieces.set_new_keys(self._new_keys, self._moved)

    def add_moved_keys(self, keys: np.ndarray) -> None:
        """Record keys whose rows came from another shard and do not belong to this version here."""
        self._moved = True
        self.add_new_keys(keys)

    def read_slices(
        self, slices: range, since: int | None = None, buffers: ReadBuffers | None = None
    ) -> RowColumns:
        """Read the rows of slices; each slice can be read once.

        Rows are read in pieces of about 0.3 MB, so that a training step never waits for long.

        Args:
            slices: The slices to read.
            since: Only rows that changed after this step; None: all rows.
            buffers: Buffers to read into; rows are then valid only until the next use of the buffers.

        Returns:
            The rows in the order of slice and key, with the keys that wait for admission.
        """
        kept_parts, unchanged_parts = self._select_waiting(slices), []
        if self._pieces is not None:
            buffers = ReadBuffers(self.spec) if buffers is None else buffers
            for piece in self._split_slices(slices, min_slices=1):
                with self._hold_for_read(patient=True):
                    self._pieces.read(piece, since, buffers)
                    self._given[piece.start : piece.stop] = True
            unchanged_parts.append(buffers.take_rows())
        for piece in self._split_slices(slices, _PIECE_SLICES) if self._pieces is None else ():
            with self._hold_for_read(patient=True):
                if not self._copied:
                    unchanged_parts.extend(
                        self._select_unchanged(part) for part in iterate_rows(self._table, piece, since)
                    )
                kept_parts.extend(iterate_rows(self._kept, piece, since))
                self._given[piece.start : piece.stop] = True
        rows = join_rows([*unchanged_parts, *kept_parts], self.spec)
        return sort_by_slice(rows) if kept_parts else rows

    def _split_slices(self, slices: range, min_slices: int) -> Iterator[range]:
        """Split slices into ranges of about 0.3 MB of rows, of at least `min_slices` slices."""
        table_bytes = max(1, len(self._table)) * self.spec.row_bytes
        piece_slices = max(min_slices, SLICES * _PIECE_BYTES // table_bytes)
        for start in range(slices.start, slices.stop, piece_slices):
            yield range(start, min(start + piece_slices, slices.stop))

    def is_complete_since(self, since: int) -> bool:
        """Return whether every key that was deleted after step `since` is known."""
        return self._deleted.is_complete_since(since)

    def list_deleted(self, slices: range, since: int) -> list[RowColumns]:
        """Return the keys of these slices deleted after `since` as a list of at most one part of rows marked as deleted.

        Raises:
            StaleVersion: If not every such key is known (see `is_complete_since`).
        """
        if since not in self._deleted_since:
            self._deleted_since[since] = self._deleted.list_since(since)
        keys, steps = self._deleted_since[since]
        key_slices = compute_slices(keys)
        selected = (key_slices >= slices.start) & (key_slices < slices.stop)
        return [make_absent_rows(self.spec, keys[selected], steps[selected])] if selected.any() else []

    def read_changes(self, since: int | None = None) -> RowColumns:
        """Read every row of this version that changed after step `since`, after the keys that were deleted since then.

        Without the core, a row that changes during this call may be read twice, with the same contents.
        """
        every = [] if since is None else self.list_deleted(ALL_SLICES, since)
        if self._pieces is not None:
            buffers = ReadBuffers(self.spec)
            for piece in self._split_slices(ALL_SLICES, min_slices=1):
                with self._hold_for_read(patient=True):
                    self._pieces.read(piece, since, buffers)
            return join_rows([*every, buffers.take_rows()], self.spec)
        for start in range(0, SLICES, _READ_SLICES) if not self._copied else ():
            with self._hold_for_read(patient=True):
                live_parts = iterate_rows(self._table, range(start, start + _READ_SLICES), since)
                every.extend(self._select_unchanged(part) for part in live_parts)
        with self._hold_for_read():
            every.extend(iterate_rows(self._kept, ALL_SLICES, since))
        return join_rows(every, self.spec)

    def read_rows(self, keys: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Read the rows of keys [N].

        Returns:
            The rows, float32 [N, D], with the default row for absent keys, and whether each key has a row, bool [N].
        """
        with self._hold_for_read():
            live = take(self._table, keys)
            is_unchanged = self._find_unchanged(live) & (not self._copied)
            out = np.where(is_unchanged[:, None], live.row, np.float32(self.spec.default)).astype(np.float32)
            if self._pieces is not None:
                is_kept = self._pieces.find_kept(keys, out)  # This writes the kept rows to `out`.
            else:
                is_kept = ~is_unchanged
                is_kept[is_kept] = self._kept._contains(keys[is_kept])
                if is_kept.any():
                    out[is_kept] = self._kept.lookup(keys[is_kept], train=False).numpy()
        return torch.from_numpy(out), is_unchanged | is_kept

    def close(self) -> None:
        """Close the snapshot, so that the table changes without keeping rows."""
        self._history.close(self)

    @contextmanager
    def _hold_for_read(self, patient: bool = False) -> Iterator[None]:
        """Hold the table's lock, if `patient` only while no step waits for it; raise StaleVersion after `close`."""
        with self._history.lock.hold_patiently() if patient else self._history.lock:
            if self not in self._history.snapshots:
                raise StaleVersion(
                    f"the version of table {self._table.name!r} at step {self.step} was read after it was closed"
                )
            yield

    def _find_unchanged(self, live: RowColumns) -> np.ndarray:
        """Return which rows [N] of the table still belong to this version."""
        is_unchanged = ~live.deleted & (live.step <= self.step)
        if self._moved:  # A row from another shard can have any step.
            unsure_rows = np.flatnonzero(~live.deleted & (live.step <= self.step + 1))
        else:
            unsure_rows = np.flatnonzero(~live.deleted & (live.step == self.step + 1))
        if len(unsure_rows):
            keys = live.key[unsure_rows]
            is_kept = self._kept._contains(keys) if self._pieces is None else self._pieces.find_kept(keys)
            is_unchanged[unsure_rows] = ~is_kept & ~np.isin(keys, self._new_keys)
        return is_unchanged

    def _select_unchanged(self, live: RowColumns) -> RowColumns:
        is_unchanged = self._find_unchanged(live)
        return live if is_unchanged.all() else live.select(is_unchanged)

    def _select_waiting(self, slices: range) -> list[RowColumns]:
        """Return the keys of these slices that waited for admission, as a list of at most one part."""
        if not len(self._waiting_rows.key):
            return []
        key_slices = compute_slices(self._waiting_rows.key)
        selected = (key_slices >= slices.start) & (key_slices < slices.stop)
        return [self._waiting_rows.select(selected)] if selected.any() else []


_POLL_S = 1e-4  # A waiting step takes the lock within tens of microseconds of its release.


class StepLock:
    """A re-entrant lock that gives training steps priority.

    Steps use `with lock:`, the background uses `with lock.hold_patiently():`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting_count, self._count_lock = 0, threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wait()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextmanager
    def hold_patiently(self) -> Iterator[None]:
        """Hold the lock once no step waits for it."""
        while True:
            while self._waiting_count:
                time.sleep(_POLL_S)
            self._lock.acquire()
            if not self._waiting_count:
                break
            self._lock.release()
        try:
            yield
        finally:
            self._lock.release()

    def _wait(self) -> None:
        """Acquire the lock and be counted as waiting meanwhile."""
        with self._count_lock:
            self._waiting_count += 1
        try:
            self._lock.acquire()
        finally:
            with self._count_lock:
                self._waiting_count -= 1

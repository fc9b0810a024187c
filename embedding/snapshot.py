"""A table as it was at the end of a step, while later steps change it: nothing is copied but the rows that change.

Before a step changes a row that it is the first to change, the row is kept as it was. A row's own step says which those
are: up to the snapshot's s it is untouched, from s + 2 on it has been kept. Only at s + 1, the step of rows that were made and
not trained yet, are the kept and the newly made keys looked up. So a snapshot costs memory for the rows touched while it is
open, and a reader or a writer of slices sees one version. Tables that evict forget rows on their own account; they are copied
whole when the snapshot is opened.
"""

# Shapes: N keys asked for, R rows kept.

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.arrow import RowColumns
from nonet.embedding.base import ALL_SLICES, BaseTable
from nonet.embedding.bulk import absent, by_slice, columns, joined, take, waits
from nonet.embedding.index import KeyIndex
from nonet.embedding.slices import SLICES, slice_of
from nonet.errors import ConfigError


class History:
    """The open snapshots of a table; every change of the table goes through `changing`."""

    def __init__(self, table: BaseTable):
        self.table, self.lock = table, threading.RLock()
        self._open: list[Snapshot] = []

    def open(self) -> Snapshot:
        """A snapshot at the table's last step; close it, for while it is open changed rows are kept."""
        with self.lock:
            snapshot = Snapshot(self)
            self._open.append(snapshot)
            return snapshot

    def close(self, snapshot: Snapshot) -> None:
        """Forget what the snapshot kept; it cannot be read any more."""
        with self.lock:
            self._open.remove(snapshot)

    @contextmanager
    def changing(self, keys: np.ndarray, step: int) -> Iterator[None]:
        """Hold this around `apply` of these keys at `step`."""
        with self.lock:
            if self._open:
                self._keep(keys, step)
            yield

    @contextmanager
    def making(self, keys: np.ndarray) -> Iterator[None]:
        """Hold this around a lookup of these keys that may make rows."""
        with self.lock:
            if self._open:
                absent = keys[~self.table._holds(keys)]
                for snapshot in self._open if len(absent) else ():
                    snapshot.born(absent)
            yield

    def _keep(self, keys: np.ndarray, step: int) -> None:
        behind = [snapshot.step for snapshot in self._open if step <= snapshot.step]
        if behind:
            raise ConfigError(
                f"table {self.table.name!r} changes at step {step} while a snapshot of step {behind[0]} is open; "
                "open snapshots between steps"
            )
        before = take(self.table, np.unique(keys))
        for snapshot in self._open:
            snapshot.keep(before)


class Snapshot:
    """Made by `History.open`: rows by key (`rows`), or slices once each (`part`), of the version of step `step`."""

    def __init__(self, history: History):
        self.step = history.table.step
        self._history, self._table = history, history.table
        self.spec = history.table.spec
        self._deleted = history.table.deleted.since(-1)
        self._given = np.zeros(SLICES, dtype=bool)
        self._kept: list[RowColumns] = []
        self._known, self._born = KeyIndex(), KeyIndex()
        self._index, self._indexed = KeyIndex(), 0
        table = history.table
        self._copied = table.spec.evicts
        at_once = columns(table, ALL_SLICES) if self._copied else waits(table)
        self._kept.extend(part for part in [joined(list(at_once), table.spec)] if len(part.key))

    @property
    def kept_rows(self) -> int:
        """Rows that were kept as they were."""
        return sum(len(part.key) for part in self._kept)

    def keep(self, before: RowColumns) -> None:
        """Rows that are about to change, as they are."""
        if not self._copied:
            first = self._untouched(before) & ~self._given[slice_of(before.key)]
            if first.any():
                fresh = before.where(first)
                self._kept.append(fresh)
                self._known.add(fresh.key)

    def born(self, keys: np.ndarray) -> None:
        """Keys that had no row in this version and may get one."""
        fresh = np.unique(keys)
        self._born.add(fresh[self._born.find(fresh) < 0])

    def _untouched(self, live: RowColumns) -> np.ndarray:
        """Which rows [N] of the table are still those of this version."""
        same = ~live.deleted & (live.step <= self.step)
        unsure = np.flatnonzero(~live.deleted & (live.step == self.step + 1))
        if len(unsure) and not (len(self._known) or len(self._born)):
            same[unsure] = True
        elif len(unsure):
            keys = live.key[unsure]
            same[unsure] = (self._known.find(keys) < 0) & (self._born.find(keys) < 0)
        return same

    def part(self, slices: range) -> RowColumns:
        """The rows of these slices, by slice and key; each slice can be asked for once."""
        with self._history.lock:
            live = [] if self._copied else list(self._table._chosen(slices, None))
            live = [
                part if same.all() else part.where(same) for part in live for same in [self._untouched(part)]
            ]
            old = self._taken(slices)
            self._given[slices.start : slices.stop] = True
        every = joined([*live, *old], self._table.spec)
        return by_slice(every) if old else every

    def gone(self, slices: range, since: int) -> list[RowColumns]:
        """Keys of these slices that went after step `since` and had not come back; ask before `part` of these slices."""
        keys, steps = self._deleted
        place = slice_of(keys)
        mine = (place >= slices.start) & (place < slices.stop) & (steps > since)
        return [absent(self.spec, keys[mine], steps[mine])] if mine.any() else []

    def rows(self, keys: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Rows [N, D] of keys [N], the default where there was none, and which there were [N]."""
        with self._history.lock:
            now = take(self._table, keys)
            there = self._untouched(now) & (not self._copied)
            at = self._find(keys)
            out = np.where(there[:, None], now.row, np.float32(self._table.spec.default)).astype(np.float32)
            old = (at >= 0) & ~there
            if old.any() and self._kept[0].waiting is not None:
                old[old] = ~self._kept[0].waiting[at[old]]
            if old.any():
                out[old] = self._kept[0].row[at[old]]
        return torch.from_numpy(out), there | old

    def close(self) -> None:
        """Let the table change freely again."""
        self._history.close(self)

    def _taken(self, slices: range) -> list[RowColumns]:
        """Kept rows of these slices, taken out of what is kept."""
        if not self._kept:
            return []
        every = joined(self._kept, self._table.spec)
        place = slice_of(every.key)
        mine = (place >= slices.start) & (place < slices.stop)
        self._kept = [every.where(~mine)]
        return [every.where(mine)] if mine.any() else []

    def _find(self, keys: np.ndarray) -> np.ndarray:
        """Positions [N] in the kept rows, -1 where a key is not kept."""
        if len(self._kept) > 1 or (self._kept and self._indexed != len(self._kept[0].key)):
            every = joined(self._kept, self._table.spec)
            self._kept = [every]
            self._index.add(every.key[self._indexed :])
            self._indexed = len(every.key)
        return self._index.find(keys) if self._indexed else np.full(len(keys), -1)

"""The sparse table in NumPy: the reference for the native table, and the table used if there is no compiler.

A row's initial values are a pure function of (seed, table, key), so they are the same under any sharding and any
order of arrival. On one core 5,000 keys of width 32 take 0.3 ms to look up and 1.1 ms to apply (rowwise_adagrad).

`KeyIndex` maps 64-bit keys to dense row numbers by open addressing with linear probing. Rows are numbered 0, 1, 2,
... in the order of arrival, and every cell between a key's home and its place is occupied, so a search may stop at
the first empty cell. Cells contain row numbers, not keys, so that no key value is reserved. Operations are
vectorised over the batch: the Python loop runs once per probe length, about five times at a load factor of at most
one half.
"""

from __future__ import annotations

# Shapes: N requested keys, R rows in the table, D width, S numbers of optimizer state in a row.
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nonet.embedding import compute_slices, splitmix64
from nonet.embedding.tables.base import ALL_SLICES, EXPORT_ROWS, BaseTable, to_int64_keys
from nonet.embedding.tables.optimizers import TableOptimizerSettings
from nonet.embedding.tables.policy import AdmissionFilter, find_due_slices, find_expired, find_surplus
from nonet.embedding.tables.rows import RowColumns


class NumPyTable(BaseTable):
    """A sparse table on NumPy arrays; numbers are float32, rounded if the table's dtype is a half format."""

    def __init__(self, name: str, dim: int, *, seed: int, **settings):
        super().__init__(name, dim, seed=seed, **settings)
        self._absent = 0
        self.clear()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def keys(self) -> np.ndarray:
        """The keys of all rows [R], in unspecified order; a read-only view."""
        return self._index.keys

    @property
    def absent(self) -> int:
        """The number of positions in read-only lookups whose key had no row, and which read the default row."""
        return self._absent

    def clear(self) -> None:
        """Delete every row and reset the step to 0."""
        self.step, self.refused, self.dropped = 0, 0, 0
        self.deleted.clear()
        self._index = KeyIndex()
        self._admission = AdmissionFilter(self.spec, self._base)
        self._rows = np.empty((0, self.dim), dtype=np.float32)
        self._state = np.empty((0, self._state_width), dtype=np.float32)
        self._touched, self._seen, self._uses = (np.empty(0, dtype=np.int64) for _ in range(3))

    def lookup(self, keys: Tensor | np.ndarray, *, train: bool, step: int | None = None) -> Tensor:
        """Read rows; absent keys get a row if `train` and admitted, else they read the default row.

        Args:
            keys: Keys as int64 [N]; duplicates are allowed.
            train: Whether absent keys get a row.
            step: The step in which these rows are trained; the next one by default.

        Returns:
            A copy of the rows, float32 [N, D].
        """
        key_array = to_int64_keys(keys)
        step = self.step + 1 if step is None else step
        places = self._index.find(key_array)
        if train:
            if (places < 0).any():
                self._create_rows(np.unique(key_array[places < 0]), step)
                places = self._index.find(key_array)
                self.refused += int((places < 0).sum())
            self._mark_seen(np.unique(places[places >= 0]), step)
        else:
            self._absent += int((places < 0).sum())
        rows = np.full((len(key_array), self.dim), self.spec.default, dtype=np.float32)
        rows[places >= 0] = self._rows[places[places >= 0]]
        return torch.from_numpy(rows)

    def apply(self, keys: Tensor | np.ndarray, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Sum the gradients of equal keys in position order, then apply one optimizer step to each row.

        Args:
            keys: Keys as int64 [N].
            grads: Gradients [N, D].
            step: The step, not below that of an earlier call.
            lr: A learning rate that overrides the spec's.
        """
        key_array = to_int64_keys(keys)
        self._check_grads(key_array, grads)
        before, rate = self.step, self._resolve_lr(lr)
        self._check_step(step)
        unique, inverse = np.unique(key_array, return_inverse=True)
        rows = self._index.find(unique)
        if (rows < 0).any() and self.spec.admits_all and not self.spec.evicts:
            raise self._make_missing_row_error(unique[rows < 0])
        self.step = step
        # index_add_ adds along dimension 0 in position order, as the protocol requires.
        summed = torch.zeros(len(unique), self.dim)
        summed.index_add_(0, torch.from_numpy(inverse), grads.detach().to(torch.float32))
        present = rows >= 0
        self.dropped += int((~present[inverse]).sum())
        self._update_rows(rows[present], summed.numpy()[present], rate)
        self._touched[rows[present]] = step
        if self.spec.evicts:
            self._evict_due(before, step)

    def _create_rows(self, keys: np.ndarray, step: int) -> None:
        """Create rows for those of these distinct keys that are admitted."""
        keys = keys[self._admission.admit(keys, step)]
        rows = self._append_rows(keys)
        self._rows[rows] = self.compute_initial_rows(keys)
        self._state[rows] = 0
        # A row created for a step belongs to that step's changes.
        self._touched[rows] = step
        self._seen[rows], self._uses[rows] = 0, 0

    def _mark_seen(self, rows: np.ndarray, step: int) -> None:
        self._uses[rows] += (self._seen[rows] != step) | (self._uses[rows] == 0)
        self._seen[rows] = step

    def _append_rows(self, keys: np.ndarray) -> np.ndarray:
        """Add keys to the index, grow the arrays and return the new row numbers."""
        rows = self._index.add(keys)
        if len(self) > len(self._rows):
            capacity = max(len(self), 2 * len(self._rows), 1024)
            for name in ("_rows", "_state", "_touched", "_seen", "_uses"):
                setattr(self, name, _grow_array(getattr(self, name), capacity))
        return rows

    def _update_rows(self, rows: np.ndarray, grads: np.ndarray, lr: float) -> None:
        """Apply one optimizer step to rows by number."""
        values, state = self._rows[rows], self._state[rows]
        spec = self.spec
        step = TableOptimizerSettings(lr, self._eps, spec.weight_decay, spec.clip, spec.l1, spec.l2)
        self._optimizer.apply(values, state, grads, step)
        self._rows[rows], self._state[rows] = self._round_to_stored(values), state

    def _evict_due(self, before: int, step: int) -> None:
        """Evict expired rows and those over a group's quota after a step."""
        if self.spec.ttl_steps:
            self._evict(find_expired(self.spec, self.keys, self._seen[: len(self)], before, step), step)
            due = find_due_slices(self.spec.ttl_steps, before, step)
            self._admission.expire(due, step - self.spec.ttl_steps)
        if self.spec.quota:
            count = len(self)
            self._evict(
                find_surplus(self.spec, self.keys, self._seen[:count], self._uses[:count], step), step
            )

    def _evict(self, rows: np.ndarray, step: int) -> None:
        """Delete rows by number and record them as deleted."""
        gone = self.keys[rows].copy()
        self._delete(gone)
        self.deleted.add(gone, step)
        self.evicted += len(gone)

    def _iterate_rows(self, slices: range = ALL_SLICES, since: int | None = None) -> Iterator[RowColumns]:
        """Yield the rows of slices in the order of slice and key, only those touched after step `since` if it is given."""
        place = compute_slices(self.keys)
        chosen = (place >= slices.start) & (place < slices.stop)
        if since is not None:
            chosen &= self._touched[: len(self)] > since
        rows = np.flatnonzero(chosen)
        rows = rows[np.lexsort((self.keys[rows], place[rows]))]
        for start in range(0, len(rows), EXPORT_ROWS):
            part = rows[start : start + EXPORT_ROWS]
            policy = (self._seen[part], self._uses[part]) if self.spec.evicts else (None, None)
            upserts = np.zeros(len(part), dtype=bool)
            yield RowColumns(
                self.keys[part], self._rows[part], self._state[part], self._touched[part], upserts, *policy
            )

    def _contains(self, keys: np.ndarray) -> np.ndarray:
        return self._index.find(keys) >= 0

    def _upsert(self, rows: RowColumns) -> None:
        """Insert or overwrite rows with their optimizer state."""
        self._append_rows(np.unique(rows.key[self._index.find(rows.key) < 0]))
        at = self._index.find(rows.key)
        self._rows[at], self._state[at], self._touched[at] = (
            self._round_to_stored(rows.row),
            rows.state,
            rows.step,
        )
        self._seen[at] = rows.step if rows.seen is None else rows.seen
        self._uses[at] = 1 if rows.uses is None else rows.uses
        for key in rows.key.tolist() if self._admission.waiting else ():
            self._admission.waiting.pop(key, None)

    def _delete(self, keys: np.ndarray) -> None:
        """Delete the rows of keys, and their counts of admission."""
        gone = self._index.find(keys)
        remaining = np.setdiff1d(np.arange(len(self)), gone[gone >= 0])
        if len(remaining) < len(self):
            for name in ("_rows", "_state", "_touched", "_seen", "_uses"):
                setattr(self, name, getattr(self, name)[remaining])
            self._index.keep_rows(remaining)
        for key in keys.tolist() if self._admission.waiting else ():
            self._admission.waiting.pop(key, None)

    def _list_waiting(self) -> tuple[np.ndarray, np.ndarray]:
        waiting = self._admission.waiting
        return np.array(list(waiting), dtype=np.int64), np.array(list(waiting.values()), dtype=np.int64)

    def _set_waiting(self, keys: np.ndarray, packed: np.ndarray) -> None:
        self._admission.waiting.update(zip(keys.tolist(), packed.tolist(), strict=True))


def _grow_array(array: np.ndarray, capacity: int) -> np.ndarray:
    larger = np.zeros((capacity, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


_LEAST_CELLS = 64
_ABSENT = -1


class KeyIndex:
    """An index of distinct int64 keys of any value, numbered in the order of insertion."""

    def __init__(self) -> None:
        self._count = 0
        self._keys = np.empty(_LEAST_CELLS // 2, dtype=np.int64)
        self._cells = np.full(_LEAST_CELLS, _ABSENT, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> np.ndarray:
        """The keys by row number [R]; a read-only view."""
        return self._keys[: self._count]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row number of each key [N], -1 if the key is absent."""
        rows = np.full(len(keys), _ABSENT, dtype=np.int64)
        open_ = np.arange(len(keys))
        cells = self._compute_home(keys)
        while open_.size:
            entries = self._cells[cells]
            taken = entries != _ABSENT
            hit = taken & (self._keys[entries] == keys[open_])
            rows[open_[hit]] = entries[hit]
            onward = taken & ~hit
            open_, cells = open_[onward], (cells[onward] + 1) & (len(self._cells) - 1)
        return rows

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Insert keys [N] that are distinct and absent, and return their row numbers."""
        rows = np.arange(self._count, self._count + len(keys), dtype=np.int64)
        self._reserve(self._count + len(keys))
        self._keys[rows] = keys
        self._count += len(keys)
        self._place(rows)
        return rows

    def keep_rows(self, rows: np.ndarray) -> None:
        """Remove every key except those of these rows, and renumber them in the given order."""
        keys = self.keys[rows]
        self.__init__()
        self.add(keys)

    def _compute_home(self, keys: np.ndarray) -> np.ndarray:
        return (splitmix64(keys) & np.uint64(len(self._cells) - 1)).astype(np.int64)

    def _reserve(self, count: int) -> None:
        """Grow the arrays to `count` keys at a load factor of at most one half."""
        if count > len(self._keys):
            larger = np.empty(max(count, 2 * len(self._keys)), dtype=np.int64)
            larger[: self._count] = self.keys
            self._keys = larger
        cells = len(self._cells)
        while 2 * count > cells:
            cells *= 2
        if cells > len(self._cells):
            self._cells = np.full(cells, _ABSENT, dtype=np.int64)
            self._place(np.arange(self._count, dtype=np.int64))

    def _place(self, rows: np.ndarray) -> None:
        """Insert rows into the cells by linear probing."""
        cells = self._compute_home(self._keys[rows])
        while rows.size:
            free = self._cells[cells] == _ABSENT
            self._cells[cells[free]] = rows[free]
            lost = self._cells[cells] != rows
            rows, cells = rows[lost], (cells[lost] + 1) & (len(self._cells) - 1)

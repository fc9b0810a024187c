"""The sparse table in NumPy: the reference for the native table, and its replacement if the C++ core is unavailable.

The initial values of a row are a pure function of (seed, table, key), so they do not depend on the sharding or on the order of
requests. On one CPU core, 5,000 keys of width 32 take 0.3 ms to look up and 1.1 ms to apply (rowwise_adagrad).
"""

from __future__ import annotations

# Shapes: N requested keys, R rows in the table, D width, S elements of optimizer state per row.
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
    """A sparse table of NumPy arrays; rows are stored as float32, rounded to the table's dtype."""

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
        """The number of positions in read-only lookups that read the default row because their key had no row."""
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
        """Read the rows of keys. With `train`, rows are created for absent keys that the admission policy admits.

        Other absent keys read the default row.

        Args:
            keys: Keys as int64 [N]; duplicates are allowed.
            train: Whether to create rows.
            step: The step that trains these rows; by default the table's step plus 1.

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
            step: The step; it must not be lower than in an earlier call.
            lr: The learning rate; None for that of the spec.
        """
        key_array = to_int64_keys(keys)
        self._check_grads(key_array, grads)
        step_before, rate = self.step, self._resolve_lr(lr)
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
            self._evict_due(step_before, step)

    def _create_rows(self, keys: np.ndarray, step: int) -> None:
        """Create rows for the distinct `keys` that the admission policy admits."""
        keys = keys[self._admission.admit(keys, step)]
        rows = self._append_rows(keys)
        self._rows[rows] = self.compute_initial_rows(keys)
        self._state[rows] = 0
        # A new row counts as changed in its step, also if no gradient follows.
        self._touched[rows] = step
        self._seen[rows], self._uses[rows] = 0, 0

    def _mark_seen(self, rows: np.ndarray, step: int) -> None:
        """Record that a step uses these distinct rows; each step counts once."""
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
        """Apply one optimizer step to the rows with these numbers."""
        values, state = self._rows[rows], self._state[rows]
        spec = self.spec
        step = TableOptimizerSettings(lr, self._eps, spec.weight_decay, spec.clip, spec.l1, spec.l2)
        self._optimizer.apply(values, state, grads, step)
        self._rows[rows], self._state[rows] = self._round_to_stored(values), state

    def _evict_due(self, step_before: int, step: int) -> None:
        """Evict the rows that expired after `step_before` and up to `step`, and those above a group's quota."""
        if self.spec.ttl_steps:
            self._evict(find_expired(self.spec, self.keys, self._seen[: len(self)], step_before, step), step)
            due = find_due_slices(self.spec.ttl_steps, step_before, step)
            self._admission.expire(due, step - self.spec.ttl_steps)
        if self.spec.quota:
            count = len(self)
            self._evict(
                find_surplus(self.spec, self.keys, self._seen[:count], self._uses[:count], step), step
            )

    def _evict(self, rows: np.ndarray, step: int) -> None:
        """Delete the rows with these numbers and record their keys as deleted and evicted."""
        keys = self.keys[rows].copy()
        self._delete(keys)
        self.deleted.add(keys, step)
        self.evicted += len(keys)

    def _iterate_rows(self, slices: range = ALL_SLICES, since: int | None = None) -> Iterator[RowColumns]:
        """Yield the rows of slices in the order of slice and key; with `since`, only those changed after that step."""
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
        numbers = self._index.find(rows.key)
        self._rows[numbers], self._state[numbers], self._touched[numbers] = (
            self._round_to_stored(rows.row),
            rows.state,
            rows.step,
        )
        self._seen[numbers] = rows.step if rows.seen is None else rows.seen
        self._uses[numbers] = 1 if rows.uses is None else rows.uses
        for key in rows.key.tolist() if self._admission.waiting else ():
            self._admission.waiting.pop(key, None)

    def _delete(self, keys: np.ndarray) -> None:
        """Delete the rows of these keys and their admission counts."""
        deleted_rows = self._index.find(keys)
        remaining = np.setdiff1d(np.arange(len(self)), deleted_rows[deleted_rows >= 0])
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


_MIN_CELLS = 64
_ABSENT = -1


class KeyIndex:
    """A hash index that maps distinct int64 keys of any value to row numbers 0, 1, 2, ... in the order of insertion.

    It uses open addressing with linear probing. Every cell between the home cell of a key and the cell that it occupies is
    occupied, so a search stops at the first empty cell. Cells contain row numbers, not keys, so that no key value is reserved.
    Operations are vectorised over a batch: the Python loop has one iteration per probe, about five at a load factor of at most
    0.5.
    """

    def __init__(self) -> None:
        self._count = 0
        self._keys = np.empty(_MIN_CELLS // 2, dtype=np.int64)
        self._cells = np.full(_MIN_CELLS, _ABSENT, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> np.ndarray:
        """The keys by row number [R]; a read-only view."""
        return self._keys[: self._count]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row number of each key [N], -1 if the key is absent."""
        rows = np.full(len(keys), _ABSENT, dtype=np.int64)
        unresolved = np.arange(len(keys))
        cells = self._compute_home_cells(keys)
        while unresolved.size:
            entries = self._cells[cells]
            taken = entries != _ABSENT
            hit = taken & (self._keys[entries] == keys[unresolved])
            rows[unresolved[hit]] = entries[hit]
            collides = taken & ~hit
            unresolved, cells = unresolved[collides], (cells[collides] + 1) & (len(self._cells) - 1)
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
        """Remove every key except those of these row numbers, and renumber them in the given order."""
        keys = self.keys[rows]
        self.__init__()
        self.add(keys)

    def _compute_home_cells(self, keys: np.ndarray) -> np.ndarray:
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
        cells = self._compute_home_cells(self._keys[rows])
        while rows.size:
            free = self._cells[cells] == _ABSENT
            self._cells[cells[free]] = rows[free]
            collides = self._cells[cells] != rows
            rows, cells = rows[collides], (cells[collides] + 1) & (len(self._cells) - 1)

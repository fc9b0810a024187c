"""The sparse table in NumPy: the reference for the native table, and its replacement if the C++ core is unavailable.

A key index maps each key to a row number, the position of its row in the arrays. The initial values of a row are a pure
function of (seed, table, key), so they do not depend on the sharding or on the order of requests. On one CPU core, 5,000
keys of width 32 take 0.3 ms to look up and 1.1 ms to apply (rowwise_adagrad).
"""

# Shapes: N requested keys, R rows in the table, D width, S elements of optimizer state per row.

from __future__ import annotations

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
        # By row: the step that last changed it, the step that last looked it up, and the number of steps that did.
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
        row_numbers = self._index.find(key_array)
        if train:
            if (row_numbers < 0).any():
                self._create_rows(np.unique(key_array[row_numbers < 0]), step)
                row_numbers = self._index.find(key_array)
                self.refused += int((row_numbers < 0).sum())
            self._mark_seen(np.unique(row_numbers[row_numbers >= 0]), step)
        else:
            self._absent += int((row_numbers < 0).sum())
        rows = np.full((len(key_array), self.dim), self.spec.default, dtype=np.float32)
        rows[row_numbers >= 0] = self._rows[row_numbers[row_numbers >= 0]]
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
        last_step, resolved_lr = self.step, self._resolve_lr(lr)
        self._check_step(step)
        unique_keys, inverse = np.unique(key_array, return_inverse=True)
        row_numbers = self._index.find(unique_keys)
        # Without admission and eviction, every key that was looked up has a row.
        if (row_numbers < 0).any() and self.spec.admits_all and not self.spec.evicts:
            raise self._make_missing_row_error(unique_keys[row_numbers < 0])
        self.step = step
        # index_add_ adds along dimension 0 in position order, as the protocol requires.
        summed = torch.zeros(len(unique_keys), self.dim)
        summed.index_add_(0, torch.from_numpy(inverse), grads.detach().to(torch.float32))
        present = row_numbers >= 0
        self.dropped += int((~present[inverse]).sum())
        self._update_rows(row_numbers[present], summed.numpy()[present], resolved_lr)
        self._touched[row_numbers[present]] = step
        if self.spec.evicts:
            self._evict_due(last_step, step)

    def _create_rows(self, keys: np.ndarray, step: int) -> None:
        """Create rows for the distinct `keys` that the admission policy admits."""
        keys = keys[self._admission.admit(keys, step)]
        row_numbers = self._append_rows(keys)
        self._rows[row_numbers] = self.compute_initial_rows(keys)
        self._state[row_numbers] = 0
        # A new row counts as changed in its step, also if no gradient follows.
        self._touched[row_numbers] = step
        self._seen[row_numbers], self._uses[row_numbers] = 0, 0

    def _mark_seen(self, row_numbers: np.ndarray, step: int) -> None:
        """Record that a step looks up the rows with these distinct numbers; several lookups in a step count as one use."""
        # A new row was not seen yet, although its `seen` of 0 may equal the step.
        self._uses[row_numbers] += (self._seen[row_numbers] != step) | (self._uses[row_numbers] == 0)
        self._seen[row_numbers] = step

    def _append_rows(self, keys: np.ndarray) -> np.ndarray:
        """Add absent keys [N] to the index, grow the arrays if necessary, and return the new row numbers [N]."""
        row_numbers = self._index.add(keys)
        if len(self) > len(self._rows):
            capacity = max(len(self), 2 * len(self._rows), 1024)
            for name in ("_rows", "_state", "_touched", "_seen", "_uses"):
                setattr(self, name, _grow_array(getattr(self, name), capacity))
        return row_numbers

    def _update_rows(self, row_numbers: np.ndarray, grads: np.ndarray, lr: float) -> None:
        """Apply one optimizer step to the rows with these numbers."""
        values, state = self._rows[row_numbers], self._state[row_numbers]
        spec = self.spec
        settings = TableOptimizerSettings(lr, self._eps, spec.weight_decay, spec.clip, spec.l1, spec.l2)
        self._optimizer.apply(values, state, grads, settings)  # This changes values and state in place.
        self._rows[row_numbers], self._state[row_numbers] = self._round_to_stored(values), state

    def _evict_due(self, last_step: int, step: int) -> None:
        """Evict the rows that expired after `last_step` and up to `step`, and those above a group's quota."""
        if self.spec.ttl_steps:
            self._evict(find_expired(self.spec, self.keys, self._seen[: len(self)], last_step, step), step)
            due_slices = find_due_slices(self.spec.ttl_steps, last_step, step)
            self._admission.expire(due_slices, step - self.spec.ttl_steps)
        if self.spec.quota:
            count = len(self)
            self._evict(
                find_surplus(self.spec, self.keys, self._seen[:count], self._uses[:count], step), step
            )

    def _evict(self, row_numbers: np.ndarray, step: int) -> None:
        """Delete the rows with these numbers, and record their keys as deleted and count them as evicted."""
        keys = self.keys[row_numbers].copy()
        self._delete(keys)
        self.deleted.add(keys, step)
        self.evicted += len(keys)

    def _iterate_rows(self, slices: range = ALL_SLICES, since: int | None = None) -> Iterator[RowColumns]:
        """Yield the rows of slices in the order of slice and key; with `since`, only those changed after that step."""
        key_slices = compute_slices(self.keys)
        chosen = (key_slices >= slices.start) & (key_slices < slices.stop)
        if since is not None:
            chosen &= self._touched[: len(self)] > since
        row_numbers = np.flatnonzero(chosen)
        row_numbers = row_numbers[np.lexsort((self.keys[row_numbers], key_slices[row_numbers]))]
        for start in range(0, len(row_numbers), EXPORT_ROWS):
            part_numbers = row_numbers[start : start + EXPORT_ROWS]
            policy = (
                (self._seen[part_numbers], self._uses[part_numbers]) if self.spec.evicts else (None, None)
            )
            not_deleted = np.zeros(len(part_numbers), dtype=bool)
            yield RowColumns(
                self.keys[part_numbers],
                self._rows[part_numbers],
                self._state[part_numbers],
                self._touched[part_numbers],
                not_deleted,
                *policy,
            )

    def _contains(self, keys: np.ndarray) -> np.ndarray:
        return self._index.find(keys) >= 0

    def _upsert(self, rows: RowColumns) -> None:
        """Insert or overwrite rows with their optimizer state; their keys no longer wait for admission."""
        self._append_rows(np.unique(rows.key[self._index.find(rows.key) < 0]))
        row_numbers = self._index.find(rows.key)
        self._rows[row_numbers], self._state[row_numbers], self._touched[row_numbers] = (
            self._round_to_stored(rows.row),
            rows.state,
            rows.step,
        )
        self._seen[row_numbers] = rows.step if rows.seen is None else rows.seen
        self._uses[row_numbers] = 1 if rows.uses is None else rows.uses
        for key in rows.key.tolist() if self._admission.waiting else ():
            self._admission.waiting.pop(key, None)

    def _delete(self, keys: np.ndarray) -> None:
        """Delete the rows of these keys and their admission counts."""
        found_numbers = self._index.find(keys)
        remaining_numbers = np.setdiff1d(np.arange(len(self)), found_numbers[found_numbers >= 0])
        if len(remaining_numbers) < len(self):
            for name in ("_rows", "_state", "_touched", "_seen", "_uses"):
                setattr(self, name, getattr(self, name)[remaining_numbers])
            self._index.keep_rows(remaining_numbers)
        for key in keys.tolist() if self._admission.waiting else ():
            self._admission.waiting.pop(key, None)

    def _list_waiting(self) -> tuple[np.ndarray, np.ndarray]:
        waiting = self._admission.waiting
        return np.array(list(waiting), dtype=np.int64), np.array(list(waiting.values()), dtype=np.int64)

    def _set_waiting(self, keys: np.ndarray, packed: np.ndarray) -> None:
        self._admission.waiting.update(zip(keys.tolist(), packed.tolist(), strict=True))


def _grow_array(array: np.ndarray, capacity: int) -> np.ndarray:
    """Return a copy of an array with `capacity` rows; the new ones are zeros."""
    larger = np.zeros((capacity, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


_MIN_CELLS = 64  # A power of two, as every number of cells, so that a mask computes the home cell.
_ABSENT = -1  # In a cell: it is empty. As a row number: the key is absent.


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
        unresolved_positions = np.arange(len(keys))
        cells = self._compute_home_cells(keys)
        while unresolved_positions.size:
            cell_rows = self._cells[cells]
            is_occupied = cell_rows != _ABSENT
            is_match = is_occupied & (self._keys[cell_rows] == keys[unresolved_positions])
            rows[unresolved_positions[is_match]] = cell_rows[is_match]
            collides = is_occupied & ~is_match
            unresolved_positions, cells = (
                unresolved_positions[collides],
                (cells[collides] + 1) & (len(self._cells) - 1),
            )
        return rows

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Insert keys [N] that are distinct and absent, and return their row numbers."""
        rows = np.arange(self._count, self._count + len(keys), dtype=np.int64)
        self._ensure_capacity(self._count + len(keys))
        self._keys[rows] = keys
        self._count += len(keys)
        self._insert_into_cells(rows)
        return rows

    def keep_rows(self, rows: np.ndarray) -> None:
        """Remove every key except those of these row numbers, and renumber them in the given order."""
        keys = self.keys[rows]
        self.__init__()
        self.add(keys)

    def _compute_home_cells(self, keys: np.ndarray) -> np.ndarray:
        return (splitmix64(keys) & np.uint64(len(self._cells) - 1)).astype(np.int64)

    def _ensure_capacity(self, count: int) -> None:
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
            self._insert_into_cells(np.arange(self._count, dtype=np.int64))

    def _insert_into_cells(self, rows: np.ndarray) -> None:
        """Write row numbers to the cells of their keys by linear probing."""
        cells = self._compute_home_cells(self._keys[rows])
        while rows.size:
            free = self._cells[cells] == _ABSENT
            self._cells[cells[free]] = rows[free]
            # Of several rows that were written to one free cell, one is stored; the others go on like those of full cells.
            collides = self._cells[cells] != rows
            rows, cells = rows[collides], (cells[collides] + 1) & (len(self._cells) - 1)

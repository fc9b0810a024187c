"""Sparse rows in NumPy: the oracle of the native table, and the table where there is no compiler.

A row's first values are a pure function of (seed, table, key), so they are the same under any sharding and
any order of arrival. On one core 5,000 keys of width 32 take 0.3 ms to look up and 1.1 ms to apply
(rowwise_adagrad).
"""

# Shapes: N keys, R rows held, D width, S numbers of optimizer state in a row.

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.arrow import columns_of, table_of
from nonet.embedding.index import KeyIndex
from nonet.embedding.optimizer import row_optimizer
from nonet.embedding.slices import SLICES, slice_of, splitmix64
from nonet.embedding.store import TableSpec
from nonet.errors import ConfigError, DataError
from nonet.random import key as random_key

if TYPE_CHECKING:
    import pyarrow as pa

_ALL = range(SLICES)
_EXPORT_ROWS = 1 << 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class NumPyTable:
    """The SparseTable protocol on NumPy arrays.

    `absent` counts the keys that `lookup(train=False)` did not find and answered with zeros. `step` is the
    last step applied; steps count over the whole run and never go back, since `export(since=...)` relies on
    them.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        seed: int,
        optimizer: str = "rowwise_adagrad",
        lr: float = 0.02,
        init_scale: float = 0.02,
        weight_decay: float = 0.0,
        eps: float | None = None,
    ):
        self.name, self.dim, self.seed = name, dim, seed
        self.spec = TableSpec(dim, optimizer, lr, init_scale, weight_decay, eps)
        self.absent, self.step = 0, 0
        self._optimizer = row_optimizer(optimizer)
        self._eps = self._optimizer.eps if eps is None else eps
        self._base = np.uint64(random_key(seed, "embedding", name))
        self.clear()

    @classmethod
    def of(cls, name: str, spec: TableSpec, seed: int) -> NumPyTable:
        """The table that `spec` describes."""
        return cls(
            name,
            spec.dim,
            seed=seed,
            optimizer=spec.optimizer,
            lr=spec.lr,
            init_scale=spec.init_scale,
            weight_decay=spec.weight_decay,
            eps=spec.eps,
        )

    def __len__(self) -> int:
        return len(self._index)

    @property
    def keys(self) -> np.ndarray:
        """The keys held [R], in the order of arrival; a view, not to be written to."""
        return self._index.keys

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held, their state, keys and steps."""
        return len(self) * (4 * (self.dim + self._state.shape[1]) + 16)

    def clear(self) -> None:
        """Forget every row, and count steps from 0 again."""
        self.step = 0
        self._index = KeyIndex()
        self._rows = np.empty((0, self.dim), dtype=np.float32)
        self._state = np.empty((0, self._optimizer.state_width(self.dim)), dtype=np.float32)
        self._touched = np.empty(0, dtype=np.int64)

    def lookup(self, keys: Tensor | np.ndarray, *, train: bool) -> Tensor:
        """A copy of the rows [N, D] of keys [N]; absent keys are made if `train`, else zeros and counted."""
        wanted = _int64(keys)
        found = self._index.find(wanted)
        missing = found < 0
        if train and missing.any():
            self._create(np.unique(wanted[missing]))
            found = self._index.find(wanted)
        elif missing.any():
            self.absent += int(missing.sum())
            rows = np.zeros((len(wanted), self.dim), dtype=np.float32)
            rows[~missing] = self._rows[found[~missing]]
            return torch.from_numpy(rows)
        return torch.from_numpy(self._rows[found])

    def apply(self, keys: Tensor | np.ndarray, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Sum the gradients [N, D] of equal keys in position order, then take one step on each row."""
        self._advance(step)
        unique, inverse = np.unique(_int64(keys), return_inverse=True)
        if not unique.size:
            return
        rows = self._index.find(unique)
        if (rows < 0).any():
            lost = unique[rows < 0]
            raise DataError(
                f"table {self.name!r} got gradients for {len(lost)} keys that have no row, first "
                f"{lost[:5].tolist()}; look keys up with train=True before applying gradients to them"
            )
        # index_add_ adds along dimension 0 one position after another: the order the protocol promises.
        summed = torch.zeros(len(unique), self.dim)
        summed.index_add_(0, torch.from_numpy(inverse), grads.detach().to(torch.float32))
        self._update(rows, summed.numpy(), self.spec.lr if lr is None else lr)
        self._touched[rows] = step

    def export(self, slices: range = _ALL, since: int | None = None) -> Iterator[pa.Table]:
        """The rows of these slices made or changed after step `since`, by slice and key, 65,536 at a time.

        The order depends on the keys alone, so equal tables export equal bytes.
        """
        place = slice_of(self.keys)
        chosen = (place >= slices.start) & (place < slices.stop)
        if since is not None:
            chosen &= self._touched[: len(self)] > since
        rows = np.flatnonzero(chosen)
        rows = rows[np.lexsort((self.keys[rows], place[rows]))]
        for start in range(0, len(rows), _EXPORT_ROWS):
            part = rows[start : start + _EXPORT_ROWS]
            yield table_of(self.keys[part], self._rows[part], self._state[part], self._touched[part])

    def load(self, tables: Iterable[pa.Table], slices: range = _ALL) -> None:
        """Upsert or delete the rows of `export`'s tables whose key lies in `slices`; later tables win."""
        for table in tables:
            part = columns_of(table, self.name, self.dim, self._state.shape[1])
            place = slice_of(part.key)
            mine = (place >= slices.start) & (place < slices.stop)
            self._delete(part.key[mine & part.deleted])
            kept = mine & ~part.deleted
            self._upsert(part.key[kept], part.row[kept], part.state[kept], part.step[kept])

    def touched_since(self, step: int) -> np.ndarray:
        """Keys of the rows made or changed after `step`, sorted."""
        return np.sort(self.keys[self._touched[: len(self)] > step])

    def state_hash(self) -> str:
        """A sha256 over keys, rows, optimizer state and steps, the same for any order of arrival."""
        order = np.argsort(self.keys)
        digest = hashlib.sha256(f"{self.name}/{self.dim}/{self.spec.optimizer}".encode())
        for column in (self.keys, self._rows, self._state, self._touched):
            digest.update(np.ascontiguousarray(column[order]).tobytes())
        return digest.hexdigest()

    def initial(self, keys: np.ndarray) -> np.ndarray:
        """The first values [N, D] of the rows of these keys: uniform in [-init_scale, init_scale)."""
        stream = splitmix64(keys.astype(np.uint64) ^ self._base)
        columns = np.arange(1, self.dim + 1, dtype=np.uint64) * _GOLDEN
        bits = splitmix64(stream[:, None] + columns[None, :]) >> np.uint64(40)
        unit = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
        return unit * np.float32(self.spec.init_scale)

    def _create(self, keys: np.ndarray) -> np.ndarray:
        rows = self._append(keys)
        self._rows[rows] = self.initial(keys)
        self._state[rows] = 0
        # A row made after the last applied step is part of the next one's changes.
        self._touched[rows] = self.step + 1
        return rows

    def _append(self, keys: np.ndarray) -> np.ndarray:
        rows = self._index.add(keys)
        if len(self) > len(self._rows):
            capacity = max(len(self), 2 * len(self._rows), 1024)
            self._rows = _grown(self._rows, capacity)
            self._state = _grown(self._state, capacity)
            self._touched = _grown(self._touched, capacity)
        return rows

    def _advance(self, step: int) -> None:
        if step < self.step:
            raise ConfigError(
                f"table {self.name!r} was applied at step {self.step} and then at step {step}; "
                "count steps over the whole run, or clear() the table first"
            )
        self.step = step

    def _update(self, rows: np.ndarray, grads: np.ndarray, lr: float) -> None:
        values, state = self._rows[rows], self._state[rows]
        if self.spec.weight_decay:
            values *= np.float32(1 - lr * self.spec.weight_decay)
        self._optimizer.rule(values, state, grads, lr, self._eps)
        self._rows[rows], self._state[rows] = values, state

    def _upsert(self, keys: np.ndarray, values: np.ndarray, state: np.ndarray, step: np.ndarray) -> None:
        fresh = np.unique(keys[self._index.find(keys) < 0])
        self._append(fresh)
        rows = self._index.find(keys)
        self._rows[rows], self._state[rows], self._touched[rows] = values, state, step
        self.step = max(self.step, int(step.max(initial=0)))

    def _delete(self, keys: np.ndarray) -> None:
        gone = self._index.find(keys)
        kept = np.setdiff1d(np.arange(len(self)), gone[gone >= 0])
        if len(kept) < len(self):
            self._rows, self._state, self._touched = self._rows[kept], self._state[kept], self._touched[kept]
            self._index.keep(kept)


def _grown(array: np.ndarray, capacity: int) -> np.ndarray:
    larger = np.zeros((capacity, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


def _int64(keys: Tensor | np.ndarray) -> np.ndarray:
    array = keys if isinstance(keys, np.ndarray) else keys.detach().cpu().numpy()
    if array.ndim != 1 or array.dtype != np.int64:
        raise DataError(
            f"sparse keys must be int64 [n], got {array.dtype} {list(array.shape)}; convert them first"
        )
    return array

"""The base class of the native table and the NumPy table: configuration, initial values, export, load and the state hash.

The subclasses implement how rows are found, updated and removed. Rows are exported, loaded and hashed only by this class, so
that both tables produce the same bytes.
"""

# Shapes: N keys, R rows of the table, D width, S elements of optimizer state per row.

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from nonet.embedding import SLICES, compute_slices, splitmix64
from nonet.embedding.tables.optimizers import get_row_optimizer
from nonet.embedding.tables.protocol import DELETE
from nonet.embedding.tables.rows import WAIT, RowColumns, from_arrow_table, to_arrow_table
from nonet.embedding.tables.spec import TableSpec
from nonet.embedding.tables.tombstones import TombstoneLog
from nonet.errors import ConfigError, DataError
from nonet.random import hash_words as random_key

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

ALL_SLICES = range(SLICES)
EXPORT_ROWS = 1 << 16  # The most rows of an exported table.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, the increment of SplitMix64.
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class BaseTable(ABC):
    """The public interface of a sparse table; subclasses implement how rows are found, updated and removed.

    Attributes:
        evicted: The number of rows that the table's eviction policy has removed.
        step: The last step that was applied. Steps count over the whole run and never decrease, because `export(since=...)`
            relies on them.
    """

    def __init__(self, name: str, dim: int, *, seed: int, **settings):
        self.name, self.dim, self.seed = name, dim, seed
        self.spec = TableSpec(dim, **settings)
        self.step, self.evicted = 0, 0
        self.deleted = TombstoneLog()
        self._optimizer = get_row_optimizer(self.spec.optimizer)
        self._state_width = self._optimizer.state_width(dim)
        self._eps = self._optimizer.eps if self.spec.eps is None else self.spec.eps
        # The hash from which the initial rows and the draws of the admission policy are computed.
        self._base = np.uint64(random_key(seed, "embedding", name))

    @classmethod
    def from_spec(cls, name: str, spec: TableSpec, seed: int) -> Self:
        """Create the table that `spec` describes."""
        return cls(name, seed=seed, **{field.name: getattr(spec, field.name) for field in fields(spec)})

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def keys(self) -> np.ndarray:
        """The keys of all rows [R], in unspecified order; read-only."""

    @property
    @abstractmethod
    def absent(self) -> int:
        """The number of positions in read-only lookups that read the default row because their key had no row."""

    @abstractmethod
    def clear(self) -> None:
        """Delete every row and reset the step to 0."""

    @abstractmethod
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

    @abstractmethod
    def apply(self, keys: Tensor | np.ndarray, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Sum the gradients of equal keys in position order, then apply one optimizer step to each row.

        Args:
            keys: Keys as int64 [N].
            grads: Gradients [N, D].
            step: The step; it must not be lower than in an earlier call.
            lr: The learning rate; None for that of the spec.
        """

    @property
    def nbytes(self) -> int:
        """The bytes of all rows with their state, keys, steps and policy counters."""
        return len(self) * self.spec.row_bytes

    def export(self, slices: range = ALL_SLICES, since: int | None = None) -> Iterator[pa.Table]:
        """Yield the rows of slices as Arrow tables, by slice and key, 65,536 rows at a time.

        The order depends on the keys alone: equal tables export equal bytes.

        Args:
            slices: The slices to export.
            since: If not None, export only rows that were created or changed after this step, preceded by the keys that
                were deleted after it (op "delete").

        Yields:
            Tables of rows. If the table has an admission policy, tables of the keys that wait for a row (op "wait") follow.
        """
        if since is not None:
            yield from self._export_deletes(slices, since)
        for part in self._iterate_rows(slices, since):
            yield to_arrow_table(part.key, part.row, part.state, part.step, part.seen, part.uses)
        if not self.spec.admits_all:
            yield from self._export_waiting(slices, since)

    def load(self, tables: Iterable[pa.Table], slices: range = ALL_SLICES) -> None:
        """Upsert or delete the exported rows whose key lies in `slices`; later tables override earlier ones."""
        for table in tables:
            part = from_arrow_table(table, self.name, self.dim, self._state_width, waiting=True)
            key_slices = compute_slices(part.key)
            selected = (key_slices >= slices.start) & (key_slices < slices.stop)
            is_waiting = part.waiting if part.waiting is not None else np.zeros(len(selected), dtype=bool)
            deleted_rows = part.select(selected & part.deleted)
            live_rows = part.select(selected & ~part.deleted & ~is_waiting)
            if len(deleted_rows.key):
                self._delete(deleted_rows.key)
                self.deleted.add(deleted_rows.key, deleted_rows.step)
            self._upsert(live_rows)
            self.step = max(self.step, int(live_rows.step.max(initial=0)))
            waiting_rows = part.select(selected & is_waiting)
            if (
                len(waiting_rows.key) and not self.spec.admits_all
            ):  # Their `step` has the packed admission counts.
                self._set_waiting(waiting_rows.key, waiting_rows.step)

    def list_touched_since(self, step: int) -> np.ndarray:
        """Return the sorted keys of the rows that were created or changed after `step`."""
        parts = [part.key for part in self._iterate_rows(ALL_SLICES, step)]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)

    def hash_state(self) -> str:
        """Compute a SHA-256 over keys, rows, optimizer state and steps, independent of the order of creation."""
        parts = list(self._iterate_rows(ALL_SLICES, None))
        empty = RowColumns(
            np.empty(0, np.int64), np.empty((0, self.dim), np.float32), np.empty((0, self._state_width), np.float32),
            np.empty(0, np.int64), np.empty(0, bool),
        )  # fmt: skip
        key, row, state, step = (
            np.concatenate([getattr(part, column) for part in parts or [empty]])
            for column in ("key", "row", "state", "step")
        )
        order = np.argsort(key)
        digest = hashlib.sha256(f"{self.name}/{self.dim}/{self.spec.optimizer}".encode())
        for column in (key, row, state, step):
            digest.update(np.ascontiguousarray(column[order]).tobytes())
        return digest.hexdigest()

    def compute_initial_rows(self, keys: np.ndarray) -> np.ndarray:
        """Compute the initial rows [N, D] of keys [N], uniform in [-init_scale, init_scale) and rounded to the table's dtype."""
        stream = splitmix64(keys.astype(np.uint64) ^ self._base)
        columns = np.arange(1, self.dim + 1, dtype=np.uint64) * _GOLDEN
        bits = splitmix64(stream[:, None] + columns[None, :]) >> np.uint64(40)
        unit = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)  # 24 bits, scaled to [-1, 1).
        return self._round_to_stored(unit * np.float32(self.spec.init_scale))

    def _round_to_stored(self, rows: np.ndarray) -> np.ndarray:
        """Round rows to the table's dtype and return them as float32."""
        half_dtype = _HALF_DTYPES.get(self.spec.dtype)
        return rows if half_dtype is None else torch.from_numpy(rows).to(half_dtype).to(torch.float32).numpy()

    def _resolve_lr(self, lr: float | None) -> float:
        """Return the learning rate of a step: `lr`, or the spec's if it is None."""
        resolved_lr = self.spec.lr if lr is None else lr
        if resolved_lr == 0 and self._optimizer.divides_by_lr:
            raise ConfigError(
                f"table {self.name!r}: {self.spec.optimizer} divides by the learning rate, which must be above 0, "
                "got 0; end the schedule above 0"
            )
        return resolved_lr

    def _check_step(self, step: int) -> None:
        """Raise ConfigError if `step` is below the table's step."""
        if step < self.step:
            raise ConfigError(
                f"table {self.name!r} was applied at step {self.step} and then at step {step}; "
                "steps must not decrease during a run; call clear() before starting again from an earlier step"
            )

    def _make_missing_row_error(self, missing_keys: np.ndarray) -> DataError:
        """Build the error for gradients whose keys have no row."""
        return DataError(
            f"table {self.name!r} got gradients for {len(missing_keys)} keys that have no row, for example "
            f"{missing_keys[:5].tolist()}; look keys up with train=True before applying gradients to them"
        )

    def _check_grads(self, keys: np.ndarray | Tensor, grads: Tensor) -> None:
        """Raise DataError unless gradients are real and of shape [N, D]."""
        if tuple(grads.shape) != (len(keys), self.dim):
            raise DataError(
                f"table {self.name!r} needs gradients of shape [{len(keys)}, {self.dim}], got {list(grads.shape)}"
            )
        if grads.is_complex():
            raise DataError(
                f"table {self.name!r} needs real gradients, got {grads.dtype}; take their real part"
            )

    def _export_deletes(self, slices: range, since: int) -> Iterator[pa.Table]:
        """Yield tables of the keys that were deleted after step `since` and have no row now."""
        keys, steps = self.deleted.list_since(since)
        key_slices = compute_slices(keys)
        selected = (key_slices >= slices.start) & (key_slices < slices.stop) & ~self._contains(keys)
        yield from self._export_keys_without_rows(keys[selected], steps[selected], DELETE)

    def _export_waiting(self, slices: range, since: int | None) -> Iterator[pa.Table]:
        """Yield tables of the keys that wait for a row and were requested after step `since`."""
        keys, packed = self._list_waiting()
        key_slices = compute_slices(keys)
        selected = (key_slices >= slices.start) & (key_slices < slices.stop)
        if since is not None:
            selected &= packed >> 32 > since  # The upper 32 bits are the last step.
        order = np.argsort(keys[selected])
        yield from self._export_keys_without_rows(keys[selected][order], packed[selected][order], WAIT)

    def _export_keys_without_rows(self, keys: np.ndarray, steps: np.ndarray, op: str) -> Iterator[pa.Table]:
        """Yield tables of keys with the given `op` and `steps`, whose rows and optimizer states are zeros."""
        for start in range(0, len(keys), EXPORT_ROWS):
            part = slice(start, start + EXPORT_ROWS)
            count = len(keys[part])
            row, state = (
                np.zeros((count, width), dtype=np.float32) for width in (self.dim, self._state_width)
            )
            policy = np.zeros(count, dtype=np.int64) if self.spec.evicts else None
            yield to_arrow_table(keys[part], row, state, steps[part], policy, policy, op)

    @abstractmethod
    def _iterate_rows(self, slices: range, since: int | None) -> Iterator[RowColumns]:
        """Yield the rows of these slices in the order of slice and key, at most 65,536 at a time.

        If `since` is not None, only rows that were created or changed after that step.
        """

    @abstractmethod
    def _contains(self, keys: np.ndarray) -> np.ndarray:
        """Return which keys [N] have a row, as bool [N]."""

    @abstractmethod
    def _upsert(self, rows: RowColumns) -> None:
        """Insert or overwrite rows with their optimizer state."""

    @abstractmethod
    def _delete(self, keys: np.ndarray) -> None:
        """Delete the rows of these keys and their admission counts."""

    @abstractmethod
    def _list_waiting(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys that the admission policy has counted but not admitted, and their counts.

        A count is packed as `last step << 32 | number of steps that requested the key`.
        """

    @abstractmethod
    def _set_waiting(self, keys: np.ndarray, packed: np.ndarray) -> None:
        """Set the admission counts of keys, packed as in `_list_waiting`."""


def to_int64_keys(keys: Tensor | np.ndarray) -> np.ndarray:
    """Convert keys to a NumPy array.

    Raises:
        DataError: If the keys are not int64 [N].
    """
    if not hasattr(keys, "dtype"):
        raise DataError(
            f"sparse keys must be a tensor or array of int64 [n], got a {type(keys).__name__}; convert it first"
        )
    array = keys if isinstance(keys, np.ndarray) else keys.detach().cpu().numpy()
    if array.ndim != 1 or array.dtype != np.int64:
        raise DataError(
            f"sparse keys must be int64 [n], got {array.dtype} {list(array.shape)}; convert them first"
        )
    return array

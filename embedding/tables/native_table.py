"""The sparse table in C++: the table that runs use, equal to the NumPy table bit for bit.

A read-only lookup has an overhead of 1 us and is otherwise bound by memory: 64 keys of width 64 take 2 us, or 6 us
on cold caches; 8,192 ids take 0.7 to 1.2 times as long as torch's index_select of dense rows, and a train step a
quarter of FBGEMM's (bench/embedding/suite.py). The GIL is released while the core works, except for reads of at
most 256 keys. One lock per table separates readers and a writer.
"""

# Shapes: N keys, D width, S elements of optimizer state per row.

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from operator import index
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.tables.base import ALL_SLICES, EXPORT_ROWS, BaseTable, to_int64_keys
from nonet.embedding.tables.native_library import (
    ConfigStruct,
    CoreCounters,
    PolicyStruct,
    install_fast_methods,
    load_library,
    register_finalizer,
)
from nonet.embedding.tables.rows import RowColumns
from nonet.embedding.tables.spec import EVICTIONS, FORMATS, TableSpec
from nonet.errors import DataError, NonetError

# The core's code for gradients of keys without a row. Its other negative code, -1, means that it has no memory.
_ABSENT_KEYS = -2
_SHIFT = 48  # The upper 16 bits of a key's 64-bit hash are its slice.
# An export reads the rows of this many slices at a time, so that it never lists a whole table.
_PART_SLICES = 64
_I64, _F32 = torch.int64, torch.float32
# Creates a float32 tensor of the given sizes in 0.6 us; torch.empty with a shape and a dtype takes 1.2 us.
_new_rows = torch.empty(0, dtype=torch.float32).new_empty


class NativeTable(BaseTable):
    """A sparse table on the C++ core.

    The argument `isa` ("baseline", "avx2", "avx512") is for tests; the best instruction set is the default.
    """

    def __init__(self, name: str, dim: int, *, seed: int, isa: str = "", **settings):
        super().__init__(name, dim, seed=seed, **settings)
        self._core, self._counters = load_library(), CoreCounters()
        _install_fast_methods()
        self._keeps_all_rows = self.spec.admits_all and not self.spec.evicts
        self._refused, self._dropped = 0, 0  # The core's counters at the last `clear`.
        config = _make_config(self)
        self._handle = self._core.nonet_table_new(ctypes.byref(config), isa.encode() or None)
        if not self._handle:
            raise _make_memory_error(self)
        # The core's table is freed when this array is deleted, not when the Python table is: the garbage collector does not
        # track arrays, so in a reference cycle the array outlives all finalizers, which may still look up rows.
        self._core_owner = np.empty(0)
        self._look, self._lookup = self._core.nonet_table_look, self._core.nonet_table_lookup
        self._apply = self._core.nonet_table_apply
        register_finalizer(self._core_owner, self._core.nonet_table_free, self._handle)

    def __len__(self) -> int:
        return self._counters["rows"]

    @property
    def keys(self) -> np.ndarray:
        """The keys of all rows [R], by slice."""
        parts = [part.key for part in self._iterate_rows(ALL_SLICES, None)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @property
    def resident_bytes(self) -> int:
        """The bytes of rows, index and admission counts, without the scratch space of the batches."""
        return self._counters["bytes"]

    @property
    def absent(self) -> int:
        """The number of positions in read-only lookups that read the default row because their key had no row."""
        return self._counters["absent"]

    @property
    def refused(self) -> int:
        """The number of positions in training lookups that read the default row because their key was not admitted."""
        return self._counters["refused"] - self._refused

    @property
    def dropped(self) -> int:
        """The number of gradient positions whose key had no row, because it was not admitted or was evicted."""
        return self._counters["dropped"] - self._dropped

    def clear(self) -> None:
        """Delete every row and reset the step to 0."""
        if self._core.nonet_table_clear(self._handle):
            raise _make_memory_error(self)
        self.step = 0
        self.deleted.clear()
        self._refused, self._dropped = self._counters["refused"], self._counters["dropped"]

    def lookup(
        self, keys: Tensor | np.ndarray, *, train: bool, step: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Read the rows of keys. With `train`, rows are created for absent keys that the admission policy admits.

        Other absent keys read the default row.

        Args:
            keys: Keys as int64 [N]; duplicates are allowed.
            train: Whether to create rows.
            step: The step that trains these rows; by default the table's step plus 1.
            out: A contiguous float32 tensor [N, D] in host memory to write to, which saves the allocation.

        Returns:
            A copy of the rows, float32 [N, D]; without `out`, a tensor that cannot be resized.
        """
        key_tensor = keys if _is_plain(keys) else _to_tensor(keys)
        count = key_tensor.numel()
        rows = _new_rows(count, self.dim) if out is None else self._check_out(out, key_tensor)
        if not train:
            self._look(self._handle, key_tensor.data_ptr(), count, rows.data_ptr())
            return rows
        step = self.step + 1 if step is None else index(step)
        if self._lookup(self._handle, key_tensor.data_ptr(), count, rows.data_ptr(), step) < 0:
            raise _make_memory_error(self)
        return rows

    def apply(self, keys: Tensor | np.ndarray, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Sum the gradients of equal keys in position order, then apply one optimizer step to each row.

        Args:
            keys: Keys as int64 [N].
            grads: Gradients [N, D].
            step: The step; it must not be lower than in an earlier call.
            lr: The learning rate; None for that of the spec.
        """
        last_step, step = self.step, index(step)
        if step < last_step:
            self._check_step(step)
        code = self._push(keys, grads, last_step, step, self._resolve_lr(lr))
        if code < 0:
            raise self._make_error(code, keys)
        self.step = step
        if not self._keeps_all_rows and self._counters["evicted"]:
            self._take_evicted(step)

    def _push(self, keys: Tensor | np.ndarray, grads: Tensor, before: int, step: int, lr: float) -> int:
        """Apply gradients in the core and return its code, which is negative after an error.

        Args:
            keys: Keys as int64 [N].
            grads: Gradients [N, D].
            before: The step of the last call.
            step: The step of this call.
            lr: The learning rate.
        """
        key_tensor = keys if _is_plain(keys) else _to_tensor(keys)
        count = key_tensor.numel()
        if grads.shape != (count, self.dim) or grads.is_complex():
            self._check_grads(key_tensor, grads)
        if grads.dtype is not _F32 or not grads.is_contiguous() or not grads.is_cpu:
            grads = grads.detach().to("cpu", _F32).contiguous()
        return self._apply(self._handle, key_tensor.data_ptr(), count, grads.data_ptr(), before, step, lr)

    # `_install_fast_methods` replaces `lookup` and `_push` by native methods, which call these for keys that are not plain.
    _general, _general_push = lookup, _push

    def take_packed(self, keys: np.ndarray, record: int) -> Tensor:
        """Return the rows of keys [N] as bytes [N, record], after creating absent rows: see `bulk.take_packed`."""
        key_array, out = _to_array(keys), torch.empty(len(keys), record, dtype=torch.uint8)
        code = self._core.nonet_table_take(
            self._handle, _get_address(key_array), len(key_array), out.data_ptr(), self.step + 1
        )
        if code < 0:
            raise _make_memory_error(self)
        return out

    def put_packed(self, keys: np.ndarray, data: Tensor) -> None:
        """Write rows that `take_packed` returned for these keys, and raise the table's step to at least theirs."""
        key_array, data = _to_array(keys), data.contiguous()
        newest_step = self._core.nonet_table_enter(
            self._handle, _get_address(key_array), len(key_array), data.data_ptr()
        )
        if newest_step < 0:
            raise _make_memory_error(self)
        self.step = max(self.step, newest_step)

    def _check_out(self, out: Tensor, keys: Tensor) -> Tensor:
        """Return `out` if the rows of `keys` can be written to it, else raise DataError."""
        count = len(keys)
        if (
            out.dtype is not _F32
            or out.shape != (count, self.dim)
            or not out.is_contiguous()
            or not out.is_cpu
        ):
            raise DataError(
                f"table {self.name!r} needs `out` as contiguous float32 [{count}, {self.dim}] in host memory; "
                f"got {out.dtype} {list(out.shape)} on {out.device}"
            )
        distance_bytes = keys.data_ptr() - out.data_ptr()
        if -keys.nbytes < distance_bytes < out.nbytes:  # The two memory ranges overlap.
            raise DataError(
                f"table {self.name!r} cannot write rows over their keys: `out` shares memory with the keys; "
                "pass a separate tensor"
            )
        return out

    def _make_error(self, code: int, keys: Tensor | np.ndarray) -> NonetError:
        """Convert a negative code of `_push` to an exception, which the caller raises."""
        if code == _ABSENT_KEYS:
            unique = np.unique(to_int64_keys(keys))
            return self._make_missing_row_error(unique[~self._contains(unique)])
        return _make_memory_error(self)

    def _take_evicted(self, step: int) -> None:
        """Take the list of evicted keys from the core, and record and count them as deleted at `step`."""
        evicted_keys = np.empty(self._counters["evicted"], dtype=np.int64)
        self._core.nonet_table_take_evicted(self._handle, _get_address(evicted_keys))
        self.deleted.add(evicted_keys, step)
        self.evicted += len(evicted_keys)

    def _iterate_rows(self, slices: range = ALL_SLICES, since: int | None = None) -> Iterator[RowColumns]:
        after_step = np.iinfo(np.int64).min if since is None else since
        for start in range(slices.start, slices.stop, _PART_SLICES):
            stop = min(start + _PART_SLICES, slices.stop)
            yield from self._read_hash_range(start << _SHIFT, (stop << _SHIFT) - 1, after_step)

    def _read_hash_range(self, low: int, high: int, since: int) -> Iterator[RowColumns]:
        """Yield the rows whose hash lies in [low, high] and that changed after `since`."""
        chosen = ctypes.c_void_p()
        count = self._core.nonet_table_choose(self._handle, low, high, since, ctypes.byref(chosen))
        if count < 0:
            raise _make_memory_error(self)
        try:
            for start in range(0, count, EXPORT_ROWS):
                yield self._read_chosen(chosen.value or 0, start, min(EXPORT_ROWS, count - start))
        finally:
            self._core.nonet_chosen_free(chosen)

    def _read_chosen(self, chosen: int, start: int, count: int) -> RowColumns:
        """Read `count` rows of the core's list at the address `chosen`, from position `start` of the list."""
        # An entry of the list has two int64: the key, and where its row is.
        first_address = chosen + 16 * start
        key = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(first_address))[::2].copy()
        row, state = (np.empty((count, width), dtype=np.float32) for width in (self.dim, self._state_width))
        step, seen, uses = (np.zeros(count, dtype=np.int64) for _ in range(3))
        self._core.nonet_table_read(
            self._handle,
            first_address,
            count,
            *(_get_address(column) for column in (row, state, step, seen, uses)),
        )
        policy = (seen, uses) if self.spec.evicts else (None, None)
        return RowColumns(key, row, state, step, np.zeros(count, dtype=bool), *policy)

    def _contains(self, keys: np.ndarray) -> np.ndarray:
        key_array, row_places = _to_array(keys), np.empty(len(keys), dtype=np.int64)
        self._core.nonet_table_find(
            self._handle, _get_address(key_array), len(key_array), _get_address(row_places)
        )
        return row_places >= 0

    def _upsert(self, rows: RowColumns) -> None:
        """Insert or overwrite rows with their optimizer state."""
        columns = rows.key, rows.row, rows.state, rows.step, rows.seen, rows.uses
        arrays = [None if column is None else _to_array(column) for column in columns]
        key_address, *addresses = [None if array is None else _get_address(array) for array in arrays]
        code = self._core.nonet_table_upsert(self._handle, key_address, len(rows.key), *addresses)
        if code < 0:
            raise _make_memory_error(self)

    def _delete(self, keys: np.ndarray) -> None:
        key_array = _to_array(keys)
        self._core.nonet_table_forget(self._handle, _get_address(key_array), len(key_array))

    def _list_waiting(self) -> tuple[np.ndarray, np.ndarray]:
        keys, packed = (np.empty(self._counters["waiting"], dtype=np.int64) for _ in range(2))
        self._core.nonet_table_waiting(self._handle, _get_address(keys), _get_address(packed))
        return keys, packed

    def _set_waiting(self, keys: np.ndarray, packed: np.ndarray) -> None:
        """Set the counts of keys that wait for admission."""
        key_array, values = _to_array(keys), _to_array(packed)
        code = self._core.nonet_table_wait(
            self._handle, _get_address(key_array), _get_address(values), len(key_array)
        )
        if code < 0:
            raise _make_memory_error(self)


@cache
def _install_fast_methods() -> None:
    """Bind the C methods for plain keys, which call the Python methods above for all others."""
    install_fast_methods(NativeTable, "_general", "_general_push")


def _make_config(table: NativeTable) -> ConfigStruct:
    """Build the core's configuration of a table."""
    spec: TableSpec = table.spec
    policy = PolicyStruct(
        1 + EVICTIONS.index(spec.evict) if spec.evict else 0,  # 0: no eviction.
        spec.admit_count,
        spec.admit_threshold,
        spec.ttl_steps,
        spec.most_rows,
        spec.group_bits,
    )
    return ConfigStruct(
        spec.dim,
        table._state_width,
        FORMATS.index(spec.dtype),
        table._optimizer.number,
        int(table._base),
        spec.init_scale,
        spec.default,
        table._eps,
        spec.clip,
        spec.l1,
        spec.l2,
        spec.weight_decay,
        policy,
        table._counters.words,
    )


def _is_plain(keys: Tensor | np.ndarray) -> TypeGuard[Tensor]:
    """Return whether the core can read these keys in place."""
    return (
        type(keys) is Tensor
        and keys.dtype is _I64
        and keys.dim() == 1
        and keys.is_contiguous()
        and keys.is_cpu
    )


def _to_tensor(keys: Tensor | np.ndarray) -> Tensor:
    return torch.from_numpy(_to_array(to_int64_keys(keys)))


def _to_array(values: np.ndarray) -> np.ndarray:
    """Return a contiguous and writable array, which torch accepts without a warning."""
    return np.require(values, requirements=["C", "W"])


def _get_address(array: np.ndarray) -> int:
    return array.ctypes.data


def _make_memory_error(table: BaseTable) -> NonetError:
    return NonetError(
        f"table {table.name!r} has no memory for more rows; it has {len(table)} rows of {table.spec.row_bytes} bytes: "
        "set a budget (budget_bytes and evict), or use more shards or a machine with more memory"
    )

"""A version of a native table, kept and read by the core: reading a range of slices is one call without the GIL.

One core chooses, orders and copies a million rows of width 64 in 0.4 s, 0.3 MB per call, into reused columns: no
call allocates memory or faults pages in. NumPy does the same without the core (`snapshot`).
"""

# Shapes: N keys, R rows of a piece, D width, S elements of optimizer state per row.

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from nonet.embedding.tables import (
    BaseTable,
    NativeTable,
    NativeUnavailable,
    RowColumns,
    TableSpec,
    get_state_width,
    load_library,
    register_finalizer,
)
from nonet.errors import NonetError

_SHIFT = 48  # The upper 16 bits of a key's 64-bit hash are its slice.
_NO_MEMORY = -1  # The core's code for a lack of memory.
_MIN_ROWS = (
    1024  # Space for at least this many rows is allocated, so that small tables do not need several growths.
)
_BEFORE_EVERY_STEP = -(1 << 63)
_MAX_CHAINS = 1 << 20  # The core's limit of the number of hash chains of kept rows.


class _VersionStruct(ctypes.Structure):
    """The ctypes layout of `nonet::Version`."""

    _fields_ = [
        ("table", c_void_p), ("kept", c_void_p), ("at", c_int64), ("born", c_void_p), ("born_count", c_int64),
        ("moved", c_int64), ("given", c_void_p), ("broken", c_int64),
    ]  # fmt: skip


class _ColumnsStruct(ctypes.Structure):
    """The ctypes layout of `nonet::Columns`."""

    _fields_ = [(name, c_void_p) for name in ("key", "row", "state", "step", "seen", "uses")]


class ReadBuffers:
    """Reusable columns to read rows into; they grow if necessary.

    Attributes:
        rows: The number of rows for which there is space.
        used: The number of rows that have been read since the last `take_rows`.
    """

    def __init__(self, spec: TableSpec, rows: int = _MIN_ROWS):
        self._spec = spec
        self._arrays: dict[str, np.ndarray] = {}
        self._starts: list[tuple[str, int, int]] = []  # Name, address and bytes per row.
        self.rows, self.used = 0, 0
        self._resize(max(rows, _MIN_ROWS))

    def ensure_capacity(self, rows: int) -> None:
        """Ensure space for `rows` more rows."""
        if self.used + rows > self.rows:
            self._resize(max(self.used + rows, 3 * self.rows // 2))

    def take_rows(self) -> RowColumns:
        """Return views of the rows that have been read and mark the buffers as empty; the views are valid until the next use."""
        views = {name: array[: self.used] for name, array in self._arrays.items()}
        not_deleted, self.used = np.zeros(self.used, dtype=bool), 0
        policy = (views.get("seen"), views.get("uses"))
        return RowColumns(views["key"], views["row"], views["state"], views["step"], not_deleted, *policy)

    def get_free_columns(self) -> _ColumnsStruct:
        """Return the addresses of the first free row in each column."""
        return _ColumnsStruct(
            **{name: start + self.used * row_bytes for name, start, row_bytes in self._starts}
        )

    def _resize(self, rows: int) -> None:
        """Replace the arrays by larger ones for `rows` rows and copy the rows that have been read."""
        spec = self._spec
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "key": ((rows,), np.int64),
            "row": ((rows, spec.dim), np.float32),
            "state": ((rows, get_state_width(spec)), np.float32),
            "step": ((rows,), np.int64),
        }
        if spec.evicts:
            shapes |= {"seen": ((rows,), np.int64), "uses": ((rows,), np.int64)}
        larger = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
        for name, array in self._arrays.items():
            larger[name][: self.used] = array[: self.used]
        self._arrays, self.rows = larger, rows
        self._starts = [(name, array.ctypes.data, array.strides[0]) for name, array in larger.items()]


class KeptRows:
    """Memory for the kept rows of a version; after `clear` it can serve the next one."""

    def __init__(self, table: NativeTable, core: Any):
        self.handle = core.nonet_kept_new(table.spec.dim, get_state_width(table.spec), len(table))
        if not self.handle:
            raise _make_memory_error(table)
        self._core, self._table_rows = core, max(len(table), _MIN_ROWS)  # It determines the number of chains.
        register_finalizer(self, core.nonet_kept_free, self.handle)

    def __len__(self) -> int:
        return self._core.nonet_kept_count(self.handle)

    def can_serve(self, table: NativeTable) -> bool:
        """Return whether the hash chains are still short enough for a table that has grown."""
        return len(table) <= 4 * self._table_rows or self._table_rows >= _MAX_CHAINS

    def clear(self) -> None:
        """Remove the rows; up to 256 MB of memory are retained."""
        self._core.nonet_kept_clear(self.handle)


class NativeVersion:
    """A live table and the copies of its rows that were kept, which together are the version of a step.

    The caller of every method holds the table's lock. `given` is the mask of slices that need no keeping, which the owner
    of the version changes in place.
    """

    def __init__(self, table: NativeTable, step: int, core: Any, given: np.ndarray, spare: KeptRows | None):
        self._table, self._core, self._given = table, core, given
        self.memory = spare if spare is not None and spare.can_serve(table) else KeptRows(table, core)
        self._version = _VersionStruct(
            table._handle, self.memory.handle, step, None, 0, 0, given.ctypes.data, 0
        )
        self._new_keys = np.empty(0, dtype=np.int64)
        if table.spec.evicts:
            if not core.nonet_watch(byref(self._version)):
                raise _make_memory_error(table)
            # The core now keeps rows that it evicts; the memory that it points to must live until that ends.
            owned = (table, self.memory, given)
            self._unwatch = register_finalizer(self, _unwatch, core, table._handle, self._version, owned)

    @classmethod
    def create(
        cls, table: BaseTable, step: int, given: np.ndarray, spare: KeptRows | None = None
    ) -> NativeVersion | None:
        """Create a version, or return None if the table is not native or the core does not support it.

        Args:
            table: The table.
            step: The step of the version.
            given: Slices that need no keeping, bool [65536].
            spare: Memory of an earlier version.
        """
        core = _load_core()
        if core is None or not isinstance(table, NativeTable):
            return None
        return cls(table, step, core, given, spare)

    def close(self) -> None:
        """Stop keeping rows; the memory can be used for another version."""
        if self._table.spec.evicts:
            self._unwatch()

    def __len__(self) -> int:
        return len(self.memory)

    def set_new_keys(self, keys: np.ndarray, moved: bool) -> None:
        """Set the sorted keys [N] that got their row after the version; `moved`: some of these rows came from another shard."""
        self._new_keys = np.ascontiguousarray(keys)
        self._version.born, self._version.born_count = self._new_keys.ctypes.data, len(keys)
        self._version.moved = int(moved)

    def keep_rows(self, keys: np.ndarray) -> None:
        """Keep the current rows of keys [N], except those of slices that were already read."""
        key_array = np.ascontiguousarray(keys)
        if self._core.nonet_keep(byref(self._version), key_array.ctypes.data, len(key_array)) < 0:
            raise _make_memory_error(self._table)

    def find_kept(self, keys: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Return which keys [N] have a kept row, bool [N], and write these rows to `rows` [N, D] if given."""
        if self._version.broken:
            raise _make_memory_error(self._table)
        key_array, present = np.ascontiguousarray(keys), np.empty(len(keys), dtype=np.bool_)
        rows_address = None if rows is None else rows.ctypes.data
        self._core.nonet_kept_find(
            byref(self._version), key_array.ctypes.data, len(key_array), present.ctypes.data, rows_address
        )
        return present

    def read(self, slices: range, since: int | None, buffers: ReadBuffers) -> None:
        """Add the version's rows of these slices changed after step `since` to `buffers`, by slice and key."""
        after_step = _BEFORE_EVERY_STEP if since is None else since
        low, high = slices.start << _SHIFT, (slices.stop << _SHIFT) - 1
        while True:
            columns, free_rows = buffers.get_free_columns(), buffers.rows - buffers.used
            count = self._core.nonet_piece(
                byref(self._version), low, high, after_step, byref(columns), free_rows
            )
            if count >= 0:
                buffers.used += count
                return
            if count == _NO_MEMORY:
                raise _make_memory_error(self._table)
            buffers.ensure_capacity(-2 - count)  # The core returns -2 - (number of rows) if they do not fit.


def _unwatch(core: Any, table: int, version: _VersionStruct, owned: tuple[Any, ...]) -> None:
    """Stop keeping the rows that a table evicts; `owned` only keeps the core's memory alive until then."""
    core.nonet_unwatch(table, byref(version))


def _make_memory_error(table: NativeTable) -> NonetError:
    return NonetError(
        f"there is no memory to keep rows of table {table.name!r} while they are read; "
        "save less often, or give the shard more memory"
    )


def write_out(file: int, offset: int, nbytes: int) -> None:
    """Start writing these bytes of an open file to disk without waiting; a no-op where it is not supported."""
    core = _load_core()
    if core is not None:
        core.nonet_write_out(file, offset, nbytes)


@cache
def _load_core() -> Any:
    """Return the native library with the signatures of its snapshot functions; None if it is unavailable."""
    try:
        core = load_library()
        signatures = {
            "nonet_kept_new": (c_void_p, c_int64, c_int64, c_int64),
            "nonet_kept_free": (None, c_void_p),
            "nonet_kept_clear": (None, c_void_p),
            "nonet_kept_count": (c_int64, c_void_p),
            "nonet_kept_find": (None, POINTER(_VersionStruct), c_void_p, c_int64, c_void_p, c_void_p),
            "nonet_keep": (c_int64, POINTER(_VersionStruct), c_void_p, c_int64),
            "nonet_watch": (c_int32, POINTER(_VersionStruct)),
            "nonet_unwatch": (None, c_void_p, POINTER(_VersionStruct)),
            "nonet_piece": (
                c_int64, POINTER(_VersionStruct), c_uint64, c_uint64, c_int64, POINTER(_ColumnsStruct), c_int64,
            ),
            "nonet_write_out": (None, c_int32, c_int64, c_int64),
        }  # fmt: skip
        for name, (result, *arguments) in signatures.items():
            function = getattr(core, name)
            function.restype, function.argtypes = result, arguments
    except (NativeUnavailable, AttributeError):
        return None
    return core

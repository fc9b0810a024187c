"""A version of a native table, kept and read by the core: a range of slices is one call that needs no GIL.

A million rows of width 64 are chosen, ordered and copied in 0.4 s of one core, 0.3 MB a call, into columns that are used
again: no call allocates or faults pages in. NumPy does the same where the core is not to be had (`snapshot`).
"""

# Shapes: N keys, R rows of a piece, D width, S numbers of optimizer state in a row.

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

_SHIFT = 48  # hash bits below a slice
_NO_MEMORY = -1
_LEAST_ROWS = 1024
_ALWAYS = -(1 << 63)  # before every step
_MOST_CHAINS = 1 << 20  # of the core


class _VersionStruct(ctypes.Structure):
    """nonet::Version."""

    _fields_ = [
        ("table", c_void_p), ("kept", c_void_p), ("at", c_int64), ("born", c_void_p), ("born_count", c_int64),
        ("moved", c_int64), ("given", c_void_p), ("broken", c_int64),
    ]  # fmt: skip


class _ColumnsStruct(ctypes.Structure):
    """nonet::Columns."""

    _fields_ = [(name, c_void_p) for name in ("key", "row", "state", "step", "seen", "uses")]


class ReadBuffers:
    """Columns that pieces are read into, used again and again; they grow where a piece needs it."""

    def __init__(self, spec: TableSpec, rows: int = _LEAST_ROWS):
        self._spec = spec
        self._arrays: dict[str, np.ndarray] = {}
        self._starts: list[tuple[str, int, int]] = []  # name, address, bytes a row
        self.rows, self.used = 0, 0
        self._resize(max(rows, _LEAST_ROWS))

    def ensure_capacity(self, rows: int) -> None:
        """Have room for so many rows after those that are there."""
        if self.used + rows > self.rows:
            self._resize(max(self.used + rows, 3 * self.rows // 2))

    def take_rows(self) -> RowColumns:
        """The rows that are there, views that hold until the next use of the room, which is empty again."""
        view = {name: array[: self.used] for name, array in self._arrays.items()}
        gone, self.used = np.zeros(self.used, dtype=bool), 0
        policy = (view.get("seen"), view.get("uses"))
        return RowColumns(view["key"], view["row"], view["state"], view["step"], gone, *policy)

    def get_free_columns(self) -> _ColumnsStruct:
        """Where the next rows go."""
        return _ColumnsStruct(**{name: start + self.used * bytes_ for name, start, bytes_ in self._starts})

    def _resize(self, rows: int) -> None:
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
    """Memory for the rows that are kept of a version; cleared, it serves the next one."""

    def __init__(self, table: NativeTable, core: Any):
        self.handle = core.nonet_kept_new(table.spec.dim, get_state_width(table.spec), len(table))
        if not self.handle:
            raise _make_memory_error(table)
        self._core, self._rows = core, max(len(table), _LEAST_ROWS)
        register_finalizer(self, core.nonet_kept_free, self.handle)

    def __len__(self) -> int:
        return self._core.nonet_kept_count(self.handle)

    def can_serve(self, table: NativeTable) -> bool:
        """Whether its chains are short for this table still, which has grown since."""
        return len(table) <= 4 * self._rows or self._rows >= _MOST_CHAINS

    def clear(self) -> None:
        """Forget the rows; up to 256 MB of their memory stay."""
        self._core.nonet_kept_clear(self.handle)


class NativeVersion:
    """A live table and the rows kept of it, which make the version of a step; the caller holds the table's lock."""

    def __init__(self, table: NativeTable, step: int, core: Any, given: np.ndarray, spare: KeptRows | None):
        self._table, self._core, self._given = table, core, given
        self.memory = spare if spare is not None and spare.can_serve(table) else KeptRows(table, core)
        self._version = _VersionStruct(
            table._handle, self.memory.handle, step, None, 0, 0, given.ctypes.data, 0
        )
        self._born = np.empty(0, dtype=np.int64)
        if table.spec.evicts:
            if not core.nonet_watch(byref(self._version)):
                raise _make_memory_error(table)
            # What the core points to lives as long as the watch does.
            owned = (table, self.memory, given)
            self._unwatch = register_finalizer(self, _unwatch, core, table._handle, self._version, owned)

    @classmethod
    def create(
        cls, table: BaseTable, step: int, given: np.ndarray, spare: KeptRows | None = None
    ) -> NativeVersion | None:
        """None where the table is not the core's or the core cannot do this. `given` [65536]: slices that need no keeping."""
        core = _load_core()
        if core is None or not isinstance(table, NativeTable):
            return None
        return cls(table, step, core, given, spare)

    def close(self) -> None:
        """Nothing is kept any more; the memory is free for another version."""
        if self._table.spec.evicts:
            self._unwatch()

    def __len__(self) -> int:
        return len(self.memory)

    def set_new_keys(self, keys: np.ndarray, moved: bool) -> None:
        """Keys [N], sorted, whose live row is not one of the version unless it was kept."""
        self._born = np.ascontiguousarray(keys)
        self._version.born, self._version.born_count = self._born.ctypes.data, len(keys)
        self._version.moved = int(moved)

    def keep_rows(self, keys: np.ndarray) -> None:
        """Keep the version's rows of keys [N], as they are, but for the slices that were given out."""
        key_array = np.ascontiguousarray(keys)
        if self._core.nonet_keep(byref(self._version), key_array.ctypes.data, len(key_array)) < 0:
            raise _make_memory_error(self._table)

    def find_kept(self, keys: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Which of keys [N] were kept; their rows go into `rows` [N, D] where given."""
        if self._version.broken:
            raise _make_memory_error(self._table)
        key_array, present = np.ascontiguousarray(keys), np.empty(len(keys), dtype=np.bool_)
        into = None if rows is None else rows.ctypes.data
        self._core.nonet_kept_find(
            byref(self._version), key_array.ctypes.data, len(key_array), present.ctypes.data, into
        )
        return present

    def read(self, slices: range, since: int | None, room: ReadBuffers) -> None:
        """Put the version's rows of these slices changed after step `since` into `room`, by slice and key."""
        after = _ALWAYS if since is None else since
        low, high = slices.start << _SHIFT, (slices.stop << _SHIFT) - 1
        while True:
            columns, left = room.get_free_columns(), room.rows - room.used
            count = self._core.nonet_piece(byref(self._version), low, high, after, byref(columns), left)
            if count >= 0:
                room.used += count
                return
            if count == _NO_MEMORY:
                raise _make_memory_error(self._table)
            room.ensure_capacity(-2 - count)


def _unwatch(core: Any, table: int, version: _VersionStruct, owned: tuple[Any, ...]) -> None:
    core.nonet_unwatch(table, byref(version))


def _make_memory_error(table: NativeTable) -> NonetError:
    return NonetError(
        f"there is no memory to keep rows of table {table.name!r} while they are read; "
        "save less often, or give the shard more memory"
    )


def write_out(file: int, offset: int, nbytes: int) -> None:
    """Let the system begin to write these bytes of an open file to the disk; does not wait, does nothing where it can't."""
    core = _load_core()
    if core is not None:
        core.nonet_write_out(file, offset, nbytes)


@cache
def _load_core() -> Any:
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
        for name, (answer, *arguments) in signatures.items():
            function = getattr(core, name)
            function.restype, function.argtypes = answer, arguments
    except (NativeUnavailable, AttributeError):
        return None
    return core

"""The interface of all stores: columns by key, optionally with versions by time.

    store = open_store("/data/items.store")              # a folder of packed segments
    values, offsets = store.multi_get([7, 7, 9], ["price"], as_of=[100, 200, 200])

The row of key i is `values[offsets[i]:offsets[i + 1]]`: one row, or none if the store has no value of that key. A key
without a value has no row; zeros are never filled in. `as_of` gives the newest version strictly before a time, so an event does
not see a value that was written in the same second.
"""

# Shapes: K requested or written keys, R rows that were found, U distinct keys.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError, DataError
from nonet.suggest import join_names, suggest_sentence

_FORMAT = 1  # The format number of saved descriptions.


class StoreRows(NamedTuple):
    """The rows that a store returns for K keys.

    Attributes:
        values: An Arrow batch of R rows in the order of the keys.
        offsets: Offsets [K + 1] int64: key i has the rows `offsets[i]` to `offsets[i + 1]`, one or none.
    """

    values: pa.RecordBatch
    offsets: np.ndarray

    @property
    def found(self) -> np.ndarray:
        """Which keys have a row, [K] bool."""
        return np.diff(self.offsets) > 0


class Store(ABC):
    """Base class of stores, which hold columns of items or users by key.

    Every method raises ConfigError or DataError for invalid arguments, and StoreError if the store cannot be reached or
    does not respond in time; each message is one line that names the store.

    Attributes:
        name: Name of the store in messages.
        key: Arrow type of the keys: int64, or string for text.
        schema: Names and types of the columns.
        versions: Whether each row has a time, so that a key can have several rows (versions).
    """

    name: str
    key: pa.DataType
    schema: pa.Schema
    versions: bool
    kept_versions: int | None = None
    """Maximum number of versions of a value that the store keeps; None for no limit."""
    made_elsewhere: ClassVar[str] = ""
    """Why Nonet cannot create a store of this kind; empty if it can."""
    creation_command: ClassVar[str] = ""
    """The command that creates a store of this kind, where Nonet cannot."""
    is_in_files: ClassVar[bool] = False
    """Whether the address is a folder of this machine, so that an export contains a copy of the rows."""
    takes_columns: ClassVar[bool] = False
    """Whether the constructor takes the columns to read as its argument `columns`, because the store has no list of columns."""

    def multi_get(self, keys: Any, columns: Sequence[str] | None = None, as_of: Any = None) -> StoreRows:
        """Return the rows of keys [K]; each distinct key is read once. See the module.

        Args:
            keys: Keys [K]; a null or None has no row.
            columns: Columns to read; None for all.
            as_of: A time or times [K], int64 unix seconds; None for the newest version.
        """
        array = _to_array(keys)
        is_present = ~_find_missing(array)
        names = self.check_columns(columns)
        if is_present.all():
            checked_keys = self.check_keys(array)
            return self._get(checked_keys, names, self._broadcast_times(as_of, len(checked_keys)))
        times_K = self._broadcast_times(as_of, len(is_present))
        present_keys = (
            array.filter(pa.array(is_present)) if isinstance(array, pa.Array) else array[is_present]
        )
        present_times = None if times_K is None else times_K[is_present]
        rows = self._get(self.check_keys(present_keys), names, present_times)
        row_counts = np.zeros(len(is_present), np.int64)
        row_counts[is_present] = np.diff(rows.offsets)
        return StoreRows(rows.values, np.concatenate([np.zeros(1, np.int64), np.cumsum(row_counts)]))

    @abstractmethod
    def _get(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Implement `multi_get` for checked arguments.

        Args:
            keys: Keys, int64 [K] or an Arrow array of text [K], without nulls.
            columns: Names of existing columns.
            before: Times [K] int64 unix seconds, of which each row is to be older; None for the newest version.
        """

    def get_times(self, keys: Any, as_of: Any = None) -> np.ndarray | None:
        """Return the times [K] int64 of the versions that `multi_get` returns for keys [K], in unix seconds.

        A key without a version has any number. The result is None if the store has no versions, or cannot find their times.

        Args:
            keys: Keys [K], without nulls.
            as_of: As for `multi_get`.
        """
        if not self.versions:
            return None
        checked_keys = self.check_keys(keys)
        return self._get_times(checked_keys, self._broadcast_times(as_of, len(checked_keys)))

    def _get_times(self, keys: Any, before: np.ndarray | None) -> np.ndarray | None:
        """Implement `get_times` for checked arguments; a store that does not override it cannot find times."""
        return None

    @abstractmethod
    def put(self, keys: Any, values: pa.Table | pa.RecordBatch, times: Any = None) -> None:
        """Write rows [K] of keys [K]; `times` are unix seconds [K] if the store has versions, and None otherwise."""

    @abstractmethod
    def scan(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Iterate over all rows as batches with the columns `key`, `time` (if there are versions), and those of the store."""

    @abstractmethod
    def collect_stats(self) -> dict[str, Any]:
        """Return the numbers of keys and rows, the bytes, and other statistics, by name; each kind of store has its own."""

    def close(self) -> None:  # noqa: B027  Some stores have nothing to close.
        """Close files and connections."""

    # --- what backends share ----------------------------------------------------------------------------------------

    def check_keys(self, keys: Any) -> Any:
        """Convert keys to int64 [K] or an Arrow text array [K] without loss.

        Raises:
            DataError: If keys have another type, are missing, or are integers above 2^63.
        """
        array = _to_array(keys)
        if missing_count := int(_find_missing(array).sum()):
            raise DataError(
                f"{self.name}: {missing_count} of {len(array)} keys are missing; every row needs one"
            )
        is_text, wants_text = _is_text(array), pa.types.is_string(self.key)
        is_integer = (
            array.dtype.kind in "iu" if isinstance(array, np.ndarray) else pa.types.is_integer(array.type)
        )
        if not len(array):
            return pa.array([], pa.string()) if wants_text else np.empty(0, np.int64)
        if is_text != wants_text or not (is_text or is_integer):
            got = "text" if is_text else array.dtype if isinstance(array, np.ndarray) else array.type
            raise DataError(f"{self.name}: keys are {'text' if wants_text else 'whole numbers'}, got {got}")
        if is_text:
            return pa.array(array.tolist() if isinstance(array, np.ndarray) else array, pa.string())
        is_unsigned = array.dtype == np.uint64 if isinstance(array, np.ndarray) else array.type == pa.uint64()
        values = np.asarray(array)
        if is_unsigned and (values > np.uint64(2**63 - 1)).any():
            raise DataError(
                f"{self.name}: the key {int(values.max())} is above 2^63 - 1; write such keys as text"
            )
        return values.astype(np.int64)

    def check_columns(self, columns: Sequence[str] | None) -> list[str]:
        """Return the given column names, or all if None. Raises ConfigError for a column that does not exist."""
        known_names = self.schema.names
        for name in columns or ():
            if name not in known_names:
                raise ConfigError(
                    f"{self.name}: no column {name!r}; it has {join_names(known_names)}.{suggest_sentence(name, known_names)}"
                )
        return list(known_names if columns is None else columns)

    def check_values(self, values: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
        """Convert values to the types of the store. Raises DataError for another type or a missing column."""
        table = pa.Table.from_batches([values]) if isinstance(values, pa.RecordBatch) else values
        self.check_columns(table.column_names)
        if missing := [name for name in self.schema.names if name not in table.column_names]:
            raise DataError(
                f"{self.name}: a row has all columns; {join_names(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )
        arrays = []
        for field in self.schema:
            column = table[field.name]
            if simplify_type(column.type) != simplify_type(field.type):
                raise DataError(f"{self.name}: column {field.name!r} is {field.type}, got {column.type}")
            arrays.append(column.cast(field.type).combine_chunks())
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def check_put(self, keys: Any, values: pa.Table | pa.RecordBatch) -> tuple[Any, pa.RecordBatch]:
        """Check keys [K] and rows [K] that are to be written. Raises DataError if their numbers differ.

        Returns:
            The keys as `check_keys` returns them, and the rows in the types of the store.
        """
        checked_keys, rows = self.check_keys(keys), self.check_values(values)
        if len(checked_keys) != len(rows):
            raise DataError(f"{self.name}: {len(checked_keys)} keys for {len(rows)} rows")
        return checked_keys, rows

    def check_times(self, times: Any, row_count: int) -> np.ndarray | None:
        """Check the times of rows that are to be written.

        Args:
            times: Unix seconds [K] or one for all rows; None for a store without versions.
            row_count: K.

        Returns:
            Times [K] int64; None for a store without versions.

        Raises:
            ConfigError: If times are given for a store without versions, or missing for one with versions.
        """
        if (times is None) == self.versions:
            need = "wants a time for each row" if self.versions else "has no versions: write without times"
            raise ConfigError(f"{self.name} {need}")
        if times is None:
            return None
        return np.broadcast_to(np.asarray(times, np.int64), row_count)

    def _broadcast_times(self, as_of: Any, key_count: int) -> np.ndarray | None:
        """Broadcast `as_of` to times [K]; None for the newest version. Raises ConfigError if the store has no versions."""
        if as_of is None:
            return None
        if not self.versions:
            raise ConfigError(
                f"{self.name} keeps no versions, so it has no as_of; write it with times, or leave as_of out"
            )
        return np.broadcast_to(np.asarray(as_of, np.int64), key_count)


class StoreNotFoundError(ConfigError):
    """Raised when there is no store at an address."""


class StoreDescription(NamedTuple):
    """The description that a store saves.

    Attributes:
        schema: Names and types of the columns.
        key: Arrow type of the keys: int64, or string for text.
        versions: Whether rows have times.
    """

    schema: pa.Schema
    key: pa.DataType
    versions: bool

    @classmethod
    def create(cls, schema: pa.Schema, key: pa.DataType, versions: bool, label: str) -> StoreDescription:
        """Describe a store that is to be created; types get 32-bit offsets, and integer keys become int64.

        Args:
            schema: Names and types of the columns.
            key: Type of the keys: any integer or text.
            versions: Whether rows have times.
            label: Prefix of error messages.

        Raises:
            DataError: If the type of the keys is another.
        """
        is_text = pa.types.is_string(key) or pa.types.is_large_string(key)
        if not is_text and not pa.types.is_integer(key):
            raise DataError(f"{label}: keys are whole numbers or text, got {key}")
        fields = [pa.field(field.name, simplify_type(field.type)) for field in schema]
        return cls(pa.schema(fields), pa.string() if is_text else pa.int64(), versions)

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain data for JSON."""
        return {
            "format": _FORMAT,
            "key": "text" if pa.types.is_string(self.key) else "int64",
            "versions": self.versions,
            "schema": self.schema.remove_metadata().serialize().to_pybytes().hex(),
            "columns": {field.name: str(simplify_type(field.type)) for field in self.schema},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], label: str) -> StoreDescription:
        """Read a description from the result of `to_json`. Raises ConfigError, prefixed by `label`, for another format."""
        if data.get("format") != _FORMAT:
            raise ConfigError(
                f"{label}: format {data.get('format')}, this Nonet reads {_FORMAT}; write the store again"
            )
        key = pa.string() if data["key"] == "text" else pa.int64()
        schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(data["schema"])))
        return cls(schema, key, data["versions"])


def simplify_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with 32-bit offsets: string for large_string, list for large_list."""
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(simplify_type(kind.value_type))
    return kind


def align_rows(values: pa.RecordBatch, row_K: np.ndarray) -> StoreRows:
    """Build the rows of keys from distinct rows.

    Args:
        values: The distinct rows.
        row_K: Index of each key's row in `values`; -1 for a key without a row.
    """
    has_row = row_K >= 0
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(has_row)])
    found_rows = row_K[has_row]
    if len(found_rows) == len(values) and (found_rows == np.arange(len(found_rows))).all():
        return StoreRows(values, offsets)  # The rows are in the order of the keys, so nothing is copied.
    return StoreRows(values.take(pa.array(found_rows)), offsets)


def find_distinct(keys: Any) -> tuple[Any, np.ndarray]:
    """Return the distinct keys [U] in ascending order, and the index of each key among them [K]."""
    if isinstance(keys, np.ndarray):
        return np.unique(keys, return_inverse=True)
    distinct_keys, distinct_index = np.unique(np.array(keys.to_pylist(), dtype=object), return_inverse=True)
    return pa.array(distinct_keys.tolist(), pa.string()), distinct_index


def _to_array(keys: Any) -> Any:
    """Convert keys to one Arrow or NumPy array without rounding: integers with None among them do not become floats."""
    if isinstance(keys, (pa.Array, np.ndarray)):
        return keys
    if isinstance(keys, pa.ChunkedArray):
        return keys.combine_chunks()
    keys = list(keys)
    if any(key is None for key in keys):
        return pa.array(keys)
    return np.array(keys, dtype=object) if keys and isinstance(keys[0], str) else np.array(keys)


def _find_missing(array: Any) -> np.ndarray:
    """Return which keys are null or None, [K] bool."""
    if isinstance(array, np.ndarray):
        may_have_none = array.dtype.kind == "O"
        return (
            np.array([key is None for key in array.tolist()], bool)
            if may_have_none
            else np.zeros(len(array), bool)
        )
    return array.is_null().to_numpy(zero_copy_only=False)


def _is_text(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return array.dtype.kind == "U" or (
            array.dtype.kind == "O" and len(array) > 0 and isinstance(array[0], str)
        )
    return pa.types.is_string(array.type) or pa.types.is_large_string(array.type)

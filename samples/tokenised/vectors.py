"""Vectors of items from files, such as embeddings of texts and images, and as columns of the item table.

A .npy file has a row for each item, in an order that the caller names. A Parquet file has `item_id` and either one column of
lists, such as `vector`, or only columns of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from tokenize import TokenError
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from nonet.errors import DataError
from nonet.samples.tables import find_files, read_with_retries

pc: Any = pyarrow.compute  # Its functions are created at import time, so type checkers do not know them.

# Shapes: I items, n items with a vector, D width of the vectors.

VECTOR_FILES = (".npy", ".parquet")
"""Endings of files of vectors."""
_ID_NAMES = ("item_id",)
_TABLE_ORDER = "a row for each row of the item table, in its order"
_READ_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_CHUNK_ITEMS = 1 << 14  # Items per chunk of a column, so that its offsets fit into 32 bits.


def is_vector_type(dtype: pa.DataType) -> bool:
    """Return whether a column of the item table holds one vector per item; lists of integers are words."""
    if pa.types.is_fixed_size_list(dtype):
        return pa.types.is_floating(dtype.value_type) or pa.types.is_integer(dtype.value_type)
    return (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)) and pa.types.is_floating(
        dtype.value_type
    )


def add_vector_fields(
    schema: pa.Schema, vectors: Mapping[str, str], n_items: int, id_names: Sequence[str] = _ID_NAMES
) -> pa.Schema:
    """Return the schema of an item table to which `attach_vectors` has added the columns `vectors`.

    Of a file only what tells its shape and columns is read.

    Args:
        schema: The schema of the item table.
        vectors: Path or URI of the file of each column, by name.
        n_items: Number of items in the files of the item table.
        id_names: Names that the column of ids of a Parquet file may have.

    Raises:
        DataError: As `attach_vectors`, as far as this can be known without reading the vectors.
    """
    for name, path in vectors.items():
        _check_is_new(name, path, schema.names)
        title = f"data.vectors.{name}: {path}"
        system, file = _find_file(path, title)
        if PurePosixPath(file).suffix == ".npy":
            with system.open_input_file(file) as source:
                _check_npy(source, n_items, title, _TABLE_ORDER)
        else:
            with _open_parquet(system, file, title) as parquet:
                _find_columns(parquet.schema_arrow, schema.field("item_id").type, title, id_names)
        schema = schema.append(pa.field(name, pa.list_(pa.float32())))
    return schema


def attach_vectors(
    items: pa.Table, vectors: Mapping[str, str], id_names: Sequence[str] = _ID_NAMES
) -> pa.Table:
    """Add columns of vectors to an item table; an item that a Parquet file lacks has none.

    Args:
        items: The item table [I].
        vectors: Path or URI of the file of each column, by name. The rows of a .npy file are in the order of the table.
        id_names: Names that the column of ids of a Parquet file may have.

    Raises:
        DataError: A file cannot be read or does not fit the items, has a value that is no number, or the table has the column.
    """
    for name, path in vectors.items():
        _check_is_new(name, path, items.column_names)
        title = f"data.vectors.{name}: {path}"
        row, values_nD = read_vector_file(path, items["item_id"], title, _TABLE_ORDER, id_names)
        if not len(row):
            raise DataError(f"{title} has the vector of none of the {len(items)} items.")
        check_finite(values_nD, title, "Clean the file")
        items = items.append_column(name, _make_column(row, values_nD, len(items)))
    return items


def check_finite(values_nD: np.ndarray, title: str, advice: str) -> None:
    """Raise DataError if vectors [n, D] have a NaN or infinite value; `title` and `advice` begin and end its message."""
    if not np.isfinite(values_nD).all():
        bad = int((~np.isfinite(values_nD).all(1)).sum())
        raise DataError(f"{title} has NaN, infinite or missing values in {bad} rows. {advice}.")


def read_vector_file(
    path: str, item_id: pa.ChunkedArray, title: str, order: str, id_names: Sequence[str] = _ID_NAMES
) -> tuple[np.ndarray, np.ndarray]:
    """Read the vectors of items from a .npy or Parquet file.

    Args:
        path: Path or URI of the file.
        item_id: Ids of the items [I].
        title: The start of error messages.
        order: What the rows of a .npy file must be, for a message.
        id_names: Names that the column of ids of a Parquet file may have.

    Returns:
        The items that have a vector, as indices of `item_id` [n] ascending, and their vectors [n, D] float32.

    Raises:
        DataError: The file cannot be read or does not fit the items.
    """
    system, file = _find_file(path, title)
    if PurePosixPath(file).suffix == ".npy":
        return np.arange(len(item_id)), _read_npy(system, file, len(item_id), title, order)
    return _read_parquet(system, file, item_id, title, id_names)


def _find_file(path: str, title: str) -> tuple[Any, str]:
    """Return the file system and the path in it of a file of vectors. Raises DataError unless it is one file."""
    found = find_files(path, title.removesuffix(f" {path}"), VECTOR_FILES)
    if len(found.files) != 1:
        raise DataError(f"{title} is {len(found.files)} files; name one.")
    return found.system, found.files[0]


def _read_npy(system: Any, file: str, n_items: int, title: str, order: str) -> np.ndarray:
    """Read an array [I, D] float32 of a .npy file."""

    def read() -> np.ndarray:
        with system.open_input_file(file) as source:
            _check_npy(source, n_items, title, order)  # before memory for the whole is taken
            source.seek(0)
            try:
                return np.load(source, allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise DataError(f"{title} is not a .npy array ({str(error).splitlines()[0]}).") from None

    with np.errstate(over="ignore"):  # Numbers beyond float32 become infinite, which is refused later.
        return read_with_retries(read, title).astype(np.float32)


def _check_npy(source: Any, n_items: int, title: str, order: str) -> None:
    """Check the header of a .npy file. Raises DataError if it is no array of numbers [I, D]."""
    try:
        version = np.lib.format.read_magic(source)
        if version not in _READ_HEADERS:
            raise ValueError(f"version {version}")
        shape, _, dtype = _READ_HEADERS[version](source)
    except (ValueError, EOFError, SyntaxError, TokenError) as error:
        raise DataError(f"{title} is not a .npy array ({str(error).splitlines()[0]}).") from None
    if len(shape) != 2 or shape[0] != n_items or shape[1] < 1 or dtype.kind not in "fiu":
        raise DataError(
            f"{title} is {dtype} {list(shape)}; it must be numbers [{n_items}, width], {order}. A Parquet file with item_id "
            "needs no order."
        )


def _read_parquet(
    system: Any, file: str, item_id: pa.ChunkedArray, title: str, id_names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Read the vectors of a Parquet file; returns as `read_vector_file`."""

    def read() -> pa.Table:
        with _open_parquet(system, file, title) as parquet:
            return parquet.read()

    table = read_with_retries(read, title)
    id_name, name, number_columns = _find_columns(table.schema, item_id.type, title, id_names)
    row = _locate_items(table[id_name], item_id, title)
    if name is not None:
        values, has_vector = read_vector_column(table[name], f"{title} column {name!r}")
        number = np.cumsum(has_vector) - 1
        own = np.flatnonzero((row >= 0) & has_vector[row])
        return own, values[number[row[own]]]
    values = np.stack([_to_float32(table[name]) for name in number_columns], 1)
    own = np.flatnonzero(row >= 0)
    return own, values[row[own]]


@contextmanager
def _open_parquet(system: Any, file: str, title: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Raises DataError if it is none."""
    with system.open_input_file(file) as source:
        try:
            parquet = pq.ParquetFile(source)
        except pa.ArrowInvalid as error:
            raise DataError(f"{title} is not a Parquet file ({str(error).splitlines()[0]}).") from None
        yield parquet


def _find_columns(
    schema: pa.Schema, id_type: pa.DataType, title: str, id_names: Sequence[str]
) -> tuple[str, str | None, list[str]]:
    """Return the column of ids, the column of vectors or None, and the columns of numbers that are vectors if it is None.

    Raises:
        DataError: There are no such columns, or ids of another type.
    """
    fields = [field for field in schema if not field.name.startswith("__index_level_")]
    names = ", ".join(field.name for field in fields)
    id_name = next((name for name in id_names if name in schema.names), None)
    if id_name is None:
        raise DataError(f"{title} has no column {' or '.join(id_names)}; it has {names}.")
    ids = schema.field(id_name).type
    ids = ids.value_type if pa.types.is_dictionary(ids) else ids
    if pa.types.is_integer(ids) != pa.types.is_integer(id_type):
        raise DataError(
            f"{title} has {id_name} of {ids}, and the items' are {id_type}; they can never match."
        )
    others = [field for field in fields if field.name != id_name]
    lists = [field.name for field in others if is_vector_type(field.type) or _is_integer_list(field.type)]
    numbers = [
        field.name for field in others if pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
    ]
    if "vector" in lists or len(lists) == 1:
        return id_name, "vector" if "vector" in lists else lists[0], []
    if lists or not numbers or len(numbers) < len(others):
        raise DataError(
            f"{title} has {names}; besides {id_name} it must have one column of lists of numbers, such as vector, or only "
            "numeric columns. Remove the others."
        )
    return id_name, None, numbers


def _locate_items(ids: pa.ChunkedArray, item_id: pa.ChunkedArray, title: str) -> np.ndarray:
    """Return the row of each item [I] among ids; -1 for an item that they lack."""
    ids = ids.combine_chunks()
    ids = ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids
    ids = ids if pa.types.is_integer(ids.type) else ids.cast(pa.string())
    if ids.null_count:
        row = int(np.argmax(ids.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"{title} has no item_id in row {row}. Name the item, or drop the row.")
    first = pc.index_in(ids, value_set=ids).to_numpy()
    repeated = np.flatnonzero(first != np.arange(len(ids)))
    if len(repeated):
        row = int(repeated[0])
        raise DataError(
            f"{title} has item {ids[row].as_py()!r} twice, in rows {first[row]} and {row}. Keep one vector of each item."
        )
    try:
        found = pc.index_in(item_id, value_set=ids.cast(item_id.type))
    except pa.ArrowInvalid as error:
        raise DataError(f"{title}: item_id: {str(error).splitlines()[0]}.") from None
    return pc.fill_null(found, -1).to_numpy().astype(np.int64)


def has_vectors(column: pa.ChunkedArray) -> bool:
    """Return whether some row of a column of lists has a vector."""
    return bool(pc.any(pc.greater(pc.list_value_length(column), 0)).as_py())


def read_vector_column(column: pa.ChunkedArray, title: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors [n, D] float32 of a column of lists [I], and whether each row has one [I].

    Raises:
        DataError: No row has a vector, or vectors differ in length.
    """
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    has_vector = lengths > 0
    if not has_vector.any():
        raise DataError(f"{title} has no vector in any row.")
    widths = np.unique(lengths[has_vector]).astype(int)
    if len(widths) != 1:
        raise DataError(
            f"{title} has vectors of {widths[0]} to {widths[-1]} numbers; they must be equally long."
        )
    flat = pc.list_flatten(column.filter(pa.array(has_vector)))
    return _to_float32(flat).reshape(-1, widths[0]), has_vector


def _to_float32(numbers: pa.ChunkedArray) -> np.ndarray:
    """Return numbers as float32, rounded; NaN for null."""
    return numbers.cast(pa.float32(), safe=False).to_numpy()


def _is_integer_list(dtype: pa.DataType) -> bool:
    """Return whether a column holds lists of integers, which are vectors in a file, but words in the item table."""
    return (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)) and pa.types.is_integer(
        dtype.value_type
    )


def _check_is_new(name: str, path: str, columns: list[str]) -> None:
    """Raise DataError if the item table has the column `name`."""
    if name in columns:
        raise DataError(
            f"data.vectors.{name}: {path}: the item table has a column {name!r} already; choose another name."
        )


def _make_column(row: np.ndarray, values_nD: np.ndarray, n_items: int) -> pa.ChunkedArray:
    """Return a column of lists [I] with these vectors [n, D] at the rows [n], and nulls elsewhere."""
    chunks, width = [], values_nD.shape[1]
    for start in range(0, n_items, _CHUNK_ITEMS):
        stop = min(start + _CHUNK_ITEMS, n_items)
        first, last = np.searchsorted(row, (start, stop))
        has_vector = np.zeros(stop - start, bool)
        has_vector[row[first:last] - start] = True
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(has_vector) * width])
        flat = pa.array(values_nD[first:last].reshape(-1))
        chunks.append(
            pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=pa.array(~has_vector))
        )
    return pa.chunked_array(chunks, pa.list_(pa.float32()))

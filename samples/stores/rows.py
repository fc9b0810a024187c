"""Encodes whole rows as bytes, for stores that keep one value per key.

A row consists of the byte lengths of its columns (int32, -1 for null) and their values, concatenated and little-endian. All
rows are converted at once; no Python object is created per value.
"""

# Shapes: R rows, C columns, B bytes of one column's values in all rows.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nonet.errors import DataError
from nonet.ranges import expand_ranges

_LENGTH = np.dtype("<i4")  # The type of the byte lengths at the start of a row (its header).
KINDS = "whole numbers, floats, text, bytes, and lists of numbers"
"""The types of columns that can be encoded, for messages."""


class RowCodec:
    """Converter of rows to bytes and back.

    Args:
        schema: Names and types of the columns.
        name: Name of the store in messages.

    Raises:
        DataError: If the type of a column is not one of `KINDS`.
    """

    def __init__(self, schema: pa.Schema, name: str):
        self.schema, self._name = schema, name
        for field in schema:
            if not _can_encode(field.type):
                raise DataError(f"{name}: column {field.name!r} is {field.type}; such a store holds {KINDS}")

    def encode(self, rows: pa.RecordBatch) -> list[bytes]:
        """Encode each row [R] as bytes."""
        columns = [_flatten_column(column) for column in rows.columns]
        length_RC = np.stack([np.where(valid, sizes, -1) for _, sizes, valid in columns], 1).astype(_LENGTH)
        header_bytes = _LENGTH.itemsize * len(columns)
        size_R = header_bytes + np.maximum(length_RC, 0).sum(1, dtype=np.int64)
        end_R = np.cumsum(size_R)
        all_bytes = np.empty(int(end_R[-1]) if len(end_R) else 0, np.uint8)
        next_R = end_R - size_R  # Where the next part of each row goes: first its header, then its values.
        header_RB = length_RC.view(np.uint8).reshape(len(rows), header_bytes)
        all_bytes[next_R[:, None] + np.arange(header_bytes)] = header_RB
        next_R = next_R + header_bytes
        for values_B, sizes, _ in columns:
            index_B, _ = expand_ranges(next_R, next_R + sizes)
            all_bytes[index_B] = values_B
            next_R = next_R + sizes
        encoded = all_bytes.tobytes()
        return [encoded[end - size : end] for end, size in zip(end_R.tolist(), size_R.tolist(), strict=True)]

    def decode(self, rows: Sequence[bytes], columns: Sequence[str]) -> pa.RecordBatch:
        """Decode columns of rows [R]. Raises DataError for bytes that were not written with this schema."""
        size_R = np.fromiter(map(len, rows), np.int64, len(rows))
        all_bytes = np.frombuffer(b"".join(rows), np.uint8)
        header_bytes = _LENGTH.itemsize * len(self.schema)
        if (size_R < header_bytes).any():
            raise self._make_format_error()
        start_R = np.cumsum(size_R) - size_R
        length_RC = np.ascontiguousarray(all_bytes[start_R[:, None] + np.arange(header_bytes)]).view(_LENGTH)
        size_RC = np.maximum(length_RC, 0).astype(np.int64)
        if (header_bytes + size_RC.sum(1) != size_R).any():
            raise self._make_format_error()
        value_start_RC = start_R[:, None] + header_bytes + np.cumsum(size_RC, 1) - size_RC
        arrays = []
        for name in columns:
            i = self.schema.get_field_index(name)
            index_B, _ = expand_ranges(value_start_RC[:, i], value_start_RC[:, i] + size_RC[:, i])
            values_B = all_bytes[index_B]
            kind = self.schema.field(i).type
            arrays.append(self._make_array(name, kind, values_B, size_RC[:, i], length_RC[:, i] >= 0))
        return pa.RecordBatch.from_arrays(arrays, names=list(columns))

    def _make_array(
        self, name: str, kind: pa.DataType, values_B: np.ndarray, size_R: np.ndarray, valid_R: np.ndarray
    ) -> pa.Array:
        """Build the Arrow array of one column.

        Args:
            name: Name of the column in messages.
            kind: Type of the column.
            values_B: The concatenated bytes of its values.
            size_R: The byte count of each value.
            valid_R: Which values are not null.
        """
        bitmap = None if valid_R.all() else pa.py_buffer(np.packbits(valid_R, bitorder="little").tobytes())
        width = _get_width(kind)
        if pa.types.is_list(kind) or not width:
            # Lists have elements of a fixed width; text and bytes have elements of one byte.
            element_width = _get_width(kind.value_type) if pa.types.is_list(kind) else 1
            if (size_R % element_width).any():
                raise self._make_width_error(name, kind)
            offsets = pa.py_buffer(
                np.append(0, np.cumsum(size_R // element_width)).astype(np.int32).tobytes()
            )
            data = pa.py_buffer(values_B.tobytes())
            if not pa.types.is_list(kind):
                return pa.Array.from_buffers(kind, len(size_R), [bitmap, offsets, data])
            values = pa.Array.from_buffers(kind.value_type, len(values_B) // element_width, [None, data])
            return pa.Array.from_buffers(kind, len(size_R), [bitmap, offsets], children=[values])
        if (size_R[valid_R] != width).any():
            raise self._make_width_error(name, kind)
        fixed_width = np.zeros((len(size_R), width), np.uint8)
        fixed_width[valid_R] = values_B.reshape(-1, width)
        return pa.Array.from_buffers(kind, len(size_R), [bitmap, pa.py_buffer(fixed_width.tobytes())])

    def _make_width_error(self, name: str, kind: pa.DataType) -> DataError:
        return DataError(f"{self._name}: a value of column {name!r} has another width than {kind}")

    def _make_format_error(self) -> DataError:
        return DataError(f"{self._name}: a row was not written by this store, or with other columns")


def encode_keys(keys: np.ndarray | pa.Array) -> list[bytes]:
    """Encode keys [K] as bytes with the same order: integers as eight bytes, text as UTF-8."""
    if isinstance(keys, np.ndarray):
        # With the sign bit flipped, big-endian bytes sort like signed integers.
        joined = (keys.astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8").tobytes()
        return [joined[start : start + 8] for start in range(0, len(joined), 8)]
    return [key.encode() for key in keys.to_pylist()]


def decode_keys(encoded_keys: Sequence[bytes], key_type: pa.DataType) -> pa.Array:
    """Decode keys that `encode_keys` encoded to an Arrow array of `key_type` (text or int64)."""
    if pa.types.is_string(key_type):
        return pa.array([key.decode() for key in encoded_keys], pa.string())
    numbers = np.frombuffer(b"".join(encoded_keys), ">u8").astype(np.uint64) ^ np.uint64(1 << 63)
    return pa.array(numbers.view(np.int64))


def _can_encode(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return bool(_get_width(kind.value_type))
    return bool(_get_width(kind)) or pa.types.is_string(kind) or pa.types.is_binary(kind)


def _get_width(kind: pa.DataType) -> int:
    """Return the width of a number in bytes; 0 for other types."""
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return kind.bit_width // 8 if is_number else 0


def _flatten_column(column: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Convert a column to bytes.

    Returns:
        The concatenated bytes [B] of all values, the byte count of each value [R], and which values are not null [R] bool.
    """
    kind, valid_R = column.type, column.is_valid().to_numpy(zero_copy_only=False)
    if width := _get_width(kind):
        values = column.drop_null().to_numpy(zero_copy_only=False)
        return np.ascontiguousarray(values).view(np.uint8), np.where(valid_R, width, 0), valid_R
    if pa.types.is_list(kind):
        size_R = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        values = column.flatten()
        if values.null_count:
            raise DataError("a list has a value that is missing; such a store holds whole lists")
        numbers = np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
        return numbers.view(np.uint8), size_R * _get_width(kind.value_type), valid_R
    values = column.cast(pa.binary()).drop_null()
    value_bytes = np.frombuffer(b"".join(values.to_pylist()), np.uint8)
    size_R = np.zeros(len(column), np.int64)
    size_R[valid_R] = np.fromiter(map(len, values.to_pylist()), np.int64, len(values))
    return value_bytes, size_R, valid_R

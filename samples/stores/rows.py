"""Encodes whole rows as bytes, for stores that keep one value per key.

A row consists of the byte lengths of its columns (int32, -1 for null) and their values, concatenated and little-endian. All
rows are converted at once; no Python object is created per value.
"""

# Shapes: R rows, C columns, B bytes of all rows.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nonet.errors import DataError
from nonet.ranges import expand_ranges

_LENGTH = np.dtype("<i4")
KINDS = "whole numbers, floats, text, bytes, and lists of numbers"


class RowCodec:
    """Converts rows of a schema to bytes. `name` is the store in messages. Raises DataError for an unsupported type."""

    def __init__(self, schema: pa.Schema, name: str):
        self.schema, self._name = schema, name
        for field in schema:
            if not _can_encode(field.type):
                raise DataError(f"{name}: column {field.name!r} is {field.type}; such a store holds {KINDS}")

    def encode(self, rows: pa.RecordBatch) -> list[bytes]:
        """Encode each row [R] as bytes."""
        columns = [_flatten_column(rows.column(at)) for at in range(rows.num_columns)]
        length_RC = np.stack([np.where(valid, sizes, -1) for _, sizes, valid in columns], 1).astype(_LENGTH)
        head = _LENGTH.itemsize * len(columns)
        size_R = head + np.maximum(length_RC, 0).sum(1, dtype=np.int64)
        end_R = np.cumsum(size_R)
        out = np.empty(int(end_R[-1]) if len(end_R) else 0, np.uint8)
        place_R = end_R - size_R
        out[place_R[:, None] + np.arange(head)] = length_RC.view(np.uint8).reshape(len(rows), head)
        place_R = place_R + head
        for flat, sizes, _ in columns:
            place_B, _ = expand_ranges(place_R, place_R + sizes)
            out[place_B] = flat
            place_R = place_R + sizes
        whole = out.tobytes()
        return [whole[end - size : end] for end, size in zip(end_R.tolist(), size_R.tolist(), strict=True)]

    def decode(self, rows: Sequence[bytes], columns: Sequence[str]) -> pa.RecordBatch:
        """Decode columns of rows [R]. Raises DataError for bytes that were not written with this schema."""
        sizes = np.fromiter(map(len, rows), np.int64, len(rows))
        buffer = np.frombuffer(b"".join(rows), np.uint8)
        head = _LENGTH.itemsize * len(self.schema)
        if (sizes < head).any():
            raise self._make_format_error()
        place_R = np.cumsum(sizes) - sizes
        length_RC = np.ascontiguousarray(buffer[place_R[:, None] + np.arange(head)]).view(_LENGTH)
        filled_RC = np.maximum(length_RC, 0).astype(np.int64)
        if (head + filled_RC.sum(1) != sizes).any():
            raise self._make_format_error()
        start_RC = place_R[:, None] + head + np.cumsum(filled_RC, 1) - filled_RC
        arrays = []
        for name in columns:
            at = self.schema.get_field_index(name)
            place_B, _ = expand_ranges(start_RC[:, at], start_RC[:, at] + filled_RC[:, at])
            flat = buffer[place_B]
            kind = self.schema.field(at).type
            arrays.append(self._make_array(name, kind, flat, filled_RC[:, at], length_RC[:, at] >= 0))
        return pa.RecordBatch.from_arrays(arrays, names=list(columns))

    def _make_array(
        self, name: str, kind: pa.DataType, flat: np.ndarray, sizes: np.ndarray, valid: np.ndarray
    ) -> pa.Array:
        """Build one column from the concatenated bytes of its values."""
        bitmap = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
        width = _get_width(kind)
        if pa.types.is_list(kind) or not width:
            unit = _get_width(kind.value_type) if pa.types.is_list(kind) else 1
            if (sizes % unit).any():
                raise self._make_width_error(name, kind)
            offsets = pa.py_buffer(np.append(0, np.cumsum(sizes // unit)).astype(np.int32).tobytes())
            data = pa.py_buffer(flat.tobytes())
            if not pa.types.is_list(kind):
                return pa.Array.from_buffers(kind, len(sizes), [bitmap, offsets, data])
            values = pa.Array.from_buffers(kind.value_type, len(flat) // unit, [None, data])
            return pa.Array.from_buffers(kind, len(sizes), [bitmap, offsets], children=[values])
        if (sizes[valid] != width).any():
            raise self._make_width_error(name, kind)
        cells = np.zeros((len(sizes), width), np.uint8)
        cells[valid] = flat.reshape(-1, width)
        return pa.Array.from_buffers(kind, len(sizes), [bitmap, pa.py_buffer(cells.tobytes())])

    def _make_width_error(self, name: str, kind: pa.DataType) -> DataError:
        return DataError(f"{self._name}: a value of column {name!r} has another width than {kind}")

    def _make_format_error(self) -> DataError:
        return DataError(f"{self._name}: a row was not written by this store, or with other columns")


def encode_keys(keys: np.ndarray | pa.Array) -> list[bytes]:
    """Encode keys [K] as bytes with the same order: integers as eight bytes, text as UTF-8."""
    if isinstance(keys, np.ndarray):
        whole = (keys.astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8").tobytes()
        return [whole[at : at + 8] for at in range(0, len(whole), 8)]
    return [key.encode() for key in keys.to_pylist()]


def decode_keys(found: Sequence[bytes], key: pa.DataType) -> pa.Array:
    """Decode keys that `encode_keys` encoded."""
    if pa.types.is_string(key):
        return pa.array([each.decode() for each in found], pa.string())
    numbers = np.frombuffer(b"".join(found), ">u8").astype(np.uint64) ^ np.uint64(1 << 63)
    return pa.array(numbers.view(np.int64))


def _can_encode(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return bool(_get_width(kind.value_type))
    return bool(_get_width(kind)) or pa.types.is_string(kind) or pa.types.is_binary(kind)


def _get_width(kind: pa.DataType) -> int:
    """Return the bytes of a number; 0 for other types."""
    whole = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return kind.bit_width // 8 if whole else 0


def _flatten_column(column: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bytes of all values, the byte count of each [R], and which are not null [R]."""
    kind, valid = column.type, column.is_valid().to_numpy(zero_copy_only=False)
    if width := _get_width(kind):
        there = column.drop_null().to_numpy(zero_copy_only=False)
        return np.ascontiguousarray(there).view(np.uint8), np.where(valid, width, 0), valid
    if pa.types.is_list(kind):
        sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        there = column.flatten()
        if there.null_count:
            raise DataError("a list has a value that is missing; such a store holds whole lists")
        flat = np.ascontiguousarray(there.to_numpy(zero_copy_only=False))
        return flat.view(np.uint8), sizes * _get_width(kind.value_type), valid
    there = column.cast(pa.binary()).drop_null()
    joined = np.frombuffer(b"".join(there.to_pylist()), np.uint8)
    sizes = np.zeros(len(column), np.int64)
    sizes[valid] = np.fromiter(map(len, there.to_pylist()), np.int64, len(there))
    return joined, sizes, valid

"""Converts the values of one column between the bytes in HBase and Arrow, and reports values of a wrong width.

text     UTF-8                        int64, int32, float64, float32   big-endian, as written by HBase's Bytes class
number   a number written as text     list<int64>, list<int32>, ...    the values concatenated
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError, DataError
from nonet.suggest import suggest_sentence

# The NumPy type of the bytes and the Arrow type of each kind of numbers.
_FIXED = {
    "int64": (">i8", pa.int64()),
    "int32": (">i4", pa.int32()),
    "float64": (">f8", pa.float64()),
    "float32": (">f4", pa.float32()),
}
KINDS = ("text", "number", *_FIXED, *(f"list<{name}>" for name in _FIXED))


@dataclass(frozen=True)
class CellCodec:
    """Converter of one column's values.

    Attributes:
        name: Name of the column in messages.
        kind: Form of the bytes, one of `KINDS`.
    """

    name: str
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"column {self.name!r}: there is no type {self.kind!r}; there are {', '.join(KINDS)}."
                f"{suggest_sentence(self.kind, KINDS)}"
            )

    @property
    def type(self) -> pa.DataType:
        """The Arrow type of the column."""
        if self.kind == "text":
            return pa.string()
        if self.kind == "number":
            return pa.float64()
        if self.kind in _FIXED:
            return _FIXED[self.kind][1]
        return pa.list_(_FIXED[self._number_kind][1])

    @property
    def _number_kind(self) -> str:
        """The key in `_FIXED` of a kind of numbers or of lists of numbers."""
        return self.kind.removeprefix("list<").removesuffix(">")

    def decode(self, values: Sequence[bytes | None], keys: Sequence[bytes], label: str) -> pa.Array:
        """Decode values to an Arrow array.

        Args:
            values: The bytes of each value [R]; None becomes null.
            keys: The row key of each value [R], for error messages.
            label: Prefix of error messages.

        Raises:
            DataError: If a value is not valid; the message names the first invalid one by its row key.
        """
        present = [value for value in values if value is not None]
        try:
            decoded = self._decode_present(present)
        except (ValueError, pa.ArrowException):
            decoded = None
        if decoded is None:  # Find the first invalid value for the message.
            key, value = next(
                (row_key, cell)
                for row_key, cell in zip(keys, values, strict=True)
                if cell is not None and not self._can_decode(cell)
            )
            shown = value[:16] if len(value) > 16 else value
            raise DataError(
                f"{label}: row {key.decode(errors='replace')!r} has {len(value)} bytes in column {self.name!r} ({shown!r}), "
                f"which are no {self.kind}"
            )
        if len(present) == len(values):
            return decoded
        present_index = np.cumsum([value is not None for value in values]) - 1
        return decoded.take(pa.array(present_index, mask=np.array([value is None for value in values])))

    def encode(self, column: pa.Array) -> list[bytes | None]:
        """Encode each value as bytes; None for null."""
        values = column.to_pylist()
        if self.kind == "text":
            return [None if value is None else value.encode() for value in values]
        if self.kind == "number":
            return [None if value is None else repr(value).encode() for value in values]
        dtype = _FIXED[self._number_kind][0]
        return [None if value is None else np.array(value, dtype).tobytes() for value in values]

    def _decode_present(self, values: list[bytes]) -> pa.Array | None:
        """Decode values that are not missing. Returns None if one has a wrong width."""
        if self.kind == "text":
            return pa.array(values, pa.binary()).cast(pa.string())
        if self.kind == "number":
            return pa.array([float(value) for value in values], pa.float64())
        dtype, kind = _FIXED[self._number_kind]
        # The width of a number and the size of each value, in bytes.
        width, sizes = np.dtype(dtype).itemsize, np.fromiter(map(len, values), np.int64, len(values))
        is_single = self.kind in _FIXED
        if (sizes != width).any() if is_single else (sizes % width).any():
            return None
        numbers = pa.array(np.frombuffer(b"".join(values), dtype).astype(dtype.replace(">", "<")), kind)
        if is_single:
            return numbers
        return pa.ListArray.from_arrays(
            pa.array(np.append(0, np.cumsum(sizes // width)).astype(np.int32)), numbers
        )

    def _can_decode(self, value: bytes) -> bool:
        """Return whether the bytes are a valid value."""
        try:
            return self._decode_present([value]) is not None
        except (ValueError, pa.ArrowException):
            return False

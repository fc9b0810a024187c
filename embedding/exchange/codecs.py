"""The formats of rows and gradients in transit: fp32, fp16, bf16, or int8 with one scale per row.

Encoded rows are uint8 [M, B], so that one all-to-all serves every codec. fp32 is exact. int8 rounds to the nearest
of 255 levels of the row's largest magnitude, so its error is at most 1/254 of it; rows that are not finite raise
DataError instead of being silently wrong.
"""

# Shapes: M rows, D width, B bytes per row.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.errors import ConfigError, DataError

_SCALE_BYTES = 4
# Smaller float32 numbers have fewer digits. Rows that would need a smaller scale are decoded with an error of up to half of it.
_MIN_SCALE = 1e-37


@dataclass(frozen=True, slots=True)
class Codec:
    """A format of rows in transit.

    Attributes:
        name: The codec's name.
        row_bytes: Computes B, the bytes of an encoded row, from D.
        encode: Converts float32 [M, D] to uint8 [M, B].
        decode: Converts uint8 [M, B] and D to float32 [M, D].
    """

    name: str
    row_bytes: Callable[[int], int]
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int], Tensor]


def get_codec(name: str) -> Codec:
    """Return the codec of this name.

    Raises:
        ConfigError: If there is none of this name; the message lists the names.
    """
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"there is no wire codec {name!r}; choose one of: {', '.join(_CODECS)}") from None


def _view_bytes(rows: Tensor) -> Tensor:
    """Return the bytes of each row, uint8 [M, B]: a view if the rows are contiguous."""
    if not len(rows):  # Empty tensors can have strides that cannot be viewed as bytes.
        return torch.empty(0, rows.shape[1] * rows.element_size(), dtype=torch.uint8)
    return rows.contiguous().view(torch.uint8)


def _make_half_codec(name: str, dtype: torch.dtype) -> Codec:
    """Build the codec of a half-precision dtype, which clamps values to the dtype's range."""
    largest = torch.finfo(dtype).max

    def encode(rows: Tensor) -> Tensor:
        return _view_bytes(rows.clamp(-largest, largest).to(dtype))

    def decode(data: Tensor, dim: int) -> Tensor:
        return data.view(dtype).to(torch.float32)

    return Codec(name, lambda dim: 2 * dim, encode, decode)


def _encode_int8(rows: Tensor) -> Tensor:
    """Encode rows as int8 levels followed by their float32 scales."""
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp_min(_MIN_SCALE)  # NaN stays NaN.
    if not bool(torch.isfinite(scale).all()):
        bad_rows = torch.nonzero(~torch.isfinite(scale[:, 0]))[:3, 0].tolist()
        raise DataError(f"rows {bad_rows} of {len(rows)} are not finite and cannot be sent as int8; use fp32")
    levels = torch.round(rows / scale).to(torch.int8)
    return torch.cat([levels.view(torch.uint8), _view_bytes(scale)], dim=1)


def _decode_int8(data: Tensor, dim: int) -> Tensor:
    """Decode rows of `_encode_int8` to float32 [M, D]."""
    scale = torch.empty(len(data), 1)
    scale.view(torch.uint8).copy_(data[:, dim:])
    return data[:, :dim].view(torch.int8).to(torch.float32) * scale


_CODECS = {
    "fp32": Codec("fp32", lambda dim: 4 * dim, _view_bytes, lambda data, dim: data.view(torch.float32)),
    "fp16": _make_half_codec("fp16", torch.float16),
    "bf16": _make_half_codec("bf16", torch.bfloat16),
    "int8": Codec("int8", lambda dim: dim + _SCALE_BYTES, _encode_int8, _decode_int8),
}

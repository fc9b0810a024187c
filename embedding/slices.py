"""The assignment of keys to shards.

A key's slice is `splitmix64(key) >> 48`, one of 65,536. A `SliceMap` assigns a shard to every slice and has a
version. A change of the number of shards changes only this map, never the hash of a key. The slices
follow RecIS; SplitMix64 is by Steele, Lea and Flood, OOPSLA 2014.
"""

# Shapes: N keys.

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from nonet.errors import ConfigError

SLICES = 1 << 16
# The constants of SplitMix64: its increment and the factors of its two rounds.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Compute the next output of SplitMix64 from each state [N], as uint64 [N]; it is a bijection."""
    mixed = np.atleast_1d(np.asarray(values)).astype(np.uint64, copy=False) + _INCREMENT
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST_FACTOR
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND_FACTOR
    return mixed ^ (mixed >> np.uint64(31))


def compute_slices(keys: np.ndarray) -> np.ndarray:
    """Compute the slice of each int64 key [N], in 0..65,535, as int64 [N]."""
    return (splitmix64(keys) >> np.uint64(48)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SliceMove:
    """A move of the slices [start, stop) from one shard to another."""

    start: int
    stop: int
    source: int
    target: int


class SliceMap:
    """An immutable assignment of 65,536 slices to shards.

    Args:
        shards: The number of shards.
        owners: The shard of each slice [65536]; by default each shard gets one contiguous block, of equal size up to one slice.
        version: The version of the map.
    """

    __slots__ = ("_is_even", "owners", "shards", "version")

    def __init__(self, shards: int, owners: np.ndarray | None = None, version: int = 0):
        if not 1 <= shards <= SLICES:
            raise ConfigError(
                f"a table can have 1 to {SLICES} shards, got {shards}; reduce the number of embedding workers"
            )
        self.owners = _assign_evenly(shards) if owners is None else np.array(owners).astype(np.uint16)
        self.shards, self.version, self._is_even = shards, version, owners is None
        if self.owners.shape != (SLICES,) or int(self.owners.max()) >= shards:
            raise ConfigError(
                f"a slice map of {shards} shards needs {SLICES} owners below {shards}, "
                f"got {list(self.owners.shape)} up to {int(self.owners.max())}"
            )
        self.owners.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SliceMap)
            and (self.shards, self.version) == (other.shards, other.version)
            and np.array_equal(self.owners, other.owners)
        )

    __hash__ = None  # type: ignore[assignment]

    def get_slices(self, shard: int) -> range:
        """Return the slices of a shard that owns at most one contiguous block of slices.

        Raises:
            ConfigError: If the shard owns several blocks.
        """
        if self._is_even:
            return range(SLICES * shard // self.shards, SLICES * (shard + 1) // self.shards)
        ranges = self.get_ranges(shard)
        if len(ranges) > 1:
            raise ConfigError(f"shard {shard} owns {len(ranges)} blocks of slices; call get_ranges() instead")
        return ranges[0] if ranges else range(0)

    def get_ranges(self, shard: int) -> list[range]:
        """Return the blocks of slices that a shard owns, in order."""
        return find_runs(self.owners == shard)

    def find_owners(self, keys: np.ndarray) -> np.ndarray:
        """Return the shard of each int64 key [N], as int64 [N]."""
        return self.owners[compute_slices(keys)].astype(np.int64)

    def plan_moves(self, target: SliceMap, max_slices: int = SLICES) -> list[SliceMove]:
        """List the moves that lead to `target`, in blocks of at most `max_slices` slices."""
        # One number per (owner, target owner) of a slice; a move is a part of a run of equal numbers.
        pairs = self.owners.astype(np.int64) * SLICES + target.owners
        edges = [0, *(np.flatnonzero(np.diff(pairs)) + 1).tolist(), SLICES]
        return [
            SliceMove(
                start, min(start + max_slices, stop), int(self.owners[start]), int(target.owners[start])
            )
            for run_start, stop in itertools.pairwise(edges)
            if self.owners[run_start] != target.owners[run_start]
            for start in range(run_start, stop, max_slices)
        ]

    def apply_moves(self, moves: Iterable[SliceMove]) -> SliceMap:
        """Return the map after these moves, with the next version."""
        owners = self.owners.copy()
        for move in moves:
            owners[move.start : move.stop] = move.target
        return SliceMap(self.shards, owners, self.version + 1)


@cache
def _assign_evenly(shards: int) -> np.ndarray:
    """Compute the owner of each slice for contiguous blocks whose sizes differ by at most one."""
    starts = SLICES * np.arange(1, shards, dtype=np.int64) // shards
    return np.searchsorted(starts, np.arange(SLICES), side="right").astype(np.uint16)


def find_runs(slice_mask: np.ndarray) -> list[range]:
    """Return the ranges of True in a mask [65536]."""
    boundaries = np.flatnonzero(np.diff(slice_mask.astype(np.int8), prepend=0, append=0)).tolist()
    return [range(start, stop) for start, stop in zip(boundaries[::2], boundaries[1::2], strict=True)]


def is_within(keys: np.ndarray, ranges: Sequence[range]) -> np.ndarray:
    """Return which keys [N] have their slice in one of the ranges, as bool [N]."""
    in_ranges = np.zeros(SLICES, dtype=bool)
    for block in ranges:
        in_ranges[block.start : block.stop] = True
    return in_ranges[compute_slices(keys)]

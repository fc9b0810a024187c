"""Which ranks train and which hold rows.

One: a single process does both, without a process group. Fused: every rank does both. Apart: trainers come
first, shards after them. Everything else about a sparse world follows from these two ranges.

Which ranks of a broken sparse world are gone.

When an exchange breaks, every survivor leaves a mark in the rendezvous store and waits a second for the marks of the
others; ranks without one are named. It is an aid to people, never a decision: without a store, or when the store is
gone with its rank, nobody is named.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from nonet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Ranks 0..world-1: trainers and shards are ranges of them, equal when fused and disjoint when apart."""

    rank: int
    trainers: range
    shards: range

    @classmethod
    def single(cls) -> RankLayout:
        """One process that trains and holds every row."""
        return cls(0, range(1), range(1))

    @classmethod
    def fused(cls, rank: int, world: int) -> RankLayout:
        """Every rank trains and holds its share of the rows."""
        return cls(_check_rank(rank, world), range(world), range(world))

    @classmethod
    def separate(cls, rank: int, trainers: int, shards: int) -> RankLayout:
        """Ranks 0..trainers-1 train, the `shards` ranks after them hold the rows."""
        if trainers < 1 or shards < 1:
            raise ConfigError(f"a sparse world needs a trainer and a shard, got {trainers} and {shards}")
        return cls(_check_rank(rank, trainers + shards), range(trainers), range(trainers, trainers + shards))

    @property
    def world(self) -> int:
        """Ranks in all."""
        return max(self.trainers.stop, self.shards.stop)

    @property
    def trains(self) -> bool:
        """Whether this rank pulls and pushes."""
        return self.rank in self.trainers

    @property
    def holds(self) -> bool:
        """Whether this rank owns rows."""
        return self.rank in self.shards

    def __str__(self) -> str:
        roles = [
            f"{name} {self.rank - ranks.start} of {len(ranks)}"
            for name, ranks in self._list_roles()
            if self.rank in ranks
        ]
        return f"rank {self.rank} of {self.world} ({', '.join(roles)})"

    def _list_roles(self) -> list[tuple[str, range]]:
        return [("trainer", self.trainers), ("shard", self.shards)]


def _check_rank(rank: int, world: int) -> int:
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is not in a sparse world of {world}; ranks count from 0")
    return rank


_GRACE_S = 1.0


def find_missing_ranks(rank: int, world: int) -> str:
    """The ranks that left no mark within a second, e.g. "rank 1", or nothing."""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        store = _get_default_store()
        store.set(f"sparse-world-alive/{rank}", "1")
        marks = {other: f"sparse-world-alive/{other}" for other in range(world) if other != rank}
        until = time.monotonic() + _GRACE_S
        while marks and time.monotonic() < until:
            marks = {other: mark for other, mark in marks.items() if not store.check([mark])}
            time.sleep(0.05)
    except (RuntimeError, ValueError):
        return ""
    return ", ".join(f"rank {other}" for other in sorted(marks))

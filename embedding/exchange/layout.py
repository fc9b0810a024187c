"""The layout of a sparse world: which ranks train and which store rows.

A sparse world is the set of processes that train and store the rows of the sparse tables. Its layout is one of three:
single: One process trains and stores rows, without a process group.
fused: Every rank trains and stores rows.
separate: The first ranks train, and the ranks after them store rows.

When an exchange fails, every remaining rank calls `find_missing_ranks`: it sets a mark in the rendezvous store and waits a second
for the marks of the others. The error message names the ranks without a mark; nothing else depends on them. It names none if
there is no store or if the store was lost with its rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from nonet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The roles of all ranks, as seen by one of them.

    Attributes:
        rank: This rank.
        trainers: The ranks that train.
        shards: The ranks that store rows: equal to `trainers` or disjoint from it.
    """

    rank: int
    trainers: range
    shards: range

    @classmethod
    def single(cls) -> RankLayout:
        """Create the layout of one process that trains and stores every row."""
        return cls(0, range(1), range(1))

    @classmethod
    def fused(cls, rank: int, world: int) -> RankLayout:
        """Create a layout in which every rank trains and stores its share of the rows."""
        return cls(_check_rank(rank, world), range(world), range(world))

    @classmethod
    def separate(cls, rank: int, trainers: int, shards: int) -> RankLayout:
        """Create a layout in which ranks 0..trainers-1 train and the `shards` ranks after them store the rows."""
        if trainers < 1 or shards < 1:
            raise ConfigError(f"a sparse world needs a trainer and a shard, got {trainers} and {shards}")
        return cls(_check_rank(rank, trainers + shards), range(trainers), range(trainers, trainers + shards))

    @property
    def world(self) -> int:
        """The number of ranks."""
        return max(self.trainers.stop, self.shards.stop)

    @property
    def trains(self) -> bool:
        """Whether this rank is a trainer, which reads rows and sends gradients."""
        return self.rank in self.trainers

    @property
    def holds(self) -> bool:
        """Whether this rank is a shard, which stores rows."""
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


_MARK_PATIENCE_S = 1.0  # Time that ranks have to set their marks.


def find_missing_ranks(rank: int, world: int) -> str:
    """Set this rank's mark and name the ranks that set none within a second, for example "rank 1"; "" for none."""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        store = _get_default_store()
        store.set(f"sparse-world-alive/{rank}", "1")
        # The marks that have not been seen yet, by rank.
        marks = {other: f"sparse-world-alive/{other}" for other in range(world) if other != rank}
        deadline = time.monotonic() + _MARK_PATIENCE_S
        while marks and time.monotonic() < deadline:
            marks = {other: mark for other, mark in marks.items() if not store.check([mark])}
            time.sleep(0.05)
    except (RuntimeError, ValueError):
        return ""
    return ", ".join(f"rank {other}" for other in sorted(marks))

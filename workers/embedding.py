"""EmbeddingShard: the role that holds sparse rows.

Fused with the trainer, the trainer works on its tables directly (or W fused ranks by all-to-all). Apart, it sits in
`serve` on its work thread while trainers step, and between steps saves, loads and exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nonet.embedding.checkpoint import load, save
from nonet.embedding.layout import Layout
from nonet.embedding.reader import make_update
from nonet.embedding.tally import Tally
from nonet.embedding.world import SparseWorld
from nonet.workers.gang import Gang, Membership, join, leave
from nonet.workers.method import PerRank, Replicate, method
from nonet.workers.setup import RunSetup
from nonet.workers.worker import DistributeWorker


class EmbeddingShard(DistributeWorker):
    """Shards of every sparse table of the run."""

    def __init__(self, run: RunSetup):
        self.specs = run.specs()
        self._seed, self._member = run.seed, Membership(0, 1)
        self.world_: SparseWorld | None = None
        self._tally: Tally | None = None

    @property
    def sparse(self) -> SparseWorld:
        """The shard's part of the sparse world; a world of one until a gang is joined."""
        if self.world_ is None:
            self._hold(SparseWorld(self.specs, seed=self._seed))
        assert self.world_ is not None
        return self.world_

    def enter(self, layout: Layout, member: Membership) -> None:
        """Take this place in a sparse world; a fused trainer calls it with its own membership."""
        self._hold(SparseWorld(self.specs, seed=self._seed, layout=layout, group=member.everyone))

    @method(ttl_steps=Replicate)
    def settle(self, ttl_steps: Mapping[str, int]) -> None:
        """Times to live by table, known once the data is; before a gang is joined."""
        for name, steps in ttl_steps.items():
            self.specs[name] = replace(self.specs[name], ttl_steps=steps)

    @method(gang=PerRank)
    def meet(self, gang: Gang) -> None:
        """Join a gang as a shard apart from the trainers."""
        self._member = join(gang, gang.trainers + self.rank)
        self.enter(Layout.apart(gang.trainers + self.rank, gang.trainers, gang.shards), self._member)

    @method()
    def serve(self) -> int:
        """Take part in the trainers' exchanges until they stop; how many there were."""
        return self.sparse.serve()

    @method()
    def rows(self) -> dict[str, int]:
        """How many rows of each table this shard holds."""
        return {name: len(table) for name, table in self.sparse.tables.items()}

    @method()
    def counts(self) -> dict[str, dict[str, int]]:
        """What each table did since the last time asked; see Tally."""
        self._tally = self._tally or Tally(self.sparse.tables)
        return self._tally.take()

    @method()
    def save(self, folder: str) -> dict[str, int]:
        """Write the owned rows of each table under folder/sparse/; how many there are."""
        save(self.sparse, Path(folder)).wait()
        return self.rows()

    @method()
    def load(self, folder: str) -> None:
        """Read the owned slices out of every shard's file, whatever the number of shards that wrote them."""
        load(self.sparse, Path(folder))
        self._tally = Tally(self.sparse.tables)

    @method(collect="concat")
    def export(self, version: int) -> list[dict[str, Any]]:
        """A full update for replicas, at this version: Arrow tables by name; one a shard."""
        return [make_update(self.sparse.tables, version)]

    def _hold(self, world: SparseWorld) -> None:
        self.world_, self._tally = world, Tally(world.tables)

    def teardown(self) -> None:
        leave(self._member)

"""EmbeddingShard: the role that holds sparse rows.

Fused with the trainer, the trainer works on its tables directly (or W fused ranks by all-to-all). Apart, it sits in
`serve` on its work thread while trainers step, and between steps saves, loads and exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nonet.background import Written
from nonet.embedding import SliceMap
from nonet.embedding.exchange import RankLayout
from nonet.embedding.reading import RowResponse, VersionPublisher, make_update
from nonet.embedding.storage import load, save
from nonet.embedding.tables import BaseTable, TableSpec, make_table
from nonet.embedding.tiers import TieredTable, TierSettings
from nonet.embedding.training import ShardedTables, TableCounters
from nonet.errors import ConfigError, StaleVersion
from nonet.workers.devices import HOST, claim
from nonet.workers.roles.settings import RunSetup
from nonet.workers.runtime import (
    DistributeWorker,
    Membership,
    PerRank,
    Rendezvous,
    Replicate,
    count_bytes,
    join_process_group,
    leave_process_group,
    method,
)


class EmbeddingShard(DistributeWorker):
    """Shards of every sparse table of the run."""

    def __init__(self, run: RunSetup):
        self.specs, self._tiers, self._deadlines = run.specs(), run.tiers, run.deadlines
        self._seed, self._wire, self._member = run.seed, run.wire, Membership(0, 1)
        self._tables: ShardedTables | None = None
        self._counters: TableCounters | None = None
        self._publisher: VersionPublisher | None = None
        self._steps: dict[int, int] = {}  # the version that replicas hold -> the last step in it
        self._sent = {kind: {"updates": 0, "bytes": 0} for kind in ("full", "delta")}

    def setup(self) -> None:
        for name, options in self._tiers.items():
            try:
                TierSettings.from_settings(self.specs[name], options).check(self.specs[name])
            except ConfigError as error:
                raise ConfigError(f"sparse.tables.{name}.tiers: {error}") from None

    @property
    def sparse(self) -> ShardedTables:
        """The shard's part of the sharded tables; of one process until it joins a process group."""
        if self._tables is None:
            self._hold(ShardedTables(self.specs, seed=self._seed, make=self._made))
        assert self._tables is not None
        return self._tables

    def enter(self, layout: RankLayout, member: Membership) -> None:
        """Take this place in a sparse world; a fused trainer calls it with its own membership."""
        group = member.world_group
        world = ShardedTables(
            self.specs,
            seed=self._seed,
            layout=layout,
            group=group,
            wire=self._wire,
            make=self._made,
            local=True,
        )
        self._hold(world)

    @method(ttl_steps=Replicate)
    def set_ttl_steps(self, ttl_steps: Mapping[str, int]) -> None:
        """Times to live by table, known once the data is; before a process group is joined."""
        for name, steps in ttl_steps.items():
            self.specs[name] = replace(self.specs[name], ttl_steps=steps)

    @method(rendezvous=PerRank)
    def join_process_group(self, rendezvous: Rendezvous) -> None:
        """Join the process group as a shard apart from the trainers."""
        self._member = join_process_group(rendezvous, rendezvous.trainers + self.rank)
        self.enter(
            RankLayout.separate(rendezvous.trainers + self.rank, rendezvous.trainers, rendezvous.shards),
            self._member,
        )

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
        """What each table did since the last time asked; see TableCounters."""
        self._counters = self._counters or TableCounters(self.sparse.tables)
        return self._counters.take()

    @method()
    def save(self, folder: str, wait: bool = True) -> Written | None:
        """Write the owned rows of each table, as they are at this call, under folder/sparse/; the answer of `saved`."""
        self._saving = save(self.sparse, Path(folder))
        self._forget_deletes()
        return self.saved(wait)

    @method(while_offloaded=True)
    def saved(self, wait: bool = False) -> Written | None:
        """What the last save wrote; None while it is being written and nobody waits. Raises what stopped it."""
        return self._saving.poll_result(wait, self._deadlines.save)

    @method()
    def load(self, folder: str) -> None:
        """Read the owned slices out of every shard's file, whatever the number of shards that wrote them."""
        world = self.sparse
        self._end_publishing()
        load(world, Path(folder))
        self._hold(world)

    @method()
    def replica_bytes(self) -> int:
        """Bytes of the keys and rows that a replica of this shard's tables holds."""
        return sum(len(table) * (8 + 4 * table.dim) for table in self.sparse.tables.values())

    @method(collect="concat")
    def export(self, version: int, have: int | None = None) -> list[dict[str, Any]]:
        """An update for replicas to this version, one a shard: from version `have` what was touched since, else everything."""
        self._end_publishing()  # copies are read from now on
        tables = self.sparse.tables
        since = self._steps.get(have) if have is not None else None
        base = None if since is None else have
        update = make_update(tables, version, base=base, since=since)
        self._steps = {version: min((table.step for table in tables.values()), default=0)}
        sent = self._sent["full" if base is None else "delta"]
        sent["updates"] += self.rank == 0
        sent["bytes"] += count_bytes(update)
        return [update]

    @method()
    def sent(self) -> dict[str, dict[str, int]]:
        """Updates for replicas and their bytes, full ones and deltas; rank 0 counts the updates."""
        return {kind: dict(counts) for kind, counts in self._sent.items()}

    @method()
    def publish(self, version: int) -> None:
        """Keep the rows as they are now readable by key as `version`, whatever is trained from now on."""
        if self._publisher is None:
            self._publisher = VersionPublisher(self.sparse)
        self._publisher.publish(version)

    @method()
    def unpublish(self) -> None:
        """Let go of what was published: it costs memory for every row that is trained, and nobody reads until the next."""
        self._end_publishing()

    @method(collect="first")
    def slice_map(self) -> SliceMap:
        """Which shard holds which slices."""
        return self.sparse.slices

    def read(self, table: str, keys: np.ndarray, version: int, wire: str) -> RowResponse:
        """Rows of keys [N] at a published version; readers call it at any time, on a thread of its own."""
        publisher = self._publisher  # which may end meanwhile
        if publisher is None:
            raise StaleVersion(
                f"embedding-{self.rank} has nothing published: publish a version before readers ask"
            )
        return publisher.read_rows(table, keys, version, wire)

    def _forget_deletes(self) -> None:
        """A commit is whole, so keys that went are told to replicas alone: what went before their version is forgotten."""
        oldest = min(self._steps.values(), default=None)
        for table in self.sparse.tables.values():
            table.deleted.forget(table.step if oldest is None else min(oldest, table.step))

    def _made(self, name: str, spec: TableSpec, seed: int) -> BaseTable:
        """A table, in the tiers that the scenario gives it."""
        if name not in self._tiers:
            return make_table(name, spec, seed)
        options = self._tiers[name]
        wants_device = options.get("device_rows") or options.get("device_bytes")
        tiers = TierSettings.from_settings(spec, options, claim(self.device) if wants_device else HOST)
        return TieredTable.from_host(make_table(name, spec, seed), tiers)

    def _hold(self, world: ShardedTables) -> None:
        self._end_publishing()
        self._tables, self._counters, self._steps = world, TableCounters(world.tables), {}

    def _end_publishing(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None

    def teardown(self) -> None:
        leave_process_group(self._member)

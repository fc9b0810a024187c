"""EmbeddingShard: the role that holds the rows of the sparse tables.

If it is fused with the trainer, the trainer reads its tables directly, or exchanges rows with other fused ranks by all-to-all. If
it has a process of its own, it runs `serve` while trainers step, and saves, loads and exports between steps.
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
    method,
)
from nonet.workers.runtime.rendezvous import join_process_group, leave_process_group


class EmbeddingShard(DistributeWorker):
    """One shard of every sparse table of the run."""

    def __init__(self, run: RunSetup):
        self.specs, self._tiers, self._deadlines = run.make_table_specs(), run.tiers, run.deadlines
        self._seed, self._wire, self._member = run.seed, run.wire, Membership(0, 1)
        self._tables: ShardedTables | None = None
        self._counters: TableCounters | None = None
        self._publisher: VersionPublisher | None = None
        self._step_by_version: dict[int, int] = {}  # Last step of the version that replicas hold.
        self._update_counts = {kind: {"updates": 0, "bytes": 0} for kind in ("full", "delta")}

    def setup(self) -> None:
        """Check the tier settings of the tables.

        Raises:
            ConfigError: A table's `tiers` are not valid.
        """
        for name, options in self._tiers.items():
            try:
                TierSettings.from_settings(self.specs[name], options).check(self.specs[name])
            except ConfigError as error:
                raise ConfigError(f"sparse.tables.{name}.tiers: {error}") from None

    @property
    def sparse(self) -> ShardedTables:
        """This shard's part of the sharded tables; before it joins a process group, the part is all rows."""
        if self._tables is None:
            self._set_tables(ShardedTables(self.specs, seed=self._seed, make=self._make_table))
        assert self._tables is not None
        return self._tables

    def set_layout(self, layout: RankLayout, member: Membership) -> None:
        """Create the tables for a rank layout. A fused trainer calls this with its own membership."""
        tables = ShardedTables(
            self.specs,
            seed=self._seed,
            layout=layout,
            group=member.world_group,
            wire=self._wire,
            make=self._make_table,
            local=True,
        )
        self._set_tables(tables)

    @method(ttl_steps=Replicate)
    def set_ttl_steps(self, ttl_steps: Mapping[str, int]) -> None:
        """Set the times to live of tables in steps; called before the shard joins a process group."""
        for name, steps in ttl_steps.items():
            self.specs[name] = replace(self.specs[name], ttl_steps=steps)

    @method(rendezvous=PerRank)
    def join_process_group(self, rendezvous: Rendezvous) -> None:
        """Join the process group as a shard in a process of its own."""
        global_rank = rendezvous.trainers + self.rank  # Shards are the last ranks.
        self._member = join_process_group(rendezvous, global_rank)
        layout = RankLayout.separate(global_rank, rendezvous.trainers, rendezvous.shards)
        self.set_layout(layout, self._member)

    @method()
    def serve(self) -> int:
        """Take part in the trainers' exchanges until they stop, and return the number of exchanges."""
        return self.sparse.serve()

    @method()
    def count_rows(self) -> dict[str, int]:
        """Return the number of rows of each table that this shard holds."""
        return {name: len(table) for name, table in self.sparse.tables.items()}

    @method()
    def pop_counts(self) -> dict[str, dict[str, int]]:
        """Return the counters of each table since the last call (`TableCounters`)."""
        self._counters = self._counters or TableCounters(self.sparse.tables)
        return self._counters.take()

    @method()
    def save(self, folder: str, wait: bool = True) -> Written | None:
        """Write a snapshot of the rows of this shard to folder/sparse/.

        Args:
            folder: Folder of the checkpoint.
            wait: Whether to wait until the files are written.

        Returns:
            The result of `poll_save`.
        """
        self._saving = save(self.sparse, Path(folder))
        self._forget_deletes()
        return self.poll_save(wait)

    @method(while_offloaded=True)
    def poll_save(self, wait: bool = False) -> Written | None:
        """Return the files that the last save wrote; None if it is still running and `wait` is false.

        Raises the error of a save that failed.
        """
        return self._saving.poll_result(wait, self._deadlines.save)

    @method()
    def load(self, folder: str) -> None:
        """Load the rows of this shard from a checkpoint, which may have been written by any number of shards."""
        tables = self.sparse
        self._end_publishing()
        load(tables, Path(folder))
        self._set_tables(tables)

    @method()
    def count_replica_bytes(self) -> int:
        """Return the bytes of keys and rows that a replica of this shard's tables holds."""
        # A row has an int64 key and `dim` fp32 values.
        return sum(len(table) * (8 + 4 * table.dim) for table in self.sparse.tables.values())

    @method(collect="concat")
    def export(self, version: int, have: int | None = None) -> list[dict[str, Any]]:
        """Return an update for replicas: the rows that changed since version `have` if its step is known, else all rows.

        Args:
            version: Version of the rows.
            have: Version that the replicas hold; None for a full update.

        Returns:
            One update per shard.
        """
        self._end_publishing()  # Replicas do not read by key.
        tables = self.sparse.tables
        since = self._step_by_version.get(have) if have is not None else None
        base = None if since is None else have
        update = make_update(tables, version, base=base, since=since)
        self._step_by_version = {version: min((table.step for table in tables.values()), default=0)}
        counts = self._update_counts["full" if base is None else "delta"]
        counts["updates"] += self.rank == 0  # Every rank sends a part of the same update.
        counts["bytes"] += count_bytes(update)
        return [update]

    @method()
    def get_update_counts(self) -> dict[str, dict[str, int]]:
        """Return {"full" or "delta": {"updates", "bytes"}} of the updates for replicas. Only rank 0 counts updates."""
        return {kind: dict(counts) for kind, counts in self._update_counts.items()}

    @method()
    def publish(self, version: int) -> None:
        """Make the current rows readable by key as `version`, also while training changes the tables."""
        if self._publisher is None:
            self._publisher = VersionPublisher(self.sparse)
        self._publisher.publish(version)

    @method()
    def unpublish(self) -> None:
        """Release the published version, which holds a copy of every row that has been trained since."""
        self._end_publishing()

    @method(collect="first")
    def slice_map(self) -> SliceMap:
        """Return the map from slices to shards."""
        return self.sparse.slices

    def read(self, table: str, keys: np.ndarray, version: int, wire: str) -> RowResponse:
        """Return the rows of keys at a published version. Readers may call this at any time; it runs on a thread of its own.

        Args:
            table: Name of the table.
            keys: Keys [N] int64.
            version: The published version.
            wire: Codec in which the rows are returned.

        Raises:
            StaleVersion: No version or another version is published.
        """
        publisher = self._publisher  # Another thread may set it to None.
        if publisher is None:
            raise StaleVersion(
                f"embedding-{self.rank} has no published version; publish one before rows are read"
            )
        return publisher.read_rows(table, keys, version, wire)

    def _forget_deletes(self) -> None:
        """Discard records of deleted keys that are older than the version of the replicas.

        Checkpoints are complete and do not need these records; only updates for replicas do.
        """
        oldest_step = min(self._step_by_version.values(), default=None)
        for table in self.sparse.tables.values():
            table.deleted.forget(table.step if oldest_step is None else min(oldest_step, table.step))

    def _make_table(self, name: str, spec: TableSpec, seed: int) -> BaseTable:
        """Create a table, in tiers if the scenario has settings for them."""
        if name not in self._tiers:
            return make_table(name, spec, seed)
        options = self._tiers[name]
        has_device_tier = options.get("device_rows") or options.get("device_bytes")
        tiers = TierSettings.from_settings(spec, options, claim(self.device) if has_device_tier else HOST)
        return TieredTable.from_host(make_table(name, spec, seed), tiers)

    def _set_tables(self, tables: ShardedTables) -> None:
        """Replace the sharded tables, and reset counters and published versions."""
        self._end_publishing()
        self._tables, self._counters, self._step_by_version = tables, TableCounters(tables.tables), {}

    def _end_publishing(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None

    def teardown(self) -> None:
        """Leave the process group."""
        leave_process_group(self._member)

"""A sparse table over three tiers: hot rows on a device, the host table, and a cold tier on disk.

The current copy of a row is the one on the device if there is one, else the host's, else the disk's. The host
reserves a place for each row on the device, so that a changed row can always be written back. Optimizer steps on
the device equal the core's bit for bit (`device_optimizer`), so that a tiered table equals the host table alone,
whatever the tiers contain. Exports yield the rows of memory and disk in one order (`tier_merge.py`).
"""

# Shapes: N keys, R rows, D width.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.tables import (
    ALL_SLICES,
    BaseTable,
    NumPyTable,
    RowColumns,
    take,
    to_int64_keys,
)
from nonet.embedding.tiers.clock import ClockEvictor
from nonet.embedding.tiers.device_cache import DeviceCache
from nonet.embedding.tiers.disk_tier import DiskTier
from nonet.embedding.tiers.hot_rows import HotRows
from nonet.embedding.tiers.tier_merge import merge_tiers
from nonet.embedding.tiers.tiers import TierSettings, TierTraffic


class TieredTable(BaseTable):
    """A sparse table over the tiers `host`, `hot` (a device) and `cold` (disk); the last two are optional.

    Lookups return rows on the device if there is one. `prefetch` and `announce_batch` announce coming batches.

    Args:
        host: The table in host memory.
        hot: The rows on a device.
        cold: The rows on disk.
        host_rows: The number of rows above which the host table's oldest rows are moved to disk.

    Attributes:
        traffic: The rows that were moved between host and device.
        promoted: The number of rows that were moved from disk to memory.
        demoted: The number of rows that were moved from memory to disk.
    """

    def __init__(
        self, host: BaseTable, hot: HotRows | None = None, cold: DiskTier | None = None, host_rows: int = 0
    ):
        spec = host.spec
        spec_fields = {name: getattr(spec, name) for name in spec.__slots__ if name != "dim"}
        super().__init__(host.name, host.dim, seed=host.seed, **spec_fields)
        self.host, self.hot, self.cold, self.host_rows = host, hot, cold, host_rows
        self.deleted = host.deleted
        self.step = host.step
        self.traffic, self.promoted, self.demoted = TierTraffic(), 0, 0
        self._evictor = ClockEvictor()

    @classmethod
    def from_host(cls, host: BaseTable, tiers: TierSettings) -> TieredTable:
        """Create a table that stores its rows in `host` and in these tiers."""
        tiers.check(host.spec)
        row_count = tiers.count_device_rows(host.spec)
        hot = (
            DeviceCache(host.spec, row_count, device=tiers.device, policy=tiers.policy, seed=host.seed)
            if row_count
            else None
        )
        cold = DiskTier(Path(tiers.folder), host.spec) if tiers.folder else None
        return cls(host, hot, cold, tiers.host_rows)

    def __len__(self) -> int:
        return len(self.host) + (len(self.cold) if self.cold else 0)

    @property
    def keys(self) -> np.ndarray:
        """The keys of all rows [R], in unspecified order."""
        return np.concatenate([self.host.keys, *(self.cold.iterate_keys() if self.cold else ())])

    @property
    def absent(self) -> int:
        """The number of positions in read-only lookups whose key had no row in any tier."""
        return self.host.absent

    @property
    def refused(self) -> int:
        """The number of positions in training lookups whose key was not admitted."""
        return self.host.refused  # type: ignore[attr-defined]

    @property
    def dropped(self) -> int:
        """The number of gradient positions whose key had no row."""
        return self.host.dropped  # type: ignore[attr-defined]

    def clear(self) -> None:
        """Delete every row and reset the step to 0."""
        self.host.clear()
        for tier in (self.hot, self.cold):
            if tier is not None:
                tier.clear()
        self.step = 0

    def lookup(self, keys: Tensor | np.ndarray, *, train: bool, step: int | None = None) -> Tensor:
        """Read the rows of keys. With `train`, rows are created for absent keys that the admission policy admits.

        Other absent keys read the default row.

        Args:
            keys: Keys as int64 [N]; duplicates are allowed.
            train: Whether to create rows.
            step: The step that trains these rows; by default the table's step plus 1.

        Returns:
            A copy of the rows, float32 [N, D], on the device if there is one.
        """
        key_array = to_int64_keys(keys)
        step = self.step + 1 if step is None else step
        hot = self.hot
        rows = (
            self._read_from_device(hot, key_array, train, step)
            if hot is not None
            else self._read_from_memory(key_array, train, step)
        )
        if train:
            self._demote(key_array)
        return rows

    def apply(self, keys: Tensor | np.ndarray, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Sum the gradients of equal keys in position order, then apply one optimizer step to each row.

        Args:
            keys: Keys as int64 [N].
            grads: Gradients [N, D].
            step: The step; it must not be lower than in an earlier call.
            lr: The learning rate; None for that of the spec.
        """
        key_array = to_int64_keys(keys)
        self._check_grads(key_array, grads)
        self.host.step = self.step
        if self.hot is None:
            self._promote(key_array)
            self.host.apply(key_array, grads, step, lr)
        else:
            self._apply_on_device(self.hot, key_array, grads, step, lr)
        self.step, self.evicted = self.host.step, self.host.evicted
        self._demote(key_array)

    def prefetch(self, keys: Tensor | np.ndarray, step: int) -> None:
        """Load the rows of a coming batch to the device and keep them there until `apply` of `step`."""
        if self.hot is not None:
            distinct = np.unique(to_int64_keys(keys))
            self.hot.announce_batch(step, distinct)
            self._load_to_device(self.hot, distinct[~self.hot.contains(distinct)])
            self.hot.pin(step, distinct)

    def announce_batch(self, keys: Tensor | np.ndarray, step: int) -> None:
        """Announce the keys of a batch further ahead, which improves the choice of rows to evict; it loads nothing."""
        if self.hot is not None:
            self.hot.announce_batch(step, np.unique(to_int64_keys(keys)))

    def flush(self) -> None:
        """Write the rows that changed on the device back to the host."""
        if self.hot is not None:
            self._write_back(self.hot.pop_dirty())

    def take(self, keys: np.ndarray) -> RowColumns:
        """Read the rows of keys [N] with state and step, in that order; a key without a row is marked as deleted."""
        if self.hot is not None:
            self._write_back(self.hot.pop_dirty(keys))
        rows = take(self.host, keys)
        if self.cold is None or not rows.deleted.any():
            return rows
        return _fill_missing(rows, self.cold.read(keys[rows.deleted]))

    def _read_from_device(self, hot: HotRows, keys: np.ndarray, train: bool, step: int) -> Tensor:
        """Read rows [N, D]: those that `hot` has from the device, the others from host or disk.

        With `train`, the others are then loaded to the device as far as they fit.
        """
        is_hot = hot.contains(keys)
        hot_rows = hot.lookup(keys[is_hot], train=train)
        if train:
            self.traffic.wanted += len(np.unique(keys[is_hot]))
        if train and self.spec.evicts:
            self.host.lookup(
                keys[is_hot], train=True, step=step
            )  # This updates the host's eviction counters.
        if is_hot.all():
            return hot_rows
        other_rows = self._read_from_memory(keys[~is_hot], train, step).to(hot.device)
        rows = torch.empty(len(keys), self.dim, device=hot.device)
        hot_mask = torch.from_numpy(is_hot).to(hot.device)
        rows[hot_mask], rows[~hot_mask] = hot_rows, other_rows
        if train:
            self._load_to_device(hot, np.unique(keys[~is_hot]), needed=True)
        return rows

    def _read_from_memory(self, keys: np.ndarray, train: bool, step: int) -> Tensor:
        """Read rows of keys that are not on the device, from host or disk; only `train` moves rows from disk."""
        if train:
            self._promote(keys)
        is_cold = self.cold.contains(keys) if self.cold and not train else np.zeros(len(keys), bool)
        host_rows = self.host.lookup(keys[~is_cold], train=train, step=step)
        if not is_cold.any():
            return host_rows
        assert self.cold is not None
        rows = torch.empty(len(keys), self.dim)
        cold_mask = torch.from_numpy(is_cold)
        rows[cold_mask], rows[~cold_mask] = torch.from_numpy(self.cold.read(keys[is_cold]).row), host_rows
        return rows

    def _apply_on_device(
        self, hot: HotRows, keys: np.ndarray, grads: Tensor, step: int, lr: float | None
    ) -> None:
        """Apply gradients to the rows on the device and to the others on the host."""
        is_hot = hot.contains(keys)
        other_keys = keys[~is_hot]
        self._promote(other_keys)
        deleted_before = len(self.deleted)
        hot_mask = torch.from_numpy(is_hot).to(grads.device)
        self.host.apply(other_keys, grads[~hot_mask].cpu(), step, lr)  # First, because it may raise an error.
        hot.apply(keys[is_hot], grads[hot_mask], step, self.spec.lr if lr is None else lr)
        if len(self.deleted) > deleted_before:  # The host has evicted rows, which may also be on the device.
            hot_keys = hot.keys
            hot.drop(hot_keys[~self.host._contains(hot_keys)])
        hot.release(step)

    def _load_to_device(self, hot: HotRows, keys: np.ndarray, needed: bool = False) -> None:
        """Load the rows of these distinct keys to the device, as far as they fit; count them as traffic.

        `needed` says whether the current batch reads them; otherwise they are loaded ahead.
        """
        if len(keys):
            self._promote(keys)
            rows = take(self.host, keys)
            rows = rows.select(~rows.deleted)
            self._write_back(hot.admit(rows))
            loaded_count = int(hot.contains(rows.key).sum())
            self.traffic.loaded += loaded_count
            if needed:
                self.traffic.wanted += len(rows.key)
                self.traffic.bypassed += len(rows.key) - loaded_count

    def _write_back(self, rows: RowColumns) -> None:
        """Write rows that changed on the device to the host."""
        if len(rows.key):
            self.traffic.written += len(rows.key)
            seen, uses = self._get_usage(rows.key) if self.spec.evicts else (None, None)
            self.host._upsert(RowColumns(rows.key, rows.row, rows.state, rows.step, rows.deleted, seen, uses))

    def _get_usage(self, keys: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the host's eviction counters of these keys [N] (`seen` and `uses`), which writing a row must not change."""
        if isinstance(self.host, NumPyTable):
            row_numbers = self.host._index.find(keys)
            return self.host._seen[row_numbers], self.host._uses[row_numbers]
        rows = take(self.host, keys)
        return rows.seen, rows.uses

    def _promote(self, keys: np.ndarray) -> None:
        """Move the rows of these keys that are on disk to the host table."""
        if self.cold is not None and len(self.cold):
            cold_keys = np.unique(keys[self.cold.contains(keys)])
            if len(cold_keys):
                self.host._upsert(self.cold.read(cold_keys))
                self.cold.drop(cold_keys)
                self.promoted += len(cold_keys)

    def _demote(self, needed: np.ndarray) -> None:
        """If the host table has more than `host_rows` rows, move rows to disk until an eighth of these is free.

        Rows on the device and rows of the keys in `needed` stay.
        """
        if self.cold is None or len(self.host) <= self.host_rows:
            return
        for rows in self._evictor.select_oldest(self.host, self.host_rows, needed, self.hot):
            self.cold.put(rows)
            self.host._delete(rows.key)
            self.demoted += len(rows.key)

    def _iterate_rows(self, slices: range = ALL_SLICES, since: int | None = None) -> Iterator[RowColumns]:
        self.flush()
        if self.cold is None or not len(self.cold):
            yield from self.host._iterate_rows(slices, since)
            return
        yield from merge_tiers(self.host, self.cold, slices, since)

    def _contains(self, keys: np.ndarray) -> np.ndarray:
        present = self.host._contains(keys)
        return present if self.cold is None else present | self.cold.contains(keys)

    def _upsert(self, rows: RowColumns) -> None:
        """Insert or overwrite rows in the host tier, drop their copies in the cold tier and update those in the hot tier."""
        if self.cold is not None:
            self.cold.drop(np.unique(rows.key))
        self.host._upsert(rows)
        if self.hot is not None:
            self.hot.overwrite(rows)
        self._demote(rows.key[:0])  # No key is needed in memory.

    def _delete(self, keys: np.ndarray) -> None:
        if self.hot is not None:
            self.hot.drop(keys)
        self.host._delete(keys)
        if self.cold is not None:
            self.cold.drop(np.unique(keys))

    def _list_waiting(self) -> tuple[np.ndarray, np.ndarray]:
        return self.host._list_waiting()

    def _set_waiting(self, keys: np.ndarray, packed: np.ndarray) -> None:
        self.host._set_waiting(keys, packed)


def _fill_missing(rows: RowColumns, cold_rows: RowColumns) -> RowColumns:
    """Return `rows` with those that are marked as deleted replaced by `cold_rows`, in order."""
    is_missing = rows.deleted
    row, state, step = rows.row.copy(), rows.state.copy(), rows.step.copy()
    row[is_missing], state[is_missing], step[is_missing] = cold_rows.row, cold_rows.state, cold_rows.step
    deleted = rows.deleted.copy()
    deleted[is_missing] = cold_rows.deleted
    return RowColumns(rows.key, row, state, step, deleted)


def report(table: TieredTable) -> dict[str, Any]:
    """Return the row counts of the tiers and the traffic between them by metric name; absent tiers have no entries."""
    counts: dict[str, Any] = {
        "host_rows": len(table.host),
        "promoted": table.promoted,
        "demoted": table.demoted,
    }
    if table.hot is not None:
        traffic = table.traffic
        counts |= {
            "device_rows": len(table.hot),
            "hit_rate": traffic.hit_rate,
            "loaded": traffic.loaded,
            "written": traffic.written,
        }
    if table.cold is not None:
        counts |= {"cold_rows": len(table.cold), "cold_bytes": table.cold.nbytes}
    return counts

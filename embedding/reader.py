"""Looking rows up without training: rollout, evaluation and serving read one version of every table.

`LocalReader` reads the live tables of a fused worker. `ReplicaReader` holds its own copy, fed with updates;
an update is written to a shadow that replaces the old rows by one assignment, so a reader never sees half of
it.
"""

# Shapes: N keys asked for, R rows held, D width.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.arrow import RowColumns, columns_of
from nonet.embedding.slices import SLICES
from nonet.embedding.store import SparseTable
from nonet.errors import ConfigError, StaleVersion

if TYPE_CHECKING:
    import pyarrow as pa


class SparseReader(Protocol):
    """Rows by key, at one version."""

    @property
    def version(self) -> int: ...

    def rows(self, table: str, keys: Tensor) -> Tensor:
        """Rows [N, D] of int64 keys [N]; an absent key reads zeros, the default row, and is counted."""
        ...


class LocalReader:
    """Reads the tables of the same process; `version` is the publisher's to move on."""

    def __init__(self, tables: Mapping[str, SparseTable], version: int = 0):
        self._tables, self.version = tables, version

    @property
    def absent(self) -> int:
        """How many keys the tables did not have when they were read, by this reader or another."""
        return sum(table.absent for table in self._tables.values())

    def rows(self, table: str, keys: Tensor) -> Tensor:
        """Rows [N, D] of keys [N]; absent ones read zeros."""
        return _known(self._tables, table).lookup(keys, train=False)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sorted keys [R] and their rows [R, D]."""

    keys: np.ndarray
    rows: np.ndarray

    def changed(self, update: RowColumns) -> _Rows:
        """A copy with an update's upserts and deletes; this one stays as it is."""
        kept = ~np.isin(self.keys, update.key)
        fresh = ~update.deleted
        keys = np.concatenate([self.keys[kept], update.key[fresh]])
        rows = np.concatenate([self.rows[kept], update.row[fresh]])
        order = np.argsort(keys)
        return _Rows(keys[order], rows[order])


class ReplicaReader:
    """Whole copies of the tables (`dims`: name -> width), moved from version to version by `apply`.

    `absent` counts the keys that were not there. Starts empty, at version None: only a full update fits then.
    """

    def __init__(self, dims: Mapping[str, int]):
        self.absent = 0
        self._dims = dict(dims)
        self._live: tuple[int | None, dict[str, _Rows]] = (None, self._empty())

    @property
    def version(self) -> int:
        """The version held, -1 before the first update."""
        have = self._live[0]
        return -1 if have is None else have

    def apply(self, update: Mapping[str, Any]) -> int:
        """Move to the version of an update made by `make_update`; returns it.

        Raises StaleVersion when the update starts from another version than the one held; the rows then stay.
        """
        have, live = self._live
        base = update["base"]
        if base is not None and base != have:
            raise StaleVersion(
                f"this replica has version {have}, the update starts from {base}; send a full update"
            )
        shadow = self._empty() if base is None else dict(live)
        for name, tables in update["tables"].items():
            dim = _known(self._dims, name)
            for table in tables:
                shadow[name] = shadow[name].changed(columns_of(table, name, dim))
        self._live = (update["version"], shadow)
        return update["version"]

    def rows(self, table: str, keys: Tensor) -> Tensor:
        """Rows [N, D] of keys [N]; absent ones read zeros and are counted."""
        held = _known(self._live[1], table)
        wanted = keys.numpy()
        out = np.zeros((len(wanted), self._dims[table]), dtype=np.float32)
        if len(held.keys):
            at = np.minimum(np.searchsorted(held.keys, wanted), len(held.keys) - 1)
            found = held.keys[at] == wanted
            out[found] = held.rows[at[found]]
        else:
            found = np.zeros(len(wanted), dtype=bool)
        self.absent += int((~found).sum())
        return torch.from_numpy(out)

    def _empty(self) -> dict[str, _Rows]:
        return {
            name: _Rows(np.empty(0, dtype=np.int64), np.empty((0, dim), dtype=np.float32))
            for name, dim in self._dims.items()
        }


def make_update(
    tables: Mapping[str, SparseTable],
    version: int,
    *,
    base: int | None = None,
    since: int | None = None,
) -> dict[str, Any]:
    """What a shard sends to replicas: {"version", "base", "tables": {name: [pa.Table (key, row, op)]}}.

    Full when `base` is None; else the rows touched after step `since`, the last step that `base` held.
    Updates of several shards are joined by `join_updates`.
    """
    if (base is None) != (since is None):
        raise ConfigError(
            f"an update from base {base} needs the last step it held, got since={since}; give both"
        )
    every = range(SLICES)
    parts = {name: [_wire(part) for part in table.export(every, since)] for name, table in tables.items()}
    return {"version": version, "base": base, "tables": parts}


def join_updates(updates: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One update out of those of all shards, which must agree on version and base."""
    first, *others = updates
    joined = {name: list(parts) for name, parts in first["tables"].items()}
    for other in others:
        if (other["version"], other["base"]) != (first["version"], first["base"]):
            raise StaleVersion(
                f"shards give updates {first['base']}->{first['version']} and "
                f"{other['base']}->{other['version']}; publish them at the same step"
            )
        for name, parts in other["tables"].items():
            joined.setdefault(name, []).extend(parts)
    return {"version": first["version"], "base": first["base"], "tables": joined}


def _wire(table: pa.Table) -> pa.Table:
    return table.select(["key", "row", "op"])


def _known(tables: Mapping[str, Any], name: str) -> Any:
    if name not in tables:
        raise ConfigError(f"there is no sparse table {name!r}; there are: {', '.join(tables) or 'none'}")
    return tables[name]

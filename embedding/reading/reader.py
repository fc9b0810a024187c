"""Looking rows up without training: rollout, evaluation and serving read one version of every table.

`LocalReader` reads the live tables of a fused worker. `ReplicaReader` holds its own copy, fed with updates;
a reader never sees half of one. 1 % touched rows of 1 M x 16 are 1 % of the bytes: `nonet.bench.embedding.sync`.
"""

# Shapes: N keys asked for, R rows held, D width.

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from torch import Tensor

from nonet.embedding.tables import (
    ALL_SLICES,
    DELETE,
    BaseTable,
    RowColumns,
    SparseTable,
    TableSpec,
    from_arrow_table,
    iterate_changes,
    join_rows,
    make_table,
)
from nonet.errors import ConfigError, StaleVersion

_FLOATS = {"fp32": np.float32, "fp16": np.float16}


class SparseReader(Protocol):
    """Rows by key, at one version."""

    @property
    def version(self) -> int: ...

    def read_rows(self, table: str, keys: Tensor) -> Tensor:
        """Rows [N, D] of int64 keys [N]; an absent key reads the default row and is counted."""
        ...


class LocalReader:
    """Reads the tables of the same process; `version` is the publisher's to move on."""

    def __init__(self, tables: Mapping[str, SparseTable], version: int = 0):
        self._tables, self.version = tables, version

    @property
    def absent(self) -> int:
        """How many keys the tables did not have when they were read, by this reader or another."""
        return sum(table.absent for table in self._tables.values())

    def read_rows(self, table: str, keys: Tensor) -> Tensor:
        """Rows [N, D] of keys [N]; absent ones read the default."""
        return _get_table(self._tables, table).lookup(keys, train=False)


class ReplicaReader:
    """Whole copies of the tables (name -> width or TableSpec), moved from version to version by `apply`.

    A full update fills a shadow that replaces the old rows by one assignment; a delta is checked whole and then written under
    the lock that readers take, a few milliseconds for 10,000 rows. `absent` counts the keys that were not there. Starts
    empty, at version None: only a full update fits then.
    """

    def __init__(self, tables: Mapping[str, int | TableSpec]):
        self._specs = {
            name: TableSpec(
                spec if isinstance(spec, int) else spec.dim,
                "sgd",
                default=0.0 if isinstance(spec, int) else spec.default,
            )
            for name, spec in tables.items()
        }
        self._lock = threading.Lock()
        self._before = 0
        self._version, self._live = None, self._make_empty_tables()

    @property
    def version(self) -> int:
        """The version held, -1 before the first update."""
        return -1 if self._version is None else self._version

    @property
    def absent(self) -> int:
        """How many keys were not there when they were read."""
        return self._before + sum(table.absent for table in self._live.values())

    def apply(self, update: Mapping[str, Any]) -> int:
        """Move to the version of an update made by `make_update`; returns it.

        Raises StaleVersion when the update starts from another version than the one held; the rows then stay.
        """
        have, base = self._version, update["base"]
        if base is not None and base != have:
            raise StaleVersion(
                f"this replica has version {have}, the update starts from {base}; send a full update"
            )
        parts = {name: self._check_update(name, tables) for name, tables in update["tables"].items()}
        live = self._make_empty_tables() if base is None else self._live
        if base is None:
            self._write(live, parts)
        with self._lock:
            if base is None:
                self._before, self._live = self.absent, live
            else:
                self._write(live, parts)
            self._version = update["version"]
        return update["version"]

    def read_rows(self, table: str, keys: Tensor) -> Tensor:
        """Rows [N, D] of keys [N]; absent ones read the default and are counted."""
        with self._lock:
            return _get_table(self._live, table).lookup(keys, train=False)

    def find_rows(self, table: str, keys: np.ndarray, version: int) -> tuple[Tensor, np.ndarray]:
        """Which keys [N] have a row here at this version, none when another is held, and the rows of those."""
        with self._lock:
            live = _get_table(self._live, table)
            there = live._contains(keys) & (self._version == version)
            return live.lookup(keys[there], train=False), there

    def _check_update(self, name: str, tables: Iterable[pa.Table]) -> list[RowColumns]:
        """The update's rows in its order, neighbours of one kind put together."""
        spec = _get_table(self._specs, name)
        parts = [from_arrow_table(table, name, spec.dim) for table in tables]
        groups = itertools.groupby(parts, key=lambda part: bool(part.deleted.any()))
        return [join_rows(list(group), spec) for _, group in groups]

    def _write(self, live: Mapping[str, BaseTable], parts: Mapping[str, list[RowColumns]]) -> None:
        for name, every in parts.items():
            for part in every:
                if part.deleted.any():
                    live[name]._delete(part.key[part.deleted])
                    part = part.select(~part.deleted)
                live[name]._upsert(part)

    def _make_empty_tables(self) -> dict[str, BaseTable]:
        return {name: make_table(name, spec, 0) for name, spec in self._specs.items()}


def make_update(
    tables: Mapping[str, BaseTable],
    version: int,
    *,
    base: int | None = None,
    since: int | None = None,
    wire: str = "fp32",
) -> dict[str, Any]:
    """What a shard sends to replicas: {"version", "base", "tables": {name: [pa.Table (key, row, op)]}}.

    Full when `base` is None; else the rows touched or gone after step `since`, the last step that `base` held. `wire`: fp32, or
    fp16 for half the bytes. Updates of several shards are joined by `join_updates`.
    """
    if (base is None) != (since is None):
        raise ConfigError(
            f"an update from base {base} needs the last step it held, got since={since}; give both"
        )
    parts = {
        name: join_rows(list(iterate_changes(table, ALL_SLICES, since)), table.spec)
        for name, table in tables.items()
    }
    return {
        "version": version,
        "base": base,
        "tables": {name: list(to_wire_tables(part, wire)) for name, part in parts.items()},
    }


def to_wire_tables(part: RowColumns, wire: str = "fp32") -> Iterator[pa.Table]:
    """Rows and deletes as tables of key, row and, for deletes, op; keys that only wait for a row stay behind."""
    if wire not in _FLOATS:
        raise ConfigError(f"updates travel as {' or '.join(_FLOATS)}, not {wire!r}")
    waiting = part.waiting if part.waiting is not None else np.zeros(len(part.key), dtype=bool)
    for deleted in (True, False):
        some = part.select((part.deleted == deleted) & ~waiting)
        if len(some.key):
            dim = some.row.shape[1]
            flat = pa.array(some.row.reshape(-1).astype(_FLOATS[wire], copy=False))
            table = {"key": some.key, "row": pa.FixedSizeListArray.from_arrays(flat, dim)}
            yield pa.table(table | ({"op": [DELETE] * len(some.key)} if deleted else {}))


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


def _get_table(tables: Mapping[str, Any], name: str) -> Any:
    if name not in tables:
        raise ConfigError(f"there is no sparse table {name!r}; there are: {', '.join(tables) or 'none'}")
    return tables[name]

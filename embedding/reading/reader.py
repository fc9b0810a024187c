"""Readers of rows for rollout, evaluation and serving: one version of every table, without training.

`LocalReader` reads the live tables of a fused worker. `ReplicaReader` has its own copy, which updates move from
version to version atomically. `nonet.bench.embedding.sync` measures the bytes of an update.
"""

# Shapes: N requested keys, R rows in the replica, D width.

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

_WIRE_DTYPES = {"fp32": np.float32, "fp16": np.float16}


class SparseReader(Protocol):
    """A reader of rows by key at one version."""

    @property
    def version(self) -> int:
        """The version of the rows."""
        ...

    def read_rows(self, table: str, keys: Tensor) -> Tensor:
        """Read the rows [N, D] of int64 keys [N]; an absent key reads the default row and is counted."""
        ...


class LocalReader:
    """A reader of the tables of the same process; the publisher sets `version`."""

    def __init__(self, tables: Mapping[str, SparseTable], version: int = 0):
        self._tables, self.version = tables, version

    @property
    def absent(self) -> int:
        """The number of keys that the tables did not have when this or another reader read them."""
        return sum(table.absent for table in self._tables.values())

    def read_rows(self, table: str, keys: Tensor) -> Tensor:
        """Read the rows [N, D] of keys [N]; absent keys read the default row."""
        return _get_table(self._tables, table).lookup(keys, train=False)


class ReplicaReader:
    """Full copies of the tables (name -> width or TableSpec), which `apply` moves from version to version.

    A full update fills a second copy that replaces the old rows by one assignment. A delta is checked completely
    and then written under the lock that readers take, for a few milliseconds per 10,000 rows. `absent` counts the
    keys that were absent. A new reader has no version and accepts only a full update.
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
        self._absent_before = 0  # The absent keys of the tables that full updates have replaced.
        self._version, self._live = None, self._make_empty_tables()

    @property
    def version(self) -> int:
        """The current version, -1 before the first update."""
        return -1 if self._version is None else self._version

    @property
    def absent(self) -> int:
        """The number of keys that were absent when they were read."""
        return self._absent_before + sum(table.absent for table in self._live.values())

    def apply(self, update: Mapping[str, Any]) -> int:
        """Apply an update that `make_update` built, and return its version.

        Raises:
            StaleVersion: If the update starts from another version than the current one; the rows do not change.
        """
        have, base = self._version, update["base"]
        if base is not None and base != have:
            raise StaleVersion(
                f"this replica has version {have}, the update starts from {base}; send a full update"
            )
        parts = {name: self._check_update(name, tables) for name, tables in update["tables"].items()}
        is_full = base is None
        live = self._make_empty_tables() if is_full else self._live
        if is_full:  # Nobody reads the new tables yet, so the lock is not needed.
            self._write(live, parts)
        with self._lock:
            if is_full:
                self._absent_before, self._live = self.absent, live
            else:
                self._write(live, parts)
            self._version = update["version"]
        return update["version"]

    def read_rows(self, table: str, keys: Tensor) -> Tensor:
        """Read the rows [N, D] of keys [N]; absent keys read the default row and are counted."""
        with self._lock:
            return _get_table(self._live, table).lookup(keys, train=False)

    def _check_update(self, name: str, tables: Iterable[pa.Table]) -> list[RowColumns]:
        """Check the rows of one table of an update.

        Returns:
            The rows and the deletes in the order of the update, with successive parts of the same kind joined.
        """
        spec = _get_table(self._specs, name)
        parts = [from_arrow_table(table, name, spec.dim) for table in tables]
        groups = itertools.groupby(parts, key=lambda part: bool(part.deleted.any()))
        return [join_rows(list(group), spec) for _, group in groups]

    def _write(self, live: Mapping[str, BaseTable], parts: Mapping[str, list[RowColumns]]) -> None:
        """Apply deletes and upserts of an update to the tables `live`."""
        for name, table_parts in parts.items():
            for part in table_parts:
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
    """Build an update for replicas: {"version", "base", "tables": {name: [pa.Table (key, row, op)]}}.

    `join_updates` joins the updates of several shards.

    Args:
        tables: The shard's tables by name.
        version: The version of the tables.
        base: The version that the update starts from; None: a full update.
        since: The last step of `base`; the update has the rows that were changed or deleted after it.
        wire: The number format of the rows: fp32, or fp16 for half the bytes.
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
    """Yield Arrow tables of key, row and (for deletes) op: first the deletes, then the rows; waiting keys are left out."""
    if wire not in _WIRE_DTYPES:
        raise ConfigError(f"updates travel as {' or '.join(_WIRE_DTYPES)}, not {wire!r}")
    waiting = part.waiting if part.waiting is not None else np.zeros(len(part.key), dtype=bool)
    for deleted in (True, False):
        selected = part.select((part.deleted == deleted) & ~waiting)
        if len(selected.key):
            dim = selected.row.shape[1]
            flat = pa.array(selected.row.reshape(-1).astype(_WIRE_DTYPES[wire], copy=False))
            columns = {"key": selected.key, "row": pa.FixedSizeListArray.from_arrays(flat, dim)}
            yield pa.table(columns | ({"op": [DELETE] * len(selected.key)} if deleted else {}))


def join_updates(updates: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the updates of all shards, which must have the same version and base."""
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

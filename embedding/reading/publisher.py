"""The publisher of a shard's rows: serves one version whole, as a delta or by key, while training continues.

Publishing opens a snapshot of every table, so that rows that are read later are those of the version, whatever was
trained or moved since; `slices` is the map of that version. A reader with a version that was published before gets
the rows that were changed, created or deleted since; any other reader gets everything.
"""

# Shapes: N requested keys, D width, B bytes per row in transit.

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nonet.embedding import SliceMap, is_within
from nonet.embedding.exchange import get_codec
from nonet.embedding.reading.reader import to_wire_tables
from nonet.embedding.tables import RowColumns
from nonet.embedding.versions import TableHistory, TableSnapshot, open_all
from nonet.errors import ConfigError, StaleVersion

_REMEMBERED_VERSIONS = 64  # A reader with one of the last 64 versions can get a delta.
_OPEN_VERSIONS = 2  # The published version, and the one before it for batches in progress.


class PublishableShard(Protocol):
    """The part of ShardedTables that a publisher needs."""

    histories: dict[str, TableHistory]

    @property
    def slices(self) -> SliceMap:
        """The current slice map."""
        ...

    @property
    def ranges(self) -> list[range]:
        """The contiguous ranges of slices whose rows this rank stores."""
        ...


@dataclass(frozen=True, slots=True)
class RowResponse:
    """The answer of a shard to a read by key.

    Attributes:
        data: The rows, encoded by the codec that the reader named, uint8 [N, B].
        there: Whether each key has a row, bool [N]; the others read the default row.
    """

    data: np.ndarray
    there: np.ndarray


@dataclass(slots=True)
class _OpenVersion:
    """A published version of a shard.

    Attributes:
        tables: A snapshot of every table by name.
        slices: The slice map of the version.
        ranges: The ranges of slices whose rows this shard stored.
        readers: The number of calls that are reading the version.
    """

    tables: dict[str, TableSnapshot]
    slices: SliceMap
    ranges: list[range]
    readers: int = 0

    def close(self) -> None:
        for snapshot in self.tables.values():
            snapshot.close()


class VersionPublisher:
    """Publishes the tables of one shard.

    `publish` is called between steps; the other methods at any time, from any thread.
    """

    def __init__(self, world: PublishableShard):
        self._world, self._lock = world, threading.Lock()
        self._open: OrderedDict[int, _OpenVersion] = OrderedDict()
        # By version: the last step of each table in it.
        self._steps: OrderedDict[int, dict[str, int]] = OrderedDict()

    @property
    def version(self) -> int:
        """The published version, -1 before the first."""
        with self._lock:
            return next(reversed(self._open), -1)

    def publish(self, version: int) -> None:
        """Publish the current state of the tables as version `version`, which must be above the last one.

        The previous version stays open for batches in progress. An older version is closed when the last call that reads
        it ends.
        """
        if version <= self.version:
            raise ConfigError(
                f"version {version} cannot be published after version {self.version}; count them up"
            )
        tables = open_all(self._world.histories)
        to_close = []
        with self._lock:
            self._open[version] = _OpenVersion(tables, self._world.slices, self._world.ranges)
            self._steps[version] = {name: snapshot.step for name, snapshot in tables.items()}
            while len(self._open) > _OPEN_VERSIONS:
                _, oldest = self._open.popitem(last=False)
                if not oldest.readers:  # Otherwise the last call that reads it closes it.
                    to_close.append(oldest)
            while len(self._steps) > _REMEMBERED_VERSIONS:
                self._steps.popitem(last=False)
        for open_version in to_close:
            open_version.close()

    def close(self) -> None:
        """Close every version, those in use when their last call ends; afterwards nothing is published."""
        with self._lock:
            to_close = [open_version for open_version in self._open.values() if not open_version.readers]
            self._open.clear()
        for open_version in to_close:
            open_version.close()

    def make_update(self, have: int | None = None, wire: str = "fp32") -> dict[str, Any]:
        """Build an update to the published version for readers, in the format of `reader.make_update`.

        Args:
            have: The reader's version. If it and the deletes since are still known, the update is a delta to it, else it
                has all rows.
            wire: The number format of the rows.
        """
        steps = self._steps.get(have) if have is not None else None
        with self._hold_version() as (version, published):
            if steps and not all(
                snapshot.is_complete_since(steps[name]) for name, snapshot in published.tables.items()
            ):
                steps = None
            parts = {
                name: snapshot.read_changes(steps[name] if steps else None)
                for name, snapshot in published.tables.items()
            }
        return _make_update(version, have if steps else None, parts, wire)

    def read_rows(self, table: str, keys: np.ndarray, version: int, wire: str = "fp32") -> RowResponse:
        """Read rows of a version by key.

        Args:
            table: The name of the table.
            keys: Keys as int64 [N].
            version: The version.
            wire: The codec of the rows.

        Raises:
            StaleVersion: If the version is closed or another shard has a key.
        """
        with self._hold_version(version, table) as (_, open_version):
            if table not in open_version.tables:
                raise ConfigError(
                    f"there is no sparse table {table!r}; there are: {', '.join(open_version.tables)}"
                )
            is_elsewhere = ~is_within(keys, open_version.ranges)
            if is_elsewhere.any():
                raise StaleVersion(
                    f"{int(is_elsewhere.sum())} of {len(keys)} keys of table {table!r} live on other shards by slice "
                    f"map {open_version.slices.version}, which was published with version {version}; the reader's map is another"
                )
            rows, has_row = open_version.tables[table].read_rows(keys)
        return RowResponse(get_codec(wire).encode(rows).numpy(), has_row)

    @contextmanager
    def _hold_version(
        self, version: int | None = None, table: str = ""
    ) -> Iterator[tuple[int, _OpenVersion]]:
        """Keep a version (by default the newest) open during a `with` block, and yield its number and the version.

        Raises:
            StaleVersion: If the version is closed, or none is published; the message names `table`.
        """
        with self._lock:
            if not self._open:
                raise StaleVersion("nothing is published yet; publish a version before readers ask")
            newest = next(reversed(self._open))
            number = newest if version is None else version
            if number not in self._open:
                raise StaleVersion(
                    f"version {number} of table {table!r} was asked for, version {newest} is published"
                )
            open_version = self._open[number]
            open_version.readers += 1
        try:
            yield number, open_version
        finally:
            with self._lock:
                open_version.readers -= 1
                is_last_reader = not open_version.readers and number not in self._open
            if is_last_reader:
                open_version.close()


def _make_update(
    version: int, base: int | None, parts: Mapping[str, RowColumns], wire: str
) -> dict[str, Any]:
    """Build an update of these rows by table, as `reader.make_update` does."""
    tables = {name: list(to_wire_tables(part, wire)) for name, part in parts.items()}
    return {"version": version, "base": base, "tables": tables}

"""A store in a table of HBase, read through its Thrift 1 server with `happybase`.

    open_store("hbase://hb-1:9090/items", {"price": "d:price float64", "shop": "d:shop"})

Distinct keys are read in batches over a few connections. As of a time, the newest cells of all keys are read first, one
call per batch; older versions are read in batches too (`hbase_versions.py`). HBase's cells have times of their own, so each
column is read as of the time separately; a row without any cell before the time is missing.
"""

# Shapes: K keys asked for, U distinct ones.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError, DataError
from nonet.samples.stores.base import Store, StoreRows, align_rows, find_distinct
from nonet.samples.stores.cells import CellCodec
from nonet.samples.stores.hbase_connections import HBaseConnections, HBaseServer
from nonet.samples.stores.hbase_versions import VersionSearch
from nonet.suggest import join_names, suggest_sentence

_UNITS = {"ms": 1000, "s": 1}
_PLACE = tuple(HBaseServer.__dataclass_fields__)[2:]


class HBaseStore(Store):
    """A store in a table of HBase; see the module.

    Args:
        address: HOST:PORT/TABLE.
        columns: Name -> "family:qualifier type", or names, which are text in `family`.
        family: Column family of columns without one.
        keys: Form of row keys: "text" (integers in decimal), or "int64", eight bytes big-endian.
        unit: Unit of cell times: "ms" as HBase writes them, or "s".
        batch: Most rows of a call.
        **place: Options of `HBaseServer`.

    Raises:
        ConfigError: If the table or a column family does not exist.
        StoreError: If the server does not respond.
    """

    versions = True
    made_elsewhere = "tables of HBase are made in its shell"
    creation_command = "create 'TABLE', {NAME => 'd', VERSIONS => 100}"
    takes_columns = True

    def __init__(
        self,
        address: str,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        *,
        family: str = "f",
        keys: str = "text",
        unit: str = "ms",
        batch: int = 1000,
        **place: Any,
    ):
        self.name = f"store hbase://{address}"
        where, slash, table = address.partition("/")
        host, _, port = where.partition(":")
        if not (slash and table and host) or not (port or "9090").isdecimal():
            raise ConfigError(f"{self.name}: wanted hbase://HOST:PORT/TABLE")
        if unit not in _UNITS or keys not in ("text", "int64"):
            raise ConfigError(f"{self.name}: unit is ms or s, keys are text or int64; got {unit} and {keys}")
        for option in place:
            if option not in _PLACE:
                raise ConfigError(
                    f"{self.name}: no option {option!r}; there are {join_names(_PLACE)}."
                    f"{suggest_sentence(option, _PLACE)}"
                )
        self.key = pa.int64() if keys == "int64" else pa.string()
        self._table, self._scale, self._batch = table.encode(), _UNITS[unit], batch
        self._cells = {
            name: _parse_column(name, source, family, self.name)
            for name, source in _name_columns(columns, self.name).items()
        }
        self.schema = pa.schema([pa.field(name, cells.type) for name, (_, cells) in self._cells.items()])
        self._wire = HBaseConnections(HBaseServer(host, int(port or 9090), **place), self.name)
        self._readers = ThreadPoolExecutor(self._wire.place.connections, "hbase")
        self._check_table()

    def _check_table(self) -> None:
        """Check that the table and the column families exist, and read how many versions they keep."""
        tables = self._wire.read(lambda connection: connection.tables())
        if self._table not in tables:
            known = [table.decode(errors="replace") for table in tables]
            raise ConfigError(
                f"{self.name}: there is no such table; there are {join_names(known)}."
                f"{suggest_sentence(self._table.decode(), known)}"
            )
        families = self._wire.read(lambda connection: connection.table(self._table).families())
        there = [name.decode().rstrip(":") for name in families]
        read = {source.decode().partition(":")[0] for source, _ in self._cells.values()}
        kept = [
            facts.get("max_versions")
            for name, facts in families.items()
            if name.decode().rstrip(":") in read and isinstance(facts, dict)
        ]
        self.kept_versions = min((number for number in kept if number is not None), default=None)
        for name, (source, _) in self._cells.items():
            family = source.decode().partition(":")[0]
            if family not in there:
                raise ConfigError(
                    f"{self.name}: column {name!r} is in family {family!r}; the table has {join_names(there)}."
                    f"{suggest_sentence(family, there)}"
                )

    def check_keys(self, keys: Any) -> Any:
        """Convert keys to row keys: text, or integers as decimal text."""
        if pa.types.is_integer(self.key):
            return super().check_keys(keys)
        array = (
            keys.to_numpy(zero_copy_only=False)
            if isinstance(keys, (pa.Array, pa.ChunkedArray))
            else np.asarray(keys)
        )
        return super().check_keys(array.astype(str) if array.dtype.kind in "iu" else array)

    def _get(self, keys: Any, columns: list[str], before: np.ndarray | None) -> StoreRows:
        """Return the rows of keys, newest or as of a time per key."""
        values, place = find_distinct(keys)
        rows = self._encode_keys(values)
        newest = self._read_newest(rows, columns)
        if before is None:
            found = np.array([row is not None for row in newest], bool)
            index = np.flatnonzero(found)
            batch = self._decode_rows([rows[i] for i in index], [newest[i] for i in index], columns)
            at = np.where(found, np.cumsum(found) - 1, -1)
            return align_rows(batch, at[place])
        return self._get_as_of(rows, newest, columns, place, before * self._scale)

    def _get_as_of(
        self, rows: list[bytes], newest: list[Any], columns: list[str], place: np.ndarray, before: np.ndarray
    ) -> StoreRows:
        """Return each key's row as of its time; a slot is one column of one row."""
        sources = [self._cells[name][0] for name in columns]
        slots = (place[:, None] * len(columns) + np.arange(len(columns))).reshape(-1)
        search = VersionSearch(slots, np.repeat(before, len(columns)), len(rows) * len(columns))
        cells = [None if row is None else row.get(source) for row in newest for source in sources]
        search.add_versions(np.arange(len(cells)), cells)
        while groups := list(search.iterate_groups()):
            self._read_round(rows, sources, search, groups)
        chosen = search.answer.reshape(len(place), len(columns))
        found = (chosen >= 0).any(1)
        chosen, asked = chosen[found], place[found]
        arrays = []
        for number, name in enumerate(columns):
            used, first, back = np.unique(chosen[:, number], return_index=True, return_inverse=True)
            values = [None if i < 0 else search.cells[i] for i in used.tolist()]
            made = self._cells[name][1].decode(values, [rows[asked[i]] for i in first.tolist()], self.name)
            arrays.append(made.take(pa.array(back)))
        schema = pa.schema([self.schema.field(name) for name in columns])
        return StoreRows(
            pa.RecordBatch.from_arrays(arrays, schema=schema),
            np.concatenate([np.zeros(1, np.int64), np.cumsum(found)]),
        )

    def _read_round(
        self,
        rows: list[bytes],
        sources: list[bytes],
        search: VersionSearch,
        groups: list[tuple[int, np.ndarray]],
    ) -> None:
        """Read one older version of every pending slot, or all of them where few slots share a time."""
        many = [(time, slots) for time, slots in groups if len(slots) > search.rounds]
        few = [
            (time, slot) for time, slots in groups if len(slots) <= search.rounds for slot in slots.tolist()
        ]
        parts = []
        for time, slots in many:
            rows_of_slots = np.unique(slots // len(sources))
            wanted = [sources[column] for column in np.unique(slots % len(sources))]
            for at in range(0, len(rows_of_slots), self._batch):
                parts.append(([rows[i] for i in rows_of_slots[at : at + self._batch]], wanted, time))
        found: dict[tuple[int, bytes], Any] = {}
        for (_, _, time), answer in zip(
            parts, self._readers.map(lambda part: self._read_rows(*part), parts), strict=True
        ):
            found |= {(time, row): cells for row, cells in answer.items()}

        def read_versions(asked: tuple[int, int]) -> list[tuple[bytes, int]]:
            time, slot = asked
            row, source = rows[slot // len(sources)], sources[slot % len(sources)]
            return self._wire.read(
                lambda connection: connection.table(self._table).cells(
                    row, source, versions=1 << 30, timestamp=time, include_timestamp=True
                )
            )

        for (_, slot), all_versions in zip(few, self._readers.map(read_versions, few), strict=True):
            search.add_all_versions(slot, all_versions)
        for time, slots in many:
            cells = [
                found.get((time, rows[slot // len(sources)]), {}).get(sources[slot % len(sources)])
                for slot in slots.tolist()
            ]
            search.add_versions(slots, cells)

    def _read_newest(self, rows: list[bytes], columns: list[str]) -> list[Any]:
        """Read the newest cells of distinct rows, {source: (value, time)}; None for a missing row."""
        wanted = [self._cells[name][0] for name in columns]
        parts = [rows[at : at + self._batch] for at in range(0, len(rows), self._batch)]

        def read(part: list[bytes]) -> dict[bytes, Any]:
            return self._read_rows(part, wanted)

        found: dict[bytes, Any] = {}
        for answer in map(read, parts) if len(parts) == 1 else self._readers.map(read, parts):
            found |= answer
        return [found.get(row) or None for row in rows]

    def _read_rows(
        self, rows: list[bytes], sources: list[bytes], before: int | None = None
    ) -> dict[bytes, Any]:
        """Read rows in one call: the newest cells, or the newest before a time, {row: {source: (value, time)}}."""
        return dict(
            self._wire.read(
                lambda connection: connection.table(self._table).rows(
                    rows, sources, timestamp=before, include_timestamp=True
                )
            )
        )

    def _decode_rows(self, rows: list[bytes], found: list[Any], columns: list[str]) -> pa.RecordBatch:
        """Decode cells to a record batch."""
        arrays = []
        for name in columns:
            source, cells = self._cells[name]
            values = [cell[0] if (cell := row.get(source)) else None for row in found]
            arrays.append(cells.decode(values, rows, self.name))
        schema = pa.schema([self.schema.field(name) for name in columns])
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _encode_keys(self, keys: Any) -> list[bytes]:
        if isinstance(keys, np.ndarray):
            return [key.to_bytes(8, "big", signed=True) for key in keys.tolist()]
        return [key.encode() for key in keys.to_pylist()]

    def put(self, keys: Any, values: pa.Table | pa.RecordBatch, times: Any = None) -> None:
        """Write rows; values of one time are sent together."""
        asked, batch = self.check_keys(keys), self.check_values(values)
        when = (
            np.broadcast_to(np.asarray(times if times is not None else 0, np.int64), len(batch)) * self._scale
        )
        rows, columns = self._encode_keys(asked), []
        for name, (source, cells) in self._cells.items():
            columns.append([(source, value) for value in cells.encode(batch.column(name))])
        for time in np.unique(when).tolist():
            mine = np.flatnonzero(when == time)

            def write(connection: Any, mine: Any = mine, time: int = time) -> None:
                table = connection.table(self._table)
                with table.batch(timestamp=None if times is None else time, batch_size=self._batch) as sent:
                    for row in mine.tolist():
                        data = {
                            source: value
                            for source, value in (column[row] for column in columns)
                            if value is not None
                        }
                        if data:
                            sent.put(rows[row], data)

            self._wire.write(write)

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Iterate over the newest version of every row in the order of row keys."""
        names = self.check_columns(columns)
        sources, start = [self._cells[name][0] for name in names], b""
        while True:

            def read(connection: Any, start: bytes = start) -> list[Any]:
                table = connection.table(self._table)
                return list(
                    table.scan(
                        row_start=start or None,
                        columns=sources,
                        batch_size=self._batch,
                        limit=self._batch,
                        include_timestamp=True,
                    )
                )

            found = self._wire.read(read)
            if not found:
                return
            rows = [row for row, _ in found]
            times = [max(at for _, at in cells.values()) // self._scale for _, cells in found]
            whole = self._decode_rows(rows, [cells for _, cells in found], names)
            key = (
                pa.array([int.from_bytes(row, "big", signed=True) for row in rows])
                if pa.types.is_integer(self.key)
                else pa.array([row.decode() for row in rows])
            )
            fixed = {"key": key, "time": pa.array(times, pa.int64())}
            yield pa.RecordBatch.from_pydict(fixed | {name: whole.column(name) for name in names})
            start = rows[-1] + b"\0"

    def collect_stats(self) -> dict[str, Any]:
        """Return the number of keys, the retries and the server."""
        keys = sum(len(batch) for batch in self.scan(self.schema.names[:1]))
        return {"keys": keys, "retries": self._wire.retries, "place": str(self._wire.place)}

    def close(self) -> None:
        """Close the connections and the reader threads."""
        self._wire.close()
        self._readers.shutdown(wait=False, cancel_futures=True)


def _name_columns(columns: Sequence[str] | Mapping[str, str] | None, what: str) -> dict[str, str]:
    if not columns:
        raise ConfigError(
            f"{what}: an HBase table has no list of columns; name them: {{price: 'family:qualifier float64'}}"
        )
    return dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}


def _parse_column(name: str, source: str, family: str, what: str) -> tuple[bytes, CellCodec]:
    """Parse "family:qualifier type" to the column's bytes and the encoding of its values."""
    where, _, kind = source.partition(" ")
    where = where if ":" in where else f"{family}:{where}"
    try:
        return where.encode(), CellCodec(name, kind.strip() or "text")
    except ConfigError as error:
        raise DataError(f"{what}: {error}") from None

"""A store in a table of HBase, read through its Thrift 1 server with `happybase`.

    open_store("hbase://hb-1:9090/items", {"price": "d:price float64", "shop": "d:shop"})

Distinct keys are read in batches over a few connections. As of a time, the newest cells of all keys are read first, one
call per batch; older versions are read in batches too (`hbase_versions.py`). HBase's cells have times of their own, so each
column is read as of the time separately; a row without any cell before the time is missing.
"""

# Shapes: K requested keys, C requested columns, U distinct cells of a column.
# A row is one distinct key, a slot is one column of one row, and a source is a column's family:qualifier as bytes.

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

_UNITS = {"ms": 1000, "s": 1}  # Units of cell times per second.
_ALL_VERSIONS = 1 << 30  # More than any cell has; the Thrift call requires a limit.
_SERVER_OPTIONS = tuple(HBaseServer.__dataclass_fields__)[2:]  # Host and port are in the address.


class HBaseStore(Store):
    """A store in a table of HBase; see the module.

    Args:
        address: HOST:PORT/TABLE.
        columns: Name -> "family:qualifier type", or names, which are text in `family`.
        family: Column family of columns without one.
        keys: Form of row keys: "text" (integers in decimal), or "int64", eight bytes big-endian.
        unit: Unit of cell times: "ms" as HBase writes them, or "s".
        batch: Maximum number of rows per call.
        **server_options: Options of `HBaseServer` other than the host and the port.

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
        **server_options: Any,
    ):
        self.name = f"store hbase://{address}"
        host_and_port, slash, table_name = address.partition("/")
        host, _, port = host_and_port.partition(":")
        if not (slash and table_name and host) or not (port or "9090").isdecimal():
            raise ConfigError(f"{self.name}: wanted hbase://HOST:PORT/TABLE")
        if unit not in _UNITS or keys not in ("text", "int64"):
            raise ConfigError(f"{self.name}: unit is ms or s, keys are text or int64; got {unit} and {keys}")
        for option in server_options:
            if option not in _SERVER_OPTIONS:
                raise ConfigError(
                    f"{self.name}: no option {option!r}; there are {join_names(_SERVER_OPTIONS)}."
                    f"{suggest_sentence(option, _SERVER_OPTIONS)}"
                )
        self.key = pa.int64() if keys == "int64" else pa.string()
        self._table, self._scale, self._batch = table_name.encode(), _UNITS[unit], batch
        # The source (family:qualifier, as bytes) and the codec of each column.
        self._source_and_codec = {
            name: _parse_column(name, source, family, self.name)
            for name, source in _name_columns(columns, self.name).items()
        }
        self.schema = pa.schema(
            [pa.field(name, codec.type) for name, (_, codec) in self._source_and_codec.items()]
        )
        self._connections = HBaseConnections(
            HBaseServer(host, int(port or 9090), **server_options), self.name
        )
        self._readers = ThreadPoolExecutor(self._connections.server.connections, "hbase")
        self._check_table()

    def _check_table(self) -> None:
        """Check that the table and the column families exist, and set `kept_versions` to the smallest limit of the families."""
        tables = self._connections.read(lambda connection: connection.tables())
        if self._table not in tables:
            known = [table.decode(errors="replace") for table in tables]
            raise ConfigError(
                f"{self.name}: there is no such table; there are {join_names(known)}."
                f"{suggest_sentence(self._table.decode(), known)}"
            )
        families = self._connections.read(lambda connection: connection.table(self._table).families())
        family_names = [name.decode().rstrip(":") for name in families]
        read_families = {source.decode().partition(":")[0] for source, _ in self._source_and_codec.values()}
        version_limits = [
            options.get("max_versions")
            for name, options in families.items()
            if name.decode().rstrip(":") in read_families and isinstance(options, dict)
        ]
        self.kept_versions = min((limit for limit in version_limits if limit is not None), default=None)
        for name, (source, _) in self._source_and_codec.items():
            family = source.decode().partition(":")[0]
            if family not in family_names:
                raise ConfigError(
                    f"{self.name}: column {name!r} is in family {family!r}; the table has {join_names(family_names)}."
                    f"{suggest_sentence(family, family_names)}"
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
        distinct_keys, row_K = find_distinct(keys)
        row_keys = self._encode_keys(distinct_keys)
        newest_cells = self._read_newest(row_keys, columns)
        if before is None:
            has_cells = np.array([row is not None for row in newest_cells], bool)
            found_rows = np.flatnonzero(has_cells)
            batch = self._decode_rows(
                [row_keys[i] for i in found_rows], [newest_cells[i] for i in found_rows], columns
            )
            batch_row = np.where(has_cells, np.cumsum(has_cells) - 1, -1)
            return align_rows(batch, batch_row[row_K])
        return self._get_as_of(row_keys, newest_cells, columns, row_K, before * self._scale)

    def _get_as_of(
        self,
        row_keys: list[bytes],
        newest_cells: list[Any],
        columns: list[str],
        row_K: np.ndarray,
        before: np.ndarray,
    ) -> StoreRows:
        """Return each key's row as of its time.

        Args:
            row_keys: The distinct rows.
            newest_cells: The newest cells of each row, {source: (value, time)}; None for a missing row.
            columns: Names of the columns.
            row_K: Index of each key's row.
            before: Times [K] in the unit of the cells.
        """
        sources = [self._source_and_codec[name][0] for name in columns]
        # The slot of column c of row r is r * C + c. Each key requests all slots of its row.
        slots = (row_K[:, None] * len(columns) + np.arange(len(columns))).reshape(-1)
        search = VersionSearch(
            slots, np.repeat(before, len(columns)), slot_count=len(row_keys) * len(columns)
        )
        cells = [None if row is None else row.get(source) for row in newest_cells for source in sources]
        search.add_versions(np.arange(len(cells)), cells)
        while groups := list(search.iterate_groups()):
            self._read_round(row_keys, sources, search, groups)
        cell_KC = search.answer.reshape(len(row_K), len(columns))
        has_value = (cell_KC >= 0).any(1)
        cell_KC, chosen_rows = cell_KC[has_value], row_K[has_value]
        arrays = []
        for column, name in enumerate(columns):
            # Each cell is decoded once, however many keys get it; the row of its first key is named in error messages.
            cells_U, first_use_U, index = np.unique(
                cell_KC[:, column], return_index=True, return_inverse=True
            )
            cell_bytes = [None if i < 0 else search.cells[i] for i in cells_U.tolist()]
            cell_rows = [row_keys[chosen_rows[i]] for i in first_use_U.tolist()]
            _, codec = self._source_and_codec[name]
            arrays.append(codec.decode(cell_bytes, cell_rows, self.name).take(pa.array(index)))
        schema = pa.schema([self.schema.field(name) for name in columns])
        return StoreRows(
            pa.RecordBatch.from_arrays(arrays, schema=schema),
            np.concatenate([np.zeros(1, np.int64), np.cumsum(has_value)]),
        )

    def _read_round(
        self,
        row_keys: list[bytes],
        sources: list[bytes],
        search: VersionSearch,
        groups: list[tuple[int, np.ndarray]],
    ) -> None:
        """Read one older version of every pending slot, or all its versions where few slots share a time, into the search.

        Args:
            row_keys: The distinct rows.
            sources: The sources of the columns.
            search: The search; the versions that are read are added to it.
            groups: The pending slots by the time as of which they can be read, from `VersionSearch.iterate_groups`.
        """
        large_groups = [(time, slots) for time, slots in groups if len(slots) > search.rounds]
        single_slots = [
            (time, slot) for time, slots in groups if len(slots) <= search.rounds for slot in slots.tolist()
        ]
        calls = []
        for time, slots in large_groups:
            group_rows = np.unique(slots // len(sources))
            group_sources = [sources[column] for column in np.unique(slots % len(sources))]
            for start in range(0, len(group_rows), self._batch):
                calls.append(
                    ([row_keys[i] for i in group_rows[start : start + self._batch]], group_sources, time)
                )
        cells_by_row: dict[tuple[int, bytes], Any] = {}
        for (_, _, time), cells_read in zip(
            calls, self._readers.map(lambda arguments: self._read_rows(*arguments), calls), strict=True
        ):
            cells_by_row |= {(time, row_key): cells for row_key, cells in cells_read.items()}

        def read_versions(time_and_slot: tuple[int, int]) -> list[tuple[bytes, int]]:
            time, slot = time_and_slot
            row_key, source = row_keys[slot // len(sources)], sources[slot % len(sources)]
            return self._connections.read(
                lambda connection: connection.table(self._table).cells(
                    row_key, source, versions=_ALL_VERSIONS, timestamp=time, include_timestamp=True
                )
            )

        for (_, slot), all_versions in zip(
            single_slots, self._readers.map(read_versions, single_slots), strict=True
        ):
            search.add_all_versions(slot, all_versions)
        for time, slots in large_groups:
            cells = [
                cells_by_row.get((time, row_keys[slot // len(sources)]), {}).get(sources[slot % len(sources)])
                for slot in slots.tolist()
            ]
            search.add_versions(slots, cells)

    def _read_newest(self, row_keys: list[bytes], columns: list[str]) -> list[Any]:
        """Read the newest cells of distinct rows, {source: (value, time)}; None for a missing row."""
        sources = [self._source_and_codec[name][0] for name in columns]
        parts = [row_keys[start : start + self._batch] for start in range(0, len(row_keys), self._batch)]

        def read(part: list[bytes]) -> dict[bytes, Any]:
            return self._read_rows(part, sources)

        cells_by_row: dict[bytes, Any] = {}
        for cells_read in map(read, parts) if len(parts) == 1 else self._readers.map(read, parts):
            cells_by_row |= cells_read
        return [cells_by_row.get(row_key) or None for row_key in row_keys]

    def _read_rows(
        self, row_keys: list[bytes], sources: list[bytes], before: int | None = None
    ) -> dict[bytes, Any]:
        """Read rows in one call.

        Returns:
            The newest cells of each row that exists, or the newest before a time: {row key: {source: (value, time)}}.
        """
        return dict(
            self._connections.read(
                lambda connection: connection.table(self._table).rows(
                    row_keys, sources, timestamp=before, include_timestamp=True
                )
            )
        )

    def _decode_rows(
        self, row_keys: list[bytes], cells_of_rows: list[Any], columns: list[str]
    ) -> pa.RecordBatch:
        """Decode the cells of rows, {source: (value, time)} for each row, to a record batch of the columns."""
        arrays = []
        for name in columns:
            source, codec = self._source_and_codec[name]
            values = [cell[0] if (cell := cells.get(source)) else None for cells in cells_of_rows]
            arrays.append(codec.decode(values, row_keys, self.name))
        schema = pa.schema([self.schema.field(name) for name in columns])
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _encode_keys(self, keys: Any) -> list[bytes]:
        if isinstance(keys, np.ndarray):
            return [key.to_bytes(8, "big", signed=True) for key in keys.tolist()]
        return [key.encode() for key in keys.to_pylist()]

    def put(self, keys: Any, values: pa.Table | pa.RecordBatch, times: Any = None) -> None:
        """Write rows without retries; the rows of one time are sent together. Null values are not written."""
        checked_keys, batch = self.check_keys(keys), self.check_values(values)
        times_K = (
            np.broadcast_to(np.asarray(times if times is not None else 0, np.int64), len(batch)) * self._scale
        )
        row_keys, cells_by_column = self._encode_keys(checked_keys), []
        for name, (source, codec) in self._source_and_codec.items():
            cells_by_column.append([(source, value) for value in codec.encode(batch.column(name))])
        for time in np.unique(times_K).tolist():
            rows_of_time = np.flatnonzero(times_K == time)

            def write(connection: Any, rows_of_time: Any = rows_of_time, time: int = time) -> None:
                table = connection.table(self._table)
                with table.batch(
                    timestamp=None if times is None else time, batch_size=self._batch
                ) as mutations:
                    for row in rows_of_time.tolist():
                        data = {
                            source: value
                            for source, value in (column[row] for column in cells_by_column)
                            if value is not None
                        }
                        if data:
                            mutations.put(row_keys[row], data)

            self._connections.write(write)

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Iterate over the newest version of every row in the order of row keys."""
        names = self.check_columns(columns)
        sources = [self._source_and_codec[name][0] for name in names]
        start = b""  # The smallest row key that has not been read.
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

            scanned = self._connections.read(read)
            if not scanned:
                return
            row_keys = [row_key for row_key, _ in scanned]
            times = [max(time for _, time in cells.values()) // self._scale for _, cells in scanned]
            batch = self._decode_rows(row_keys, [cells for _, cells in scanned], names)
            keys = (
                pa.array([int.from_bytes(row_key, "big", signed=True) for row_key in row_keys])
                if pa.types.is_integer(self.key)
                else pa.array([row_key.decode() for row_key in row_keys])
            )
            key_columns = {"key": keys, "time": pa.array(times, pa.int64())}
            yield pa.RecordBatch.from_pydict(key_columns | {name: batch.column(name) for name in names})
            start = row_keys[-1] + b"\0"  # The smallest row key after the last one.

    def collect_stats(self) -> dict[str, Any]:
        """Return the number of keys, the number of failed read attempts, and the server."""
        keys = sum(len(batch) for batch in self.scan(self.schema.names[:1]))
        return {"keys": keys, "retries": self._connections.retries, "place": str(self._connections.server)}

    def close(self) -> None:
        """Close the connections and the reader threads."""
        self._connections.close()
        self._readers.shutdown(wait=False, cancel_futures=True)


def _name_columns(columns: Sequence[str] | Mapping[str, str] | None, label: str) -> dict[str, str]:
    """Return "family:qualifier type" by the name of each column. Raises ConfigError if there are no columns."""
    if not columns:
        raise ConfigError(
            f"{label}: an HBase table has no list of columns; name them: {{price: 'family:qualifier float64'}}"
        )
    return dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}


def _parse_column(name: str, source: str, family: str, label: str) -> tuple[bytes, CellCodec]:
    """Parse "family:qualifier type" to the source (family:qualifier, as bytes) and the codec of a column's values.

    Args:
        name: Name of the column.
        source: The text to parse; the family and the type may be missing.
        family: Column family if the text has none.
        label: Prefix of error messages.
    """
    qualified_name, _, kind = source.partition(" ")
    qualified_name = qualified_name if ":" in qualified_name else f"{family}:{qualified_name}"
    try:
        return qualified_name.encode(), CellCodec(name, kind.strip() or "text")
    except ConfigError as error:
        raise DataError(f"{label}: {error}") from None

"""A stand-in for HBase's Thrift 1 protocol: happybase's own IDL over a dictionary, with faults on request.

    python -m nonet.bench.samples.hbase_standin PORT        # prints "ready PORT", serves until its input ends

It has versions by time, scans and column families, but no filters, regions, TTL or permissions.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import happybase  # noqa: F401  loads Hbase.thrift as the module Hbase_thrift
import Hbase_thrift as H  # pyright: ignore[reportMissingImports]
from thriftpy2.protocol import TCyBinaryProtocolFactory
from thriftpy2.thrift import TProcessor
from thriftpy2.transport import TCyBufferedTransportFactory, TSocket

Table = dict[bytes, dict[bytes, list[tuple[int, bytes]]]]  # row -> column -> (time, value), newest first


@dataclass
class Faults:
    """The faults of a server.

    Attributes:
        idle_s: Connections that are idle for so long are closed, None for never.
        slow_s: Delay of each answer.
        drop_every: Every n-th call drops its connection, 0 for none.
        hung: While it is set, no call is answered.
        calls: Number of calls so far.
    """

    idle_s: float | None = None
    slow_s: float = 0.0
    drop_every: int = 0
    hung: threading.Event = field(default_factory=threading.Event)
    calls: int = 0


class Standin:
    """A server on 127.0.0.1 with tables {name: families}; `close` ends it and every connection."""

    def __init__(self, tables: dict[str, list[str]], port: int = 0):
        self.faults = Faults()
        self.handler = _Handler(tables)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self._over = True
        for each in (self._socket, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        """Accept connections until the server is closed."""
        while not self._over:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self._open.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Answer the calls of one connection, with faults."""
        wire = TSocket()
        wire.set_handle(client)
        transport = TCyBufferedTransportFactory().get_transport(wire)
        protocol = TCyBinaryProtocolFactory().get_protocol(transport)
        processor = TProcessor(H.Hbase, self.handler)
        faults = self.faults
        try:
            while not self._over:
                client.settimeout(faults.idle_s)
                if not client.recv(1, socket.MSG_PEEK):
                    break
                client.settimeout(None)
                faults.calls += 1
                if faults.drop_every and faults.calls % faults.drop_every == 0:
                    break
                while faults.hung.is_set() and not self._over:
                    time.sleep(0.01)
                if faults.slow_s:
                    time.sleep(faults.slow_s)
                processor.process(protocol, protocol)
        except Exception:
            pass
        finally:
            self._open.discard(client)
            client.close()


class _Handler:
    """The calls of the IDL that a client of columns makes."""

    def __init__(self, tables: dict[str, list[str]]):
        self._families = {
            name.encode(): [family.encode() + b":" for family in f] for name, f in tables.items()
        }
        self._tables: dict[bytes, Table] = {name: {} for name in self._families}
        self._scans: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def getTableNames(self) -> list[bytes]:
        return list(self._tables)

    def getColumnDescriptors(self, tableName: bytes) -> dict[bytes, Any]:
        return {name: H.ColumnDescriptor(name=name) for name in self._families[self._check_table(tableName)]}

    def getRowsWithColumns(
        self, tableName: bytes, rows: list[bytes], columns: Any, attributes: Any
    ) -> list[Any]:
        return self.getRowsWithColumnsTs(tableName, rows, columns, 1 << 62, attributes)

    def getRowsWithColumnsTs(
        self, tableName: bytes, rows: list[bytes], columns: Any, timestamp: int, attributes: Any
    ) -> list[Any]:
        table = self._tables[self._check_table(tableName)]
        found = (_read_row(table, row, columns, timestamp) for row in rows)
        return [row for row in found if row is not None]

    def getRowWithColumns(self, tableName: bytes, row: bytes, columns: Any, attributes: Any) -> list[Any]:
        return self.getRowsWithColumns(tableName, [row], columns, attributes)

    def getRowWithColumnsTs(
        self, tableName: bytes, row: bytes, columns: Any, timestamp: int, attributes: Any
    ) -> list[Any]:
        return self.getRowsWithColumnsTs(tableName, [row], columns, timestamp, attributes)

    def getVerTs(
        self, tableName: bytes, row: bytes, column: bytes, timestamp: int, numVersions: int, attributes: Any
    ) -> list[Any]:
        cells = self._tables[self._check_table(tableName)].get(row, {}).get(column, [])
        return [H.TCell(value=value, timestamp=at) for at, value in cells if at < timestamp][:numVersions]

    def mutateRows(self, tableName: bytes, rowBatches: Any, attributes: Any) -> None:
        self.mutateRowsTs(tableName, rowBatches, int(1000 * time.time()), attributes)

    def mutateRowsTs(self, tableName: bytes, rowBatches: Any, timestamp: int, attributes: Any) -> None:
        table = self._tables[self._check_table(tableName)]
        with self._lock:
            for batch in rowBatches:
                for mutation in batch.mutations:
                    if mutation.column.partition(b":")[0] + b":" not in self._families[tableName]:
                        raise H.IOError(message=f"NoSuchColumnFamilyException: {mutation.column!r}")
                    cells = table.setdefault(batch.row, {}).setdefault(mutation.column, [])
                    cells[:] = sorted(
                        [c for c in cells if c[0] != timestamp] + [(timestamp, mutation.value)], reverse=True
                    )

    def scannerOpenWithScan(self, tableName: bytes, scan: Any, attributes: Any) -> int:
        table, number = self._tables[self._check_table(tableName)], next(self._numbers)
        rows = [
            row
            for row in sorted(table)
            if row >= (scan.startRow or b"") and (not scan.stopRow or row < scan.stopRow)
        ]
        self._scans[number] = iter(
            [found for row in rows if (found := _read_row(table, row, scan.columns, 1 << 62))]
        )
        return number

    def scannerGetList(self, id: int, nbRows: int) -> list[Any]:
        return list(itertools.islice(self._scans[id], nbRows))

    def scannerClose(self, id: int) -> None:
        self._scans.pop(id, None)

    def _check_table(self, table: bytes) -> bytes:
        if table not in self._tables:
            raise H.IOError(message=f"TableNotFoundException: {table.decode()}")
        return table


def _read_row(table: Table, row: bytes, columns: Any, before: int) -> Any:
    """Return the newest cells of a row before a time, None if it has none."""
    cells: dict[bytes, Any] = {}
    for column, versions in table.get(row, {}).items():
        if columns and not any(column == name or column.startswith(name + b":") for name in columns):
            continue
        for at, value in versions:
            if at < before:
                cells[column] = H.TCell(value=value, timestamp=at)
                break
    return H.TRowResult(row=row, columns=cells) if cells else None


def main() -> None:
    """Serve a table `items` with family `d` until the input ends."""
    server = Standin({"items": ["d"]}, int(sys.argv[1]))
    print(f"ready {server.port}", flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()

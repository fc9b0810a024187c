"""A stand-in for HBase's Thrift 1 protocol: happybase's own IDL over a dictionary, with faults on request.

    python -m nonet.bench.samples.hbase_standin PORT        # prints "ready PORT", serves until standard input ends

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

# By row and column, the versions (time in milliseconds, value), newest first.
Table = dict[bytes, dict[bytes, list[tuple[int, bytes]]]]
_NO_LIMIT = 1 << 62  # a time after all versions


@dataclass
class Faults:
    """The faults that a server simulates, and the number of its calls.

    Attributes:
        idle_s: Seconds after which an idle connection is closed; None for never.
        slow_s: Delay of each answer in seconds.
        drop_every: If n, every n-th call drops its connection; 0 for none.
        hung: While this event is set, no call is answered.
        calls: Number of calls so far.
    """

    idle_s: float | None = None
    slow_s: float = 0.0
    drop_every: int = 0
    hung: threading.Event = field(default_factory=threading.Event)
    calls: int = 0


class Standin:
    """A server on 127.0.0.1, which runs in threads of this process until it is closed.

    Args:
        tables: Names of the column families of each table.
        port: The port; 0 for any free one.
        stopped: A closed server, whose tables this one has from its first connection on.
    """

    def __init__(self, tables: dict[str, list[str]], port: int = 0, stopped: Standin | None = None):
        self.faults = Faults()
        self.handler = stopped.handler if stopped else _Handler(tables)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self._clients: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self._closed = True
        for open_socket in (self._socket, *self._clients):
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()

    def _accept(self) -> None:
        """Accept connections until the server is closed."""
        while not self._closed:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self._clients.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Answer the calls of one connection, with faults."""
        thrift_socket = TSocket()
        thrift_socket.set_handle(client)
        transport = TCyBufferedTransportFactory().get_transport(thrift_socket)
        protocol = TCyBinaryProtocolFactory().get_protocol(transport)
        processor = TProcessor(H.Hbase, self.handler)
        faults = self.faults
        try:
            while not self._closed:
                client.settimeout(faults.idle_s)
                if not client.recv(
                    1, socket.MSG_PEEK
                ):  # waits for the next call; empty at the end of the connection
                    break
                client.settimeout(None)
                faults.calls += 1
                if faults.drop_every and faults.calls % faults.drop_every == 0:
                    break
                while faults.hung.is_set() and not self._closed:
                    time.sleep(0.01)
                if faults.slow_s:
                    time.sleep(faults.slow_s)
                processor.process(protocol, protocol)
        except Exception:  # such as a timeout, or a client that has gone: the connection is closed
            pass
        finally:
            self._clients.discard(client)
            client.close()


class _Handler:
    """Implements the calls of the IDL that Nonet's store and happybase make; the names are those of the IDL."""

    def __init__(self, tables: dict[str, list[str]]):
        self._families = {
            name.encode(): [family.encode() + b":" for family in families]
            for name, families in tables.items()
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
        return self.getRowsWithColumnsTs(tableName, rows, columns, _NO_LIMIT, attributes)

    def getRowsWithColumnsTs(
        self, tableName: bytes, rows: list[bytes], columns: Any, timestamp: int, attributes: Any
    ) -> list[Any]:
        table = self._tables[self._check_table(tableName)]
        results = (_read_row(table, row, columns, timestamp) for row in rows)
        return [result for result in results if result is not None]

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
            [result for row in rows if (result := _read_row(table, row, scan.columns, _NO_LIMIT))]
        )
        return number

    def scannerGetList(self, id: int, nbRows: int) -> list[Any]:
        return list(itertools.islice(self._scans[id], nbRows))

    def scannerClose(self, id: int) -> None:
        self._scans.pop(id, None)

    def _check_table(self, table: bytes) -> bytes:
        """Return the name of a table, or raise the error of HBase if there is no such table."""
        if table not in self._tables:
            raise H.IOError(message=f"TableNotFoundException: {table.decode()}")
        return table


def _read_row(table: Table, row: bytes, columns: Any, before: int) -> Any:
    """Return the newest cell before a time of each of a row's columns; None if there is no such cell."""
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

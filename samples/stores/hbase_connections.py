"""Connections to an HBase Thrift 1 server: pooled, reopened after idling, with a bounded number of read retries.

A connection that was idle for more than `idle_s` is reopened, because servers close idle connections without notice (after 60 s
by default). A read whose connection fails is retried on a new one with back-off, up to `attempts` times in total; a write is
never retried.
"""

from __future__ import annotations

import contextlib
import queue
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nonet.errors import ConfigError, DataError, StoreError


@dataclass(frozen=True)
class HBaseServer:
    """Address, protocol and connection limits of a Thrift server.

    Attributes:
        host: Host name.
        port: Port.
        transport: "buffered" or "framed".
        protocol: "binary" or "compact".
        timeout_s: Timeout of a call in seconds.
        attempts: Maximum number of attempts of a read.
        idle_s: Seconds without a call after which a connection is reopened.
        connections: Number of concurrent connections.
    """

    host: str
    port: int
    transport: str = "buffered"
    protocol: str = "binary"
    timeout_s: float = 5.0
    attempts: int = 3
    idle_s: float = 30.0
    connections: int = 2

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.transport} transport, {self.protocol} protocol)"


class HBaseConnections:
    """The connection pool of one process.

    Args:
        server: The server.
        name: Prefix of error messages.

    Attributes:
        retries: Number of read attempts that failed, also the last ones.
    """

    def __init__(self, server: HBaseServer, name: str):
        self.server, self.name = server, name
        # Idle connections with the time of their last call, (monotonic seconds, connection).
        self._idle: queue.LifoQueue[tuple[float, Any]] = queue.LifoQueue()
        self._errors = _list_wire_errors()
        self.retries = 0

    def read(self, call: Callable[[Any], Any]) -> Any:
        """Return the result of `call(connection)`, with retries; raise StoreError if every attempt fails."""
        last_error: BaseException | None = None
        for attempt in range(self.server.attempts):
            try:
                return self._call_once(call)
            except self._errors as error:
                last_error = error
                self.retries += 1
                if attempt + 1 < self.server.attempts:
                    # Exponential back-off from 0.05 s to 2 s; random jitter keeps clients from retrying at the same time.
                    time.sleep(min(2.0, 0.05 * 2**attempt) * (0.5 + random.random()))
        raise StoreError(self._describe_no_answer(last_error, self.server.attempts)) from last_error

    def write(self, call: Callable[[Any], Any]) -> Any:
        """Return the result of `call(connection)` without retries; raise StoreError if the connection fails."""
        try:
            return self._call_once(call)
        except self._errors as error:
            raise StoreError(
                f"{self._describe_no_answer(error, attempts=1)}; a write is not repeated, some of its rows may be there"
            ) from error

    def close(self) -> None:
        """Close the idle connections."""
        while not self._idle.empty():
            _close(self._idle.get_nowait()[1])

    def _call_once(self, call: Callable[[Any], Any]) -> Any:
        """Return the result of `call(connection)`; the connection is put back, or closed if the call fails."""
        connection = self._take_connection()
        try:
            result = call(connection)
        except BaseException as error:
            _close(connection)  # Its buffer may contain the remaining bytes of the failed call.
            raise self._translate_error(error) from error
        self._idle.put((time.monotonic(), connection))
        return result

    def _take_connection(self) -> Any:
        """Take a connection that has not been idle for too long from the pool, or open a new one."""
        while True:
            try:
                idle_since, connection = self._idle.get_nowait()
            except queue.Empty:
                return self._open_connection()
            if time.monotonic() - idle_since < self.server.idle_s:
                return connection
            _close(connection)

    def _open_connection(self) -> Any:
        """Open a connection."""
        import happybase

        server = self.server
        return happybase.Connection(
            server.host,
            server.port,
            timeout=int(1000 * server.timeout_s),
            transport=server.transport,
            protocol=server.protocol,
        )

    def _translate_error(self, error: BaseException) -> BaseException:
        """Convert errors that the server reports to Nonet errors; return others unchanged."""
        import Hbase_thrift  # pyright: ignore[reportMissingImports]  happybase generates it from its IDL.
        from thriftpy2.thrift import TApplicationException

        if isinstance(error, Hbase_thrift.IOError | Hbase_thrift.IllegalArgument):
            text = " ".join(str(getattr(error, "message", error)).split())[:200]
            return DataError(f"{self.name}: the server refused: {text}")
        if isinstance(error, TApplicationException):
            return ConfigError(
                f"{self.name}: {self.server} answers in another version of the protocol ({error}); a Thrift 1 server is "
                "wanted: hbase thrift start"
            )
        return error

    def _describe_no_answer(self, error: BaseException | None, attempts: int) -> str:
        """Return the error message for a server that does not respond; `error` is the last one of the attempts."""
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        times = f"in {attempts} attempts" if attempts > 1 else "once"
        return (
            f"{self.name}: no answer from {self.server}, asked {times} within {self.server.timeout_s:g} s each ({cause}); is a "
            "Thrift 1 server there (hbase thrift start), started with this transport and protocol?"
        )


def _list_wire_errors() -> tuple[type[BaseException], ...]:
    """Return the types of the exceptions that a broken connection raises; raise ConfigError if happybase is not installed."""
    try:
        import happybase  # noqa: F401  This also loads its IDL.
        from thriftpy2.protocol.exc import TProtocolException
        from thriftpy2.transport import TTransportException
    except ImportError:
        raise ConfigError("hbase:// stores need happybase: pip install 'nonet[hbase]'") from None
    return (TTransportException, TProtocolException, OSError, EOFError)


def _close(connection: Any) -> None:
    with contextlib.suppress(Exception):
        connection.close()

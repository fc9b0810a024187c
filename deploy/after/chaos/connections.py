"""StorageProxy: a TCP proxy before the endpoint of the object storage, which delays or closes connections when told to."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from nonet.errors import ConfigError

ENDPOINT = "AWS_ENDPOINT_URL"
_CHUNK_BYTES = 64 << 10
_SLOW_S = 0.3  # the delay of each chunk while connections are slow
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset instead of the usual exchange


class StorageProxy:
    """A server that forwards all connections to one address.

    Args:
        target: The host and the port that it forwards to.
        host: The address of this machine that it listens at.

    Attributes:
        port: The port that it listens at.
    """

    def __init__(self, target: tuple[str, int], host: str):
        self._target = target
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._slow_until = self._cut_until = 0.0  # by time.monotonic()
        self._connections = set[socket.socket]()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept_all, name="storage-proxy", daemon=True).start()

    @property
    def is_slow(self) -> bool:
        """Whether all that is transferred is delayed now."""
        return time.monotonic() < self._slow_until

    @property
    def is_cut(self) -> bool:
        """Whether new connections are refused now."""
        return time.monotonic() < self._cut_until

    def delay(self, seconds: float) -> None:
        """Delay all that is transferred for some seconds from now."""
        self._slow_until = max(self._slow_until, time.monotonic() + seconds)

    def cut(self, seconds: float) -> None:
        """Close all connections, and refuse new ones for some seconds from now."""
        self._cut_until = max(self._cut_until, time.monotonic() + seconds)
        self._close_connections()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._cut_until = float("inf")
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_connections()

    def _accept_all(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self.is_cut:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=5.0)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            with self._lock:
                self._connections |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        """Forward what arrives at a connection to another one, until either is closed."""
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                if self.is_slow:
                    time.sleep(_SLOW_S)
                sink.sendall(chunk)
        for connection in (source, sink):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        with self._lock:
            self._connections -= {source, sink}

    def _close_connections(self) -> None:
        """Close all connections with a reset."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            _reset(connection)


def _reset(connection: socket.socket) -> None:
    """Close a connection with a reset, and wake the threads that read from it."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def check_endpoint() -> None:
    """Check that a proxy can be placed before the endpoint of the object storage.

    Raises:
        ConfigError: The endpoint is not known, or is encrypted, so that a proxy would be taken for an attack.
    """
    url = os.environ.get(ENDPOINT, "")
    if urlsplit(url).scheme != "http":
        raise ConfigError(
            f"--kill storage places a proxy before the storage: {ENDPOINT} is {url or 'not set'}; it must be http://HOST:PORT; "
            "else leave storage out of --kill"
        )


@contextmanager
def place_proxy(host: str) -> Iterator[StorageProxy]:
    """Place a proxy before the endpoint of the object storage, which this process and those that it starts use then.

    Args:
        host: The address of this machine by which the processes of the run reach it.
    """
    url = os.environ[ENDPOINT]
    parts = urlsplit(url)
    proxy = StorageProxy((parts.hostname or "", parts.port or 80), host)
    os.environ[ENDPOINT] = f"http://{host}:{proxy.port}"
    try:
        yield proxy
    finally:
        os.environ[ENDPOINT] = url
        proxy.close()

"""Drains the HTTP proxies of Ray Serve before a server stops: accepted requests are answered, and new connections are refused.

Serve's own shutdown kills its proxies with their open requests. The functions here run in the proxies, whose uvicorn server Ray
does not make public; if a version of Ray has it elsewhere, nothing is drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import time
from typing import Any

_DRAIN_S = 20.0  # the longest wait for open requests; Kubernetes kills after 30 s
_IDLE_S = 1.0  # in which a client may still use a connection that it has kept open
_ACCEPT_S = 0.1  # in which connections that the system has accepted reach the server
_POLL_S = 0.05
_CLOSE = (b"connection", b"close")
_SO_ATTACH_FILTER = 26  # of Linux; Python's socket module lacks it
_PROXY_PREFIX = "SERVE_PROXY_ACTOR"


def drain_proxies() -> None:
    """Let all proxies of Ray Serve refuse new connections, and wait until they have answered their open requests."""
    import ray

    entries: Any = ray.util.list_named_actors(all_namespaces=True)
    names = [entry["name"] for entry in entries]
    proxies = [ray.get_actor(name, namespace="serve") for name in names if name.startswith(_PROXY_PREFIX)]
    ray.get([proxy.__ray_call__.remote(start_drain) for proxy in proxies], timeout=_DRAIN_S)
    deadline = time.monotonic() + _DRAIN_S + 1
    while time.monotonic() < deadline:
        if all(ray.get([proxy.__ray_call__.remote(is_drained) for proxy in proxies], timeout=_DRAIN_S)):
            return
        time.sleep(_POLL_S)


def start_drain(proxy: Any) -> None:
    """Start a task in the event loop of a proxy that drains its server; Ray calls this in another thread of the proxy."""
    server, proxy.nonet_drain = find_server(proxy), None
    if server is not None:
        loop = proxy._start_http_server_task.get_loop()
        proxy.nonet_drain = asyncio.run_coroutine_threadsafe(drain_server(server), loop)


def is_drained(proxy: Any) -> bool:
    """Return whether the task of `start_drain` has ended."""
    return proxy.nonet_drain is None or proxy.nonet_drain.done()


def find_server(proxy: Any) -> Any:
    """Return the uvicorn server of a proxy; None if this version of Ray has it elsewhere."""
    try:
        return proxy._start_http_server_task.result()[1]
    except (AttributeError, TypeError, IndexError):
        return None


async def drain_server(server: Any, limit_s: float = _DRAIN_S, idle_s: float = _IDLE_S) -> None:
    """Refuse new connections of a uvicorn server, and wait until all open requests are answered, with `Connection: close`.

    Args:
        server: The `uvicorn.Server`.
        limit_s: The longest wait for answers.
        idle_s: How long a connection without a request stays open.
    """
    server.config.encoded_headers.append(_CLOSE)  # for the headers that uvicorn composes every second
    server.server_state.default_headers.append(_CLOSE)
    began = time.monotonic()
    for listener in server.servers:
        for listening in listener.sockets:
            _ignore_new_connections(listening.fileno())
    await asyncio.sleep(_ACCEPT_S)
    for listener in server.servers:
        listener.close()
    while time.monotonic() - began < limit_s:
        is_answering = any(_is_open(connection) for connection in server.server_state.connections)
        if not is_answering and time.monotonic() - began >= idle_s:
            return
        await asyncio.sleep(_POLL_S)


def _is_open(connection: Any) -> bool:
    """Return whether a connection has a request that is not answered."""
    cycle = getattr(connection, "cycle", None)
    return cycle is not None and not cycle.response_complete


def _ignore_new_connections(descriptor: int) -> None:
    """Let the system drop packets to a listening socket, so that none is accepted between the last accept and the close.

    A client tries again after a second, and is refused then. Elsewhere than on Linux nothing is done.
    """
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0, drop
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

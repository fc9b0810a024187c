"""A server that is told to stop answers what it has accepted, and refuses new connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from nonet.deploy.serving.draining import drain_server, find_server, is_drained, start_drain  # noqa: E402


@contextlib.asynccontextmanager
async def serve(answer):
    """Yield a running uvicorn server, whose answers wait for the event `answer`, and its port."""

    async def app(scope, receive, send):
        if scope["path"] == "/slow":
            await answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        task = asyncio.ensure_future(server._serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield server, listening.getsockname()[1]
        server.should_exit = True
        await task


async def ask(connection, path):
    reader, writer = connection
    writer.write(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    return head.decode().lower(), await reader.readexactly(2)


def test_open_requests_are_answered_and_new_connections_are_refused():
    async def run():
        answer = asyncio.Event()
        async with serve(answer) as (server, port):
            slow, idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            head, _ = await ask(idle, "/")
            assert "connection: close" not in head
            open_request = asyncio.ensure_future(ask(slow, "/slow"))
            await asyncio.sleep(0.05)
            drain = asyncio.ensure_future(drain_server(server, limit_s=20.0, idle_s=0.0))
            while any(listener.is_serving() for listener in server.servers):
                await asyncio.sleep(0.01)
            with pytest.raises(OSError):  # noqa: PT011  refused, or not answered
                await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 5)
            head, body = await ask(
                idle, "/"
            )  # a connection that was there is still answered, for the last time
            assert ("200 ok" in head, "connection: close" in head, body) == (True, True, b"ok")
            assert not drain.done()
            answer.set()
            head, body = await open_request
            assert ("200 ok" in head, "connection: close" in head, body) == (True, True, b"ok")
            await asyncio.wait_for(drain, 20)
            for _, writer in (slow, idle):
                writer.close()

    asyncio.run(run())


def test_a_request_without_end_is_waited_for_no_longer_than_the_limit():
    async def run():
        answer = asyncio.Event()
        async with serve(answer) as (server, port):
            slow = await asyncio.open_connection("127.0.0.1", port)
            open_request = asyncio.ensure_future(ask(slow, "/slow"))
            await asyncio.sleep(0.05)
            await asyncio.wait_for(drain_server(server, limit_s=0.3, idle_s=0.0), 20)
            assert not open_request.done()
            answer.set()
            await open_request
            slow[1].close()

    asyncio.run(run())


def test_a_proxy_of_another_version_of_ray_is_not_drained():
    proxy = SimpleNamespace(_start_http_server_task=SimpleNamespace(result=lambda: None))
    for other in (SimpleNamespace(), proxy):
        assert find_server(other) is None
        start_drain(other)
        assert is_drained(other)

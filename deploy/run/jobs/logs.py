"""Logs of a cluster, which are printed while they grow, across lost connections.

A printer knows how many bytes it has printed. After a lost connection it opens the log again from its beginning and skips these
bytes, so that every byte is printed once.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import aiohttp

from nonet.deploy.run.jobs.client import ClusterClient
from nonet.errors import ClusterUnreachable, ConfigError

_GIVE_UP_S = 300.0  # how long a cluster may be out of reach
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 8.0  # between two attempts to connect
_SILENCE_S = 60.0  # without a byte, after which a connection is replaced: it may be dead

_Value = TypeVar("_Value")


class LogPrinter:
    """Prints one growing log file of a cluster to standard output.

    Args:
        client: The client of the cluster.
        source: The parameters of Ray's log API that name the file.
    """

    def __init__(self, client: ClusterClient, source: Mapping[str, str]):
        self._client, self._source, self._printed_bytes = client, dict(source), 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def follow(self) -> None:
        """Print what is written until this task is cancelled; a lost connection is opened again."""
        pause_s = _FIRST_PAUSE_S
        while True:
            printed_bytes = self._printed_bytes
            with contextlib.suppress(ClusterUnreachable, ConfigError):  # the file may not exist yet
                await self.print_rest(follow=True)
            pause_s = (
                _FIRST_PAUSE_S if self._printed_bytes > printed_bytes else min(_MAX_PAUSE_S, 2 * pause_s)
            )
            await asyncio.sleep(pause_s)

    async def print_rest(self, *, follow: bool = False) -> None:
        """Print what the log has after the bytes that are printed.

        Args:
            follow: Whether to continue with what is written later, until the connection ends.

        Raises:
            ClusterUnreachable: The connection was lost.
            ConfigError: There is no such log.
        """
        skipped_bytes = self._printed_bytes
        try:
            async with self._client.open_log(self._source, follow=follow, silence_s=_SILENCE_S) as log:
                async for chunk in log.content.iter_any():
                    self._print_bytes(chunk[skipped_bytes:])
                    skipped_bytes = max(0, skipped_bytes - len(chunk))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterUnreachable(f"the connection to {self._client.address} was lost: {error}") from None

    def _print_bytes(self, data: bytes) -> None:
        """Print bytes of the log."""
        self._printed_bytes += len(data)
        sys.stdout.write(self._decoder.decode(data))
        sys.stdout.flush()


def follow_logs(
    client: ClusterClient,
    sources: Sequence[Mapping[str, str]],
    find_end: Callable[[], _Value | None],
    *,
    next_step: str,
    poll_s: float,
) -> _Value:
    """Print logs while they grow, until the processes that write them have ended.

    Args:
        client: The client of the cluster.
        sources: For each file, the parameters of Ray's log API that name it.
        find_end: Returns how the processes ended, or None while they run.
        next_step: What an error suggests if the cluster stays out of reach.
        poll_s: Seconds between two calls of `find_end`.

    Returns:
        The result of `find_end`.

    Raises:
        ClusterUnreachable: The cluster was out of reach for `_GIVE_UP_S`.
    """
    return asyncio.run(_follow_logs(client, sources, find_end, next_step, _GIVE_UP_S, poll_s))


def print_logs(client: ClusterClient, sources: Sequence[Mapping[str, str]], *, next_step: str) -> None:
    """Print the current content of logs. Raises errors like `follow_logs`, and ConfigError if there is no such log."""

    async def print_all() -> None:
        for source in sources:
            printer = LogPrinter(client, source)
            await _retry(printer.print_rest, client, next_step, _MAX_PAUSE_S)

    asyncio.run(print_all())


async def _follow_logs(
    client: ClusterClient,
    sources: Sequence[Mapping[str, str]],
    find_end: Callable[[], _Value | None],
    next_step: str,
    give_up_s: float,
    poll_s: float,
) -> _Value:
    """Print logs as `follow_logs` does, in an event loop."""
    printers = [LogPrinter(client, source) for source in sources]
    tasks = [asyncio.create_task(printer.follow()) for printer in printers]
    try:
        while True:
            end = await _retry(lambda: asyncio.to_thread(find_end), client, next_step, give_up_s)
            if end is not None:
                break
            await asyncio.sleep(poll_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for printer in printers:
        with contextlib.suppress(ConfigError):  # nothing was written, for example by a job that did not start
            await _retry(printer.print_rest, client, next_step, give_up_s)
    return end


async def _retry(
    call: Callable[[], Awaitable[_Value]], client: ClusterClient, next_step: str, give_up_s: float
) -> _Value:
    """Repeat a call while the cluster is out of reach, with growing pauses, and say so on standard error.

    Raises:
        ClusterUnreachable: The cluster was out of reach for `give_up_s`.
    """
    lost_at, pause_s = None, _FIRST_PAUSE_S
    while True:
        try:
            result = await call()
        except ClusterUnreachable:
            now = time.monotonic()
            if lost_at is None:
                lost_at = now
                print(f"{client.address} is out of reach; trying again for {give_up_s:g} s", file=sys.stderr)
            if now - lost_at > give_up_s:
                raise ClusterUnreachable(
                    f"{client.address} was out of reach for {give_up_s:g} s; {next_step}"
                ) from None
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
        else:
            if lost_at is not None:
                print(f"{client.address} is in reach again", file=sys.stderr)
            return result

"""Where `nonet plan` takes its cluster view from: a file, a live Ray, or this machine."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from nonet.controller.cluster import ClusterView, read_view, this_machine
from nonet.errors import ConfigError, PlacementError

_KNOCK_S = 3.0


def view(cluster: Path | None, address: str | None) -> ClusterView:
    """The view to plan on. Raises ConfigError where both are given, PlacementError where no Ray answers."""
    if cluster and address:
        raise ConfigError("give --cluster (a file) or --address (a live Ray), not both")
    if address:
        return _live(address)
    return read_view(cluster) if cluster else this_machine()


def _knock(address: str) -> None:
    """Fail within seconds where nobody listens: Ray itself would try for minutes. Raises OSError or ValueError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def _live(address: str) -> ClusterView:
    import ray

    from nonet.controller.live import live_view

    try:
        _knock(address)
        ray.init(address=address, namespace="nonet", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise PlacementError(
            f"no Ray answers at {address}: {' '.join(str(error).split())[:200]}. "
            "Start one with `ray start --head`, or plan on a file with --cluster"
        ) from None
    try:
        return live_view()
    finally:
        ray.shutdown()

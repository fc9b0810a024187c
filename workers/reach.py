"""Checks of what a process can reach before Ray starts: a cluster's address, a temporary folder, a port, a shared folder."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nonet.errors import ConfigError

_ANSWER_S = 8.0  # Time-out of a connection to a cluster, in seconds.
_MAX_SOCKET_PATH_BYTES = 107  # Longest path of a Unix socket on Linux.
# Longest path that Ray adds to its temporary folder: /ray/session_<time>_<process>/sockets/plasma_store.
_RAY_PATH_BYTES = 68
_MIN_FREE_BYTES = 64 << 20  # Ray writes its logs and sockets there; objects are in shared memory.


def check_ray_environment() -> None:
    """Check the settings that would make Ray wait without end or fail with a traceback.

    Raises:
        ConfigError: `RAY_ADDRESS` is malformed or no cluster answers there, or the temporary folder has too long a
            path, does not exist or is full. The message is one line with the variable, its value and what to do.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        _check_temporary_folder()
    else:
        check_address(address, "RAY_ADDRESS", "unset RAY_ADDRESS, or start a cluster there: ray start --head")


def start_ray(address: str, options: Mapping[str, Any]) -> None:
    """Call `ray.init`, and once more if a local Ray does not start: it may have lost a port to another one that starts.

    Args:
        address: `host:port` of a cluster, or `local`.
        options: Other arguments of `ray.init`.
    """
    import ray

    start = partial(ray.init, address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        start()
    except Exception:  # Ray raises Exception itself, for example if its processes are slow to start
        if address != "local":
            raise
        start()


def check_port(host: str, port: int) -> None:
    """Check that a server can listen at an address.

    Args:
        host: Name or address of this machine.
        port: Number of the port, 1 to 65535.

    Raises:
        ConfigError: Another process listens there, or the host does not belong to this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        option = "host with --host" if isinstance(error, socket.gaierror) else "port with --port"
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error.strerror}); choose another {option}"
        ) from None


def check_address(address: str, source: str, way_out: str) -> None:
    """Check that a Ray cluster answers at an address, since Ray itself would retry for minutes.

    Args:
        address: `host:port`, with or without `ray://`, or `auto`, which is not checked.
        source: Where the address comes from, for messages.
        way_out: What to do instead, for messages.

    Raises:
        ConfigError: The address is malformed, no cluster answers there, or this machine is no node of the cluster.
    """
    if address == "auto":
        return
    if not re.fullmatch(r"(ray://)?[^\s/:]+:\d{1,5}", address):
        raise ConfigError(f"{source} is {address!r}; it must be host:port, auto or local; {way_out}")
    import grpc

    with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_ANSWER_S)
        except grpc.FutureTimeoutError:
            raise ConfigError(
                f"{source} is {address}, where no Ray cluster answers within {_ANSWER_S:g} s; {way_out}"
            ) from None
    if not address.startswith("ray://"):
        _check_membership(address, source)


def _check_membership(address: str, source: str) -> None:
    """Check that this machine is a node of a cluster; otherwise, Ray ends the process with a trace of its C++ code.

    Raises:
        ConfigError: No node of the cluster has its socket on this machine.
    """
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]

    try:
        nodes = GcsClient(address=address).get_all_node_info(timeout=_ANSWER_S).values()
    except Exception:  # an internal interface of Ray; `ray.init` says what is wrong
        return
    if nodes and not any(Path(node.raylet_socket_name).exists() for node in nodes):
        raise ConfigError(
            f"{source} is {address}, and this machine is no node of that cluster; run the command on a node, or send the run "
            "there: nonet submit SCENARIO --address URL, the URL of the cluster's dashboard"
        )


def _check_temporary_folder() -> None:
    """Check that Ray's temporary folder has a short enough path, is writable and has free space."""
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    folder = os.environ[variable] if variable else "/tmp"
    subject = f"{variable} is {folder}" if variable else f"the temporary folder is {folder}"
    max_bytes = _MAX_SOCKET_PATH_BYTES - _RAY_PATH_BYTES
    if len(os.fsencode(folder)) > max_bytes:
        raise ConfigError(
            f"{subject}, {len(os.fsencode(folder))} bytes long; Ray's sockets below it may have {_MAX_SOCKET_PATH_BYTES}, so it "
            f"must have at most {max_bytes}: set RAY_TMPDIR to a shorter folder, such as /tmp"
        )
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{subject}, which is no folder that this process can write to; set RAY_TMPDIR to one"
        )
    if (free_bytes := shutil.disk_usage(folder).free) < _MIN_FREE_BYTES:
        raise ConfigError(
            f"{subject}, with {free_bytes >> 20} MiB left; Ray needs {_MIN_FREE_BYTES >> 20} MiB: free some, or set RAY_TMPDIR "
            "to another folder"
        )


def explain_unreachable(file: Path, token: str) -> str:
    """Return why this process cannot read a file and write into its folder, "" if it can.

    Args:
        file: A file that another process has written.
        token: The content that the file must have.
    """
    if not file.parent.is_dir():
        return "has no such folder"
    try:
        if file.read_text(encoding="utf-8") != token:
            return "reads another file there"
    except OSError as error:
        return f"sees another folder there: {error.strerror}"
    return "" if os.access(file.parent, os.W_OK) else "may not write there"

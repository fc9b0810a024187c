"""Checks of what a process can reach before Ray starts: a cluster's address, a temporary folder, a port, a shared folder."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from pathlib import Path

from nonet.errors import ConfigError

_ANSWER_S = 8.0  # time-out of a connection to a cluster
_SOCKET_BYTES = 107  # longest path of a Unix socket on Linux
_BELOW_BYTES = 68  # longest path that Ray adds to its temporary folder: /ray/session_<time>_<process>/sockets/plasma_store
_FREE_BYTES = 64 << 20


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


def check_port(host: str, port: int) -> None:
    """Check that a server can listen at an address.

    Args:
        host: Name or address of this machine.
        port: 1 to 65535.

    Raises:
        ConfigError: Another process listens there, or the host does not belong to this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        other = "host with --host" if isinstance(error, socket.gaierror) else "port with --port"
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error.strerror}); choose another {other}"
        ) from None


def check_address(address: str, source: str, way_out: str) -> None:
    """Check that a Ray cluster answers at an address, since Ray itself would retry for minutes.

    Args:
        address: `host:port`, with or without `ray://`, or `auto`, which is not checked.
        source: Where the address comes from, for messages.
        way_out: What to do instead, for messages.

    Raises:
        ConfigError: The address is malformed, or no cluster answers there.
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


def _check_temporary_folder() -> None:
    """Check that Ray's temporary folder has a short enough path, is writable and has free space."""
    name = next((each for each in ("RAY_TMPDIR", "TMPDIR") if each in os.environ), None)
    folder = os.environ[name] if name else "/tmp"
    title = f"{name} is {folder}" if name else f"the temporary folder is {folder}"
    most = _SOCKET_BYTES - _BELOW_BYTES
    if len(os.fsencode(folder)) > most:
        raise ConfigError(
            f"{title}, {len(os.fsencode(folder))} bytes long; Ray's sockets below it may have {_SOCKET_BYTES}, so it "
            f"must have at most {most}: set RAY_TMPDIR to a shorter folder, such as /tmp"
        )
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{title}, which is no folder that this process can write to; set RAY_TMPDIR to one"
        )
    if (free := shutil.disk_usage(folder).free) < _FREE_BYTES:
        raise ConfigError(
            f"{title}, with {free >> 20} MiB left; Ray needs {_FREE_BYTES >> 20} MiB: free some, or set RAY_TMPDIR to "
            "another folder"
        )


def explain_unreachable(file: Path, token: str) -> str:
    """Return why this process cannot read a file and write beside it, "" where it can.

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

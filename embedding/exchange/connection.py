"""Connects the ranks of one machine for exchanges through shared memory.

Each rank opens a Unix socket with a random abstract address and sends the address with a random token to the others through
the process group. A rank connects to the sockets of the lower ranks and proves itself by their tokens.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nonet.embedding.exchange.shared_memory import LocalWire, load_core
from nonet.embedding.tables import NativeUnavailable

_TOKEN_BYTES = 16
_CONNECT_TIMEOUT_S = 10.0


def connect(rank: int, group: Any) -> LocalWire | None:
    """Connect the ranks of a group through shared memory; every rank of the group calls it at the same time.

    Returns:
        A LocalWire if all ranks are on this machine and can connect; else None on all ranks.
    """
    world = dist.get_world_size(group)
    if dist.get_backend(group) != "gloo" or not hasattr(os, "memfd_create"):
        return None
    token, address = secrets.token_bytes(_TOKEN_BYTES), "\0nonet-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(world)
        listener.settimeout(_CONNECT_TIMEOUT_S)
        # By rank: the machine (None without the core), the address and the token.
        contacts: list[Any] = [None] * world
        machine = _get_machine_id() if _has_core() else None
        dist.all_gather_object(contacts, (machine, address, token), group=group)
        peers: dict[int, socket.socket] | None = None
        if {machine for machine, *_ in contacts} == {_get_machine_id()}:
            peers = _connect_peers(rank, listener, contacts)
        connected: list[Any] = [None] * world
        dist.all_gather_object(connected, peers is not None, group=group)
    if peers is not None and all(connected):
        return LocalWire(rank, peers, _get_timeout_s(group))
    for peer in (peers or {}).values():
        peer.close()
    return None


def _connect_peers(
    rank: int, listener: socket.socket, contacts: list[Any]
) -> dict[int, socket.socket] | None:
    """Connect to every lower rank and accept every higher one, if it sends this rank's token.

    Returns:
        The connected sockets by rank; None if a connection failed.
    """
    peers: dict[int, socket.socket] = {}
    try:
        for other, (_, address, token) in enumerate(contacts[:rank]):
            peer = peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(_CONNECT_TIMEOUT_S)
            peer.connect(address)
            peer.send(token + struct.pack("<q", rank))
        while len(peers) < len(contacts) - 1:
            peer, _ = listener.accept()
            peer.settimeout(_CONNECT_TIMEOUT_S)
            message = peer.recv(_TOKEN_BYTES + 8)  # The token and the rank.
            _, _, own_token = contacts[rank]
            if message[:_TOKEN_BYTES] != own_token:
                peer.close()  # A connection from outside this world.
                continue
            peers[struct.unpack("<q", message[_TOKEN_BYTES:])[0]] = peer
    except OSError:
        for peer in peers.values():
            peer.close()
        return None
    return dict(sorted(peers.items()))


def _has_core() -> bool:
    try:
        return bool(load_core())
    except NativeUnavailable:
        return False


def _get_machine_id() -> str:
    """Return an identifier of this machine and its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def _get_timeout_s(group: Any) -> float:
    """Return the timeout of a process group in seconds."""
    process_group = group or dist.group.WORLD
    assert process_group is not None
    backend = process_group._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()

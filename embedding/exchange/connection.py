"""Connects the ranks of one machine for exchanges through shared memory."""

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
_CONNECT_S = 10.0


def connect(rank: int, group: Any) -> LocalWire | None:
    """Connect the ranks of a group through shared memory; every rank of the group calls it at the same time.

    Returns:
        A LocalWire if all ranks are on this machine and can connect; else None on all ranks.
    """
    world = dist.get_world_size(group)
    if dist.get_backend(group) != "gloo" or not hasattr(os, "memfd_create"):
        return None
    token, address = secrets.token_bytes(_TOKEN_BYTES), "\0nonet-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(address)
        door.listen(world)
        door.settimeout(_CONNECT_S)
        everyone: list[Any] = [None] * world
        machine = _get_machine_id() if _has_core() else None
        dist.all_gather_object(everyone, (machine, address, token), group=group)
        peers: dict[int, socket.socket] | None = None
        if {machine for machine, *_ in everyone} == {_get_machine_id()}:
            peers = _connect_peers(rank, door, everyone)
        well: list[Any] = [None] * world
        dist.all_gather_object(well, peers is not None, group=group)
    if peers is not None and all(well):
        return LocalWire(rank, peers, _get_timeout_s(group))
    for peer in (peers or {}).values():
        peer.close()
    return None


def _connect_peers(rank: int, door: socket.socket, everyone: list[Any]) -> dict[int, socket.socket] | None:
    """Connect to every lower rank and accept every higher one; both sides check the exchanged token."""
    peers: dict[int, socket.socket] = {}
    try:
        for other, (_, address, token) in enumerate(everyone[:rank]):
            peer = peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(_CONNECT_S)
            peer.connect(address)
            peer.send(token + struct.pack("<q", rank))
        while len(peers) < len(everyone) - 1:
            peer, _ = door.accept()
            peer.settimeout(_CONNECT_S)
            hello = peer.recv(_TOKEN_BYTES + 8)
            if hello[:_TOKEN_BYTES] != everyone[rank][2]:
                peer.close()  # A connection from outside this world.
                continue
            peers[struct.unpack("<q", hello[_TOKEN_BYTES:])[0]] = peer
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
    known = group or dist.group.WORLD
    assert known is not None
    backend = known._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()

"""Connects the ranks of one machine for exchanges through shared memory.

Each rank opens a Unix socket with a random abstract address and sends the address with a random token to the others through
the process group, as bytes of fixed layout: nothing from a network is unpickled. A rank connects to the sockets of
the lower ranks and proves itself by their tokens.
"""

from __future__ import annotations

import hashlib
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
# What a rank sends to all others: the hash of its machine (zeros without the core), the address of its socket, and the token.
_CONTACT = struct.Struct(f"32s39s{_TOKEN_BYTES}s")
_CONNECT_PATIENCE_S = 10.0


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
        listener.settimeout(_CONNECT_PATIENCE_S)
        machine = _hash_machine() if _has_core() else bytes(32)
        contacts = _gather_contacts(_CONTACT.pack(machine, address.encode(), token), world, group)
        peers: dict[int, socket.socket] | None = None
        if {machine for machine, *_ in contacts} == {_hash_machine()}:
            peers = _connect_peers(rank, listener, contacts)
        all_connected = torch.tensor(peers is not None, dtype=torch.uint8)
        dist.all_reduce(all_connected, dist.ReduceOp.MIN, group=group)
    if peers is not None and all_connected:
        return LocalWire(rank, peers, _get_timeout_s(group))
    for peer in (peers or {}).values():
        peer.close()
    return None


def _gather_contacts(own: bytes, world: int, group: Any) -> list[tuple[bytes, bytes, bytes]]:
    """Return the machine, address and token of every rank. Collective."""
    received = [torch.empty(_CONTACT.size, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(received, torch.frombuffer(bytearray(own), dtype=torch.uint8), group=group)
    return [_CONTACT.unpack(bytes(contact.tolist())) for contact in received]


def _connect_peers(
    rank: int, listener: socket.socket, contacts: list[tuple[bytes, bytes, bytes]]
) -> dict[int, socket.socket] | None:
    """Connect to every lower rank and accept every higher one, if it sends this rank's token.

    Returns:
        The connected sockets by rank; None if a connection failed.
    """
    peers: dict[int, socket.socket] = {}
    try:
        for other, (_, address, token) in enumerate(contacts[:rank]):
            peer = peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(_CONNECT_PATIENCE_S)
            peer.connect(address)
            peer.send(token + struct.pack("<q", rank))
        while len(peers) < len(contacts) - 1:
            peer, _ = listener.accept()
            peer.settimeout(_CONNECT_PATIENCE_S)
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


def _hash_machine() -> bytes:
    """Return a hash of this machine's name and boot, 32 bytes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    return hashlib.sha256(name.encode()).digest()


def _get_timeout_s(group: Any) -> float:
    """Return the timeout of a process group in seconds."""
    process_group = group or dist.group.WORLD
    assert process_group is not None
    backend = process_group._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()

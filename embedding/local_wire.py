"""All-to-alls between ranks of one machine: payloads in shared memory, a small message over a Unix socket and a bell for each.

A byte is copied once into memory that its receiver has mapped and once out of it, where loopback TCP copies it through the
kernel in packets; not even that where a sender writes into `outgoing` and a receiver is `shown` what came. An exchange sends
every peer a message even when it has nothing for it, so ranks stay in step: who has everyone's message of exchange n + 1 knows
that all have read n, hence two halves of memory a rank are enough. A peer that dies closes its socket, which ends the others'
waits at once. Nothing has a name in the file system, so nothing is left behind.
"""

# Shapes: W ranks.

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MESSAGE = struct.Struct(
    "<qqq"
)  # where the bytes begin in the sender's memory, how many, the size of that memory
_TOKEN_BYTES, _LEAST_BYTES, _ALIGN = 16, 1 << 20, 64
_CONNECT_S = 10.0


class LocalWire:
    """This rank's end; made by `connect`."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float):
        self._rank, self._peers, self._timeout_s = rank, peers, timeout_s
        # A socket's wake-up lets the scheduler put the woken beside the waker, on one core; an eventfd's does not.
        self._bells = {peer: os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for peer in peers}
        for peer, bell in self._bells.items():
            socket.send_fds(peers[peer], [b"bell"], [bell])
        self._heard = {peer: socket.recv_fds(peers[peer], 4, 1)[1][0] for peer in peers}
        self._half, self._size, self._file = 0, 0, -1
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._knows: dict[int, int] = dict.fromkeys(
            peers, 0
        )  # the size of our memory that each peer has mapped
        self._theirs: dict[int, Tensor] = {}

    def outgoing(self, nbytes: int) -> Tensor:
        """Memory, uint8 [nbytes], that the next exchange sends without a copy when it is given all of it."""
        self._need(nbytes)
        at = (self._half ^ 1) * self._size // 2
        return self._memory[at : at + nbytes]

    def all_to_all(
        self,
        got: Tensor,
        given: Tensor,
        got_counts: list[int],
        given_counts: list[int],
        meanwhile: Callable[[], None] | None = None,
        shown: bool = False,
    ) -> Tensor:
        """What `dist.all_to_all_single` does; RuntimeError when a peer is gone or late.

        Returns `got`; with `shown`, where one rank alone sends, its memory instead, which holds until the next exchange.
        """
        came, parts = _parts(got, got_counts), self._swap(_parts(given, given_counts), meanwhile)
        for rank, (expected, part) in enumerate(zip(came, parts, strict=True)):
            if part.numel() != expected.numel():
                raise RuntimeError(
                    f"rank {rank} sent {part.numel()} bytes where {expected.numel()} were expected"
                )
        senders = [part for part in parts if part.numel()]
        if shown and len(senders) == 1:
            return senders[0].view(got.dtype).view(got.shape)
        for into, part in zip(came, parts, strict=True):
            into.copy_(part)
        return got

    def _swap(self, sent: list[Tensor], meanwhile: Callable[[], None] | None) -> list[Tensor]:
        """The bytes [n] that each rank sends, where they lie until this rank begins its next exchange."""
        self._send(sent)
        if meanwhile is not None:
            meanwhile()
        came = sent.copy()
        waiting = {file: rank for rank, file in self._heard.items()}
        poll = select.poll()
        for rank, file in self._heard.items():
            poll.register(file, select.POLLIN)
            poll.register(self._peers[rank].fileno(), 0)  # only its end
        until = time.monotonic() + self._timeout_s
        while waiting:
            ready = poll.poll(1e3 * max(0.0, until - time.monotonic()))
            if not ready:
                raise RuntimeError(
                    f"no message from rank {sorted(waiting.values())} in {self._timeout_s:g} s"
                )
            rung = [file for file, _ in ready if file in waiting]
            for file in rung:
                rank = waiting.pop(file)
                os.eventfd_read(file)
                poll.unregister(file)
                poll.unregister(self._peers[rank].fileno())
                came[rank] = self._receive(rank)
            if not rung:  # nobody's message, so somebody's end
                ended = {peer.fileno(): rank for rank, peer in self._peers.items()}
                raise RuntimeError(f"rank {ended[ready[0][0]]} closed its connection")
        return came

    def _send(self, parts: list[Tensor]) -> None:
        there = all(self._holds(parts[rank]) for rank in self._peers)
        if not there:
            self._need(sum(-(-parts[rank].numel() // _ALIGN) * _ALIGN for rank in self._peers))
        self._half ^= 1
        at = self._half * self._size // 2
        lost = []
        for rank, peer in self._peers.items():
            count = parts[rank].numel()
            if not there:
                self._memory[at : at + count].copy_(parts[rank])
            elif count:
                at = parts[rank].data_ptr() - self._memory.data_ptr()
            message = _MESSAGE.pack(at, count, self._size)
            try:
                if self._knows[rank] == self._size:
                    peer.send(message)
                else:
                    socket.send_fds(peer, [message], [self._file])
                    self._knows[rank] = self._size
            except OSError as error:
                lost.append(f"rank {rank}: {error}")
            else:
                os.eventfd_write(self._bells[rank], 1)
            at += -(-count // _ALIGN) * _ALIGN
        if lost:
            raise RuntimeError(f"could not send to {'; '.join(lost)}")

    def _holds(self, part: Tensor) -> bool:
        """Whether these bytes lie in the half that goes next."""
        start = part.data_ptr() - self._memory.data_ptr() - (self._half ^ 1) * self._size // 2
        return not part.numel() or 0 <= start <= self._size // 2 - part.numel()

    def _need(self, nbytes: int) -> None:
        if 2 * nbytes > self._size:
            self._grow(2 * max(nbytes * 3 // 2, _LEAST_BYTES))

    def _receive(self, rank: int) -> Tensor:
        try:
            message, files, *_ = socket.recv_fds(self._peers[rank], _MESSAGE.size, 1)
        except OSError as error:
            raise RuntimeError(f"rank {rank} closed its connection: {error}") from error
        if not message:
            raise RuntimeError(f"rank {rank} closed its connection")
        at, count, size = _MESSAGE.unpack(message)
        if files:
            self._theirs[rank] = _mapped(files[0], size)
            os.close(files[0])
        return self._theirs[rank][at : at + count] if count else torch.empty(0, dtype=torch.uint8)

    def _grow(self, size: int) -> None:
        """New memory; the old one lives on where a peer still reads it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = os.memfd_create("nonet-wire")
        os.ftruncate(self._file, size)
        self._memory, self._size = _mapped(self._file, size), size

    def close(self) -> None:
        """Hang up."""
        for peer in self._peers.values():
            peer.close()
        for file in (*self._bells.values(), *self._heard.values(), *[self._file] * (self._file >= 0)):
            os.close(file)
        self._peers, self._bells, self._heard, self._file = {}, {}, {}, -1

    __del__ = close


def connect(rank: int, group: Any) -> LocalWire | None:
    """Every rank of the group calls it at once: a LocalWire when all are on this machine and can connect, else None on all."""
    world = dist.get_world_size(group)
    if dist.get_backend(group) != "gloo" or not (hasattr(os, "memfd_create") and hasattr(os, "eventfd")):
        return None
    token, address = secrets.token_bytes(_TOKEN_BYTES), "\0nonet-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(address)
        door.listen(world)
        door.settimeout(_CONNECT_S)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, (_machine(), address, token), group=group)
        peers: dict[int, socket.socket] | None = None
        if len({machine for machine, *_ in everyone}) == 1:
            peers = _met(rank, door, everyone)
        well: list[Any] = [None] * world
        dist.all_gather_object(well, peers is not None, group=group)
    if peers is not None and all(well):
        return LocalWire(rank, peers, _timeout_s(group))
    for peer in (peers or {}).values():
        peer.close()
    return None


def _met(rank: int, door: socket.socket, everyone: list[Any]) -> dict[int, socket.socket] | None:
    """A connection to every other rank: to lower ones we go, higher ones come; both show the token they were told."""
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
                peer.close()  # nobody of this world
                continue
            peers[struct.unpack("<q", hello[_TOKEN_BYTES:])[0]] = peer
    except OSError:
        for peer in peers.values():
            peer.close()
        return None
    return dict(sorted(peers.items()))


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def _timeout_s(group: Any) -> float:
    known = group or dist.group.WORLD
    assert known is not None
    backend = known._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _parts(tensor: Tensor, counts: list[int]) -> list[Tensor]:
    """Each rank's rows as bytes."""
    if not tensor.numel():
        return [torch.empty(0, dtype=torch.uint8) for _ in counts]
    width = tensor.element_size() * (tensor.numel() // len(tensor))
    flat = tensor.reshape(-1).view(torch.uint8)
    return list(torch.split(flat, [count * width for count in counts]))

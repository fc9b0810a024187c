"""All-to-alls between ranks of one machine: payloads in shared memory, a letter about each on the receiver's board.

A byte is copied once into memory that its receiver has mapped and once out of it, where loopback TCP copies it through the
kernel in packets; not even once at the sender where it writes into `get_outgoing`. An exchange is one call of the core
(native/exchange.cpp) without the GIL, so other threads of the process disturb it little. Every rank writes to every other
one, even when it has nothing for it, so ranks stay in step: who has everyone's letter of exchange n + 1 knows that all have
read those of n, hence two halves of memory a rank are enough. Rows may be copied out while later ones are still written
(`announce`, `gather`). A peer that dies hangs up its socket, which ends the others' waits. Nothing has a name in the file
system, so nothing is left behind.
"""

# Shapes: W ranks, N rows asked for.

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable
from ctypes import byref, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nonet.embedding.tables import NativeUnavailable, load_library

_TOKEN_BYTES, _LEAST_BYTES = 16, 1 << 20
_CONNECT_S = 10.0
_NO_BYTES = np.empty(0, dtype=np.uint8)


class _RanksStruct(ctypes.Structure):
    """nonet::Ranks."""

    _fields_ = [
        ("rank", c_int64), ("world", c_int64), ("boards", c_void_p), ("sockets", c_void_p), ("timeout_ns", c_int64),
    ]  # fmt: skip


class _Int64Array:
    """int64 [count] and its address, which NumPy takes a microsecond to say."""

    def __init__(self, count: int):
        self.array = np.zeros(count, dtype=np.int64)
        self.at = self.array.ctypes.data


class LocalWire:
    """This rank's end; made by `connect`."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float):
        world = len(peers) + 1
        self._rank, self._peers, self._world = rank, peers, world
        self._quick, self._core = _load_core()
        self._boards = self._swap_boards(self._core.nonet_board_bytes(world))
        # What the peers' letters say, and where their rows begin.
        self._at, self._count, self._size = (_Int64Array(world) for _ in range(3))
        self._counts, self._starts, self._rows = (
            _Int64Array(world),
            _Int64Array(world + 1),
            _Int64Array(world),
        )
        self._addresses = np.array([board.ctypes.data for board in self._boards], dtype=np.uint64)
        files = [peers[other].fileno() if other in peers else -1 for other in range(world)]
        self._sockets = np.array(files, dtype=np.int32)
        self._ranks = byref(
            _RanksStruct(
                rank, world, self._addresses.ctypes.data, self._sockets.ctypes.data, int(1e9 * timeout_s)
            )
        )
        self._timeout_s, self._number = timeout_s, 0
        self._file, self._memory = -1, _NO_BYTES
        self._told = 0  # the size of our memory that the peers have been told
        self._theirs = [_NO_BYTES] * world

    def get_outgoing(self, nbytes: int) -> np.ndarray:
        """Memory, uint8 [nbytes], that the next exchange sends."""
        if 2 * nbytes > len(self._memory):
            self._grow(2 * max(nbytes * 3 // 2, _LEAST_BYTES))
        at = self._get_half_offset(self._number + 1)
        return self._memory[at : at + nbytes]

    def exchange(
        self,
        got: Tensor,
        given: Tensor,
        got_counts: list[int],
        given_counts: list[int],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """What `dist.all_to_all_single` does; RuntimeError when a peer is gone or late."""
        sent, width = _view_bytes(given), _count_row_bytes(given)
        self.get_outgoing(len(sent))[:] = sent
        parts = self.swap([count * width for count in given_counts], meanwhile)
        into, width, start = _view_bytes(got), _count_row_bytes(got), 0
        for rank, (part, count) in enumerate(zip(parts, got_counts, strict=True)):
            self._check_size(rank, len(part), count * width)
            into[start : start + len(part)] = part
            start += len(part)

    def swap(self, counts: list[int], meanwhile: Callable[[], None] | None = None) -> list[np.ndarray]:
        """Send what `get_outgoing` gave last, so many bytes to each rank [W]; the bytes [n] that each rank sends.

        These lie where they came until this rank begins its next exchange.
        """
        own = self._get_half_offset(self._number + 1) + sum(counts[: self._rank])
        self._post(counts, True)
        if meanwhile is not None:
            meanwhile()
        came = self._await()
        came[self._rank] = self._memory[own : own + counts[self._rank]]
        return came

    def announce(self, counts: list[int]) -> None:
        """Begin an exchange whose bytes are not there yet: counts [W] of what `get_outgoing` gave last, none of them our own.

        `publish_bytes` says when they are there; `gather` or `finish` ends the exchange.
        """
        self._post(counts, False)

    def publish_bytes(self, nbytes: int) -> None:
        """The first bytes of those that were announced are there."""
        self._quick.nonet_tell(self._ranks, self._number, nbytes)

    def finish(self) -> None:
        """Wait for the peers' announcements where nothing was asked for."""
        self._await()

    def gather(self, place: np.ndarray, counts: list[int], own: Tensor, out: Tensor) -> None:
        """Rows that the peers announced, as they come: row i of `out` [N, D] is number place[i] of all ranks' rows.

        counts [W]: how many rows each rank has of them; this rank's are `own`, of the type of `out`.
        """
        came, width = self._await(), _count_row_bytes(out)
        for rank, part in enumerate(came):
            if rank != self._rank:
                self._check_size(rank, len(part), counts[rank] * width)
        self._rows.array[:] = [part.ctypes.data for part in came]
        self._rows.array[self._rank] = own.data_ptr()
        np.cumsum(counts, out=self._starts.array[1:])
        self._check_code(
            self._core.nonet_gather(
                self._ranks, self._number, self._rows.at, self._starts.at, place.ctypes.data, len(place),
                width, out.data_ptr(),
            )
        )  # fmt: skip

    def close(self) -> None:
        """Hang up."""
        for peer in self._peers.values():
            peer.close()
        if self._file >= 0:
            os.close(self._file)
        self._peers, self._file = {}, -1

    __del__ = close

    def _post(self, counts: list[int], ready: bool) -> None:
        self._number += 1
        if self._told != len(self._memory):
            for rank, peer in self._peers.items():
                try:
                    socket.send_fds(peer, [b"memory"], [self._file])
                except OSError as error:
                    raise RuntimeError(f"could not send to rank {rank}: {error}") from error
            self._told = len(self._memory)
        self._counts.array[:] = counts
        self._quick.nonet_post(
            self._ranks,
            self._number,
            self._get_half_offset(self._number),
            self._counts.at,
            len(self._memory),
            ready,
        )

    def _await(self) -> list[np.ndarray]:
        """The bytes that the peers' letters tell of; none for this rank."""
        self._check_code(
            self._core.nonet_await(self._ranks, self._number, self._at.at, self._count.at, self._size.at)
        )
        letters = zip(
            *(numbers.array.tolist() for numbers in (self._at, self._count, self._size)), strict=True
        )
        came = []
        for rank, (at, count, size) in enumerate(letters):
            if rank != self._rank and size != len(self._theirs[rank]):
                self._theirs[rank] = self._map_peer_memory(rank, size)
            came.append(self._theirs[rank][at : at + count])
        return came

    def _map_peer_memory(self, rank: int, size: int) -> np.ndarray:
        """The peer's new memory, of which it sent the file before the letter."""
        try:
            message, files, *_ = socket.recv_fds(self._peers[rank], len(b"memory"), 1)
        except OSError as error:
            raise RuntimeError(f"rank {rank} closed its connection: {error}") from error
        if not message:
            raise RuntimeError(f"rank {rank} closed its connection")
        try:
            return _map_file(files[0], size)
        finally:
            os.close(files[0])

    def _check_size(self, rank: int, got: int, expected: int) -> None:
        if got != expected:
            raise RuntimeError(f"rank {rank} sent {got} bytes where {expected} were expected")

    def _check_code(self, code: int) -> None:
        if code <= -1 - self._world:
            raise RuntimeError(f"rank {-1 - self._world - code} closed its connection")
        if code < 0:
            raise RuntimeError(f"no message from rank {-1 - code} in {self._timeout_s:g} s")

    def _get_half_offset(self, number: int) -> int:
        """Where the memory of this exchange begins."""
        return (number & 1) * len(self._memory) // 2

    def _grow(self, size: int) -> None:
        """New memory; the old one lives on where a peer still reads it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = _create_memory_file(size)
        self._memory = _map_file(self._file, size)

    def _swap_boards(self, nbytes: int) -> list[np.ndarray]:
        """Every rank's board, mapped; ours goes to all."""
        file = _create_memory_file(nbytes)
        own = _map_file(file, nbytes)
        for peer in self._peers.values():
            socket.send_fds(peer, [b"board"], [file])
        os.close(file)
        boards = {self._rank: own}
        for rank, peer in self._peers.items():
            theirs = socket.recv_fds(peer, len(b"board"), 1)[1][0]
            boards[rank] = _map_file(theirs, nbytes)
            os.close(theirs)
        return [boards[rank] for rank in range(self._world)]


@cache
def _load_core() -> tuple[Any, Any]:
    """The core twice: for calls that take less time than to give the GIL away, and for calls that wait."""
    core = load_library()
    quick = ctypes.PyDLL(core._name, handle=core._handle)
    ranks = at = c_void_p
    for binding, name, answer, arguments in (
        (core, "board_bytes", c_int64, (c_int64,)),
        (quick, "post", None, (ranks, c_uint64, c_int64, at, c_int64, c_int64)),
        (quick, "tell", None, (ranks, c_uint64, c_int64)),
        (core, "await", c_int64, (ranks, c_uint64, at, at, at)),
        (core, "gather", c_int64, (ranks, c_uint64, at, at, at, c_int64, c_int64, at)),
    ):
        function = getattr(binding, f"nonet_{name}")
        function.restype, function.argtypes = answer, arguments
    return quick, core


def _has_core() -> bool:
    try:
        return bool(_load_core())
    except NativeUnavailable:
        return False


def connect(rank: int, group: Any) -> LocalWire | None:
    """Every rank of the group calls it at once: a LocalWire when all are on this machine and can connect, else None on all."""
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


def _get_machine_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def _get_timeout_s(group: Any) -> float:
    known = group or dist.group.WORLD
    assert known is not None
    backend = known._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


def _create_memory_file(size: int) -> int:
    """Memory with a file descriptor, which other processes can map."""
    file = os.memfd_create("nonet-wire")
    os.ftruncate(file, size)
    return file


def _map_file(file: int, size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)


def _view_bytes(tensor: Tensor) -> np.ndarray:
    """A contiguous tensor's bytes, a view."""
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else _NO_BYTES


def _count_row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * (tensor.numel() // len(tensor)) if len(tensor) else 0

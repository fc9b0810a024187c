"""All-to-alls between the ranks of one machine: payloads in shared memory, message headers in the receiver's mailbox.

A byte is copied once into memory that the receiver has mapped and once out of it, where loopback TCP copies it
through the kernel in packets. A sender that writes to `get_outgoing` saves the first copy. An exchange is one call
of the core (native/exchange.cpp) without the GIL, so that it disturbs other threads of the process little.

Every rank posts a header to every other rank, even without a payload, so that ranks stay in step: a rank that has
all headers of exchange n + 1 knows that all ranks have read exchange n. Two halves of memory per rank are therefore
enough. Rows may be copied out while later ones are still being written (`announce`, `gather`). The socket of a peer
that dies is closed, which ends the waits of the others. Nothing has a name in the file system, so nothing is left
behind.
"""

# Shapes: W ranks, N requested rows.

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Callable
from ctypes import byref, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.tables import load_library

_LEAST_BYTES = 1 << 20
_NO_BYTES = np.empty(0, dtype=np.uint8)


class _RanksStruct(ctypes.Structure):
    """The ctypes layout of `nonet::Ranks`."""

    _fields_ = [
        ("rank", c_int64), ("world", c_int64), ("boards", c_void_p), ("sockets", c_void_p), ("timeout_ns", c_int64),
    ]  # fmt: skip


class _Int64Array:
    """An int64 [count] array with its address, which takes NumPy a microsecond to compute."""

    def __init__(self, count: int):
        self.array = np.zeros(count, dtype=np.int64)
        self.at = self.array.ctypes.data


class LocalWire:
    """One rank's end of the exchanges through shared memory, created by `connect`."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float):
        world = len(peers) + 1
        self._rank, self._peers, self._world = rank, peers, world
        self._quick, self._core = load_core()
        self._boards = self._swap_boards(self._core.nonet_board_bytes(world))
        # The contents of the peers' headers, and where their rows begin.
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
        self._told = 0  # The size of this rank's memory that the peers know.
        self._theirs = [_NO_BYTES] * world

    def get_outgoing(self, nbytes: int) -> np.ndarray:
        """Return memory, uint8 [nbytes], whose contents the next exchange sends."""
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
        """Exchange rows as `dist.all_to_all_single` does.

        Args:
            got: The tensor that receives the rows.
            given: The rows to send.
            got_counts: The number of rows to receive from each rank [W].
            given_counts: The number of rows to send to each rank [W].
            meanwhile: A function to call while the rows are in transit.

        Raises:
            RuntimeError: If a peer is missing or late.
        """
        sent, width = _view_bytes(given), _count_row_bytes(given)
        self.get_outgoing(len(sent))[:] = sent
        parts = self.swap([count * width for count in given_counts], meanwhile)
        into, width, start = _view_bytes(got), _count_row_bytes(got), 0
        for rank, (part, count) in enumerate(zip(parts, got_counts, strict=True)):
            self._check_size(rank, len(part), count * width)
            into[start : start + len(part)] = part
            start += len(part)

    def swap(self, counts: list[int], meanwhile: Callable[[], None] | None = None) -> list[np.ndarray]:
        """Send the memory that `get_outgoing` returned last, and receive the payloads of all ranks.

        Args:
            counts: The number of bytes to send to each rank [W].
            meanwhile: A function to call while the payloads are in transit.

        Returns:
            The bytes [n] from each rank [W], valid until this rank begins its next exchange.
        """
        own = self._get_half_offset(self._number + 1) + sum(counts[: self._rank])
        self._post(counts, True)
        if meanwhile is not None:
            meanwhile()
        came = self._await()
        came[self._rank] = self._memory[own : own + counts[self._rank]]
        return came

    def announce(self, counts: list[int]) -> None:
        """Begin an exchange whose payload is not written yet; `gather` or `finish` ends it.

        Args:
            counts: The number of bytes for each rank [W] in the memory that `get_outgoing` returned last, 0 for
                this rank. `publish_bytes` reports when they are written.
        """
        self._post(counts, False)

    def publish_bytes(self, nbytes: int) -> None:
        """Report that the first `nbytes` of the announced bytes are written."""
        self._quick.nonet_tell(self._ranks, self._number, nbytes)

    def finish(self) -> None:
        """Wait for the announcements of the peers without reading rows."""
        self._await()

    def gather(self, place: np.ndarray, counts: list[int], own: Tensor, out: Tensor) -> None:
        """Copy the rows that the peers announced, as they are written.

        Args:
            place: For row i of `out`, its number among the rows of all ranks, int64 [N].
            counts: The number of rows from each rank [W].
            own: This rank's rows, of the dtype of `out`.
            out: The tensor to write to [N, D].
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
        """Close the connections and the memory file."""
        for peer in self._peers.values():
            peer.close()
        if self._file >= 0:
            os.close(self._file)
        self._peers, self._file = {}, -1

    __del__ = close

    def _post(self, counts: list[int], ready: bool) -> None:
        """Post the header of the next exchange to every rank, and the memory file if it is new."""
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
        """Wait for the peers' headers and return the bytes that they describe; none for this rank."""
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
        """Map a peer's new memory, whose file it sent before the header."""
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
        """Convert a negative code of the core to an error."""
        if code <= -1 - self._world:
            raise RuntimeError(f"rank {-1 - self._world - code} closed its connection")
        if code < 0:
            raise RuntimeError(f"no message from rank {-1 - code} in {self._timeout_s:g} s")

    def _get_half_offset(self, number: int) -> int:
        """Return the offset of the half of the memory that an exchange uses."""
        return (number & 1) * len(self._memory) // 2

    def _grow(self, size: int) -> None:
        """Allocate new memory; the old memory stays valid where a peer still reads it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = _create_memory_file(size)
        self._memory = _map_file(self._file, size)

    def _swap_boards(self, nbytes: int) -> list[np.ndarray]:
        """Exchange the mailboxes and return those of all ranks, mapped."""
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
def load_core() -> tuple[Any, Any]:
    """Load the core twice: with the GIL for calls shorter than releasing it, and without it for calls that wait."""
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


def _create_memory_file(size: int) -> int:
    """Create memory with a file descriptor, which other processes can map."""
    file = os.memfd_create("nonet-wire")
    os.ftruncate(file, size)
    return file


def _map_file(file: int, size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)


def _view_bytes(tensor: Tensor) -> np.ndarray:
    """Return a view of a contiguous tensor's bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else _NO_BYTES


def _count_row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * (tensor.numel() // len(tensor)) if len(tensor) else 0

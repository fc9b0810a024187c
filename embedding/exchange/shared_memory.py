"""All-to-alls between the ranks of one machine: payloads in shared memory, message headers in the receiver's mailbox.

A byte is copied once into memory that the receiver has mapped and once out of it; loopback TCP would copy it through
the kernel in packets. A sender that writes to `get_outgoing` saves the first copy. An exchange is one call
of the core (native/exchange.cpp) without the GIL, so that it disturbs other threads of the process little.

Every rank posts a header to every other rank, even without a payload, so that ranks stay in step: a rank that has
all headers of exchange n + 1 knows that all ranks have read exchange n. Exchanges therefore use the two halves of a
rank's memory in turn. Rows may be copied out while later ones are still being written (`announce`, `gather`). The
socket of a peer that dies is closed, which ends the waits of the others. The memory has no name in the file system,
so nothing is left behind.
"""

# Shapes: W ranks, N requested rows, D width.

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

_MIN_BYTES = (
    1 << 20
)  # The smallest size of a half, so that small first exchanges do not cause several growths.
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
        self.address = self.array.ctypes.data


class LocalWire:
    """One rank's end of the exchanges through shared memory, created by `connect`.

    Args:
        rank: This rank.
        peers: A connected socket to every other rank, by rank.
        timeout_s: The longest wait for a header or for rows.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float):
        world = len(peers) + 1
        self._rank, self._peers, self._world = rank, peers, world
        self._quick, self._core = load_core()  # The core called with the GIL, and without it.
        self._boards = self._swap_boards(self._core.nonet_board_bytes(world))
        # The contents of the peers' headers [W]: offset and size of the payload, and size of the peer's memory, in bytes.
        self._header_columns = [_Int64Array(world) for _ in range(3)]
        self._counts = _Int64Array(world)  # The bytes that this rank sends to each rank.
        # For `gather`: the number of the first row of each rank among all rows, and the address of its first row.
        self._starts, self._rows = _Int64Array(world + 1), _Int64Array(world)
        self._addresses = np.array([board.ctypes.data for board in self._boards], dtype=np.uint64)
        files = [peers[other].fileno() if other in peers else -1 for other in range(world)]
        self._sockets = np.array(files, dtype=np.int32)
        self._ranks = byref(
            _RanksStruct(
                rank, world, self._addresses.ctypes.data, self._sockets.ctypes.data, int(1e9 * timeout_s)
            )
        )
        self._timeout_s, self._number = timeout_s, 0  # The number of the current exchange.
        self._file, self._memory = -1, _NO_BYTES
        self._sent_size = 0  # The size of the memory whose file this rank has sent to the peers, in bytes.
        self._peer_memories = [_NO_BYTES] * world

    def get_outgoing(self, nbytes: int) -> np.ndarray:
        """Return memory, uint8 [nbytes], whose contents the next exchange sends."""
        if 2 * nbytes > len(self._memory):  # The memory has two halves; they grow by at least a half.
            self._grow(2 * max(nbytes * 3 // 2, _MIN_BYTES))
        offset = self._get_half_offset(self._number + 1)
        return self._memory[offset : offset + nbytes]

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
        given_bytes, row_bytes = _view_bytes(given), _count_row_bytes(given)
        self.get_outgoing(len(given_bytes))[:] = given_bytes
        payloads = self.swap([count * row_bytes for count in given_counts], meanwhile)
        got_bytes, row_bytes, start = _view_bytes(got), _count_row_bytes(got), 0
        for rank, (payload, count) in enumerate(zip(payloads, got_counts, strict=True)):
            self._check_size(rank, len(payload), count * row_bytes)
            got_bytes[start : start + len(payload)] = payload
            start += len(payload)

    def swap(self, counts: list[int], meanwhile: Callable[[], None] | None = None) -> list[np.ndarray]:
        """Send the memory that `get_outgoing` returned last, and receive the payloads of all ranks.

        Args:
            counts: The number of bytes to send to each rank [W].
            meanwhile: A function to call while the payloads are in transit.

        Returns:
            The payload from each rank [W], uint8, valid until this rank begins its next exchange.
        """
        own_start = self._get_half_offset(self._number + 1) + sum(counts[: self._rank])
        self._post(counts, ready=True)
        if meanwhile is not None:
            meanwhile()
        payloads = self._receive()
        payloads[self._rank] = self._memory[own_start : own_start + counts[self._rank]]
        return payloads

    def announce(self, counts: list[int]) -> None:
        """Begin an exchange whose payload is not written yet; `gather` or `finish` ends it.

        Args:
            counts: The number of bytes for each rank [W] in the memory that `get_outgoing` returned last, 0 for
                this rank. `publish_bytes` reports when they are written.
        """
        self._post(counts, ready=False)

    def publish_bytes(self, nbytes: int) -> None:
        """Report that the first `nbytes` of the announced bytes are written."""
        self._quick.nonet_tell(self._ranks, self._number, nbytes)

    def finish(self) -> None:
        """Wait for the announcements of the peers without reading rows."""
        self._receive()

    def gather(self, place: np.ndarray, counts: list[int], own: Tensor, out: Tensor) -> None:
        """Copy the rows that the peers announced, as they are written.

        Args:
            place: For row i of `out`, its number among the rows of all ranks in the order of the ranks, int64 [N].
            counts: The number of rows from each rank [W].
            own: This rank's rows, of the dtype of `out`.
            out: The tensor to write to [N, D].
        """
        payloads, row_bytes = self._receive(), _count_row_bytes(out)
        for rank, payload in enumerate(payloads):
            if rank != self._rank:
                self._check_size(rank, len(payload), counts[rank] * row_bytes)
        self._rows.array[:] = [payload.ctypes.data for payload in payloads]
        self._rows.array[self._rank] = own.data_ptr()
        np.cumsum(counts, out=self._starts.array[1:])
        self._check_code(
            self._core.nonet_gather(
                self._ranks, self._number, self._rows.address, self._starts.address, place.ctypes.data, len(place),
                row_bytes, out.data_ptr(),
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
        """Begin the next exchange: send its header to every rank, after the memory file if that is new.

        Args:
            counts: The number of bytes for each rank [W].
            ready: Whether all bytes are written; otherwise `publish_bytes` reports them.
        """
        self._number += 1
        if self._sent_size != len(self._memory):
            for rank, peer in self._peers.items():
                try:
                    socket.send_fds(peer, [b"memory"], [self._file])
                except OSError as error:
                    raise RuntimeError(f"could not send to rank {rank}: {error}") from error
            self._sent_size = len(self._memory)
        self._counts.array[:] = counts
        self._quick.nonet_post(
            self._ranks,
            self._number,
            self._get_half_offset(self._number),
            self._counts.address,
            len(self._memory),
            ready,
        )

    def _receive(self) -> list[np.ndarray]:
        """Wait for the peers' headers and return the payloads that they describe [W], uint8; no bytes for this rank."""
        self._check_code(
            self._core.nonet_await(
                self._ranks, self._number, *(column.address for column in self._header_columns)
            )
        )
        headers = zip(*(column.array.tolist() for column in self._header_columns), strict=True)
        payloads = []
        for rank, (offset, count, memory_size) in enumerate(headers):
            if rank != self._rank and memory_size != len(self._peer_memories[rank]):
                self._peer_memories[rank] = self._map_peer_memory(rank, memory_size)
            payloads.append(self._peer_memories[rank][offset : offset + count])
        return payloads

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
        """Raise RuntimeError for a negative code of the core: -1 - rank is a timeout, -1 - W - rank a closed connection."""
        if code <= -1 - self._world:
            raise RuntimeError(f"rank {-1 - self._world - code} closed its connection")
        if code < 0:
            raise RuntimeError(f"no message from rank {-1 - code} in {self._timeout_s:g} s")

    def _get_half_offset(self, number: int) -> int:
        """Return the offset in bytes of the half of the memory that the exchange with this number uses."""
        return (number & 1) * len(self._memory) // 2

    def _grow(self, size: int) -> None:
        """Allocate new memory; the old memory stays valid where a peer still reads it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = _create_memory_file(size)
        self._memory = _map_file(self._file, size)

    def _swap_boards(self, nbytes: int) -> list[np.ndarray]:
        """Create this rank's mailbox of `nbytes`, exchange it with the peers, and return the mapped mailboxes [W]."""
        file = _create_memory_file(nbytes)
        own_board = _map_file(file, nbytes)
        for peer in self._peers.values():
            socket.send_fds(peer, [b"board"], [file])
        os.close(file)
        boards = {self._rank: own_board}
        for rank, peer in self._peers.items():
            peer_file = socket.recv_fds(peer, len(b"board"), 1)[1][0]
            boards[rank] = _map_file(peer_file, nbytes)
            os.close(peer_file)
        return [boards[rank] for rank in range(self._world)]


@cache
def load_core() -> tuple[Any, Any]:
    """Bind the core's functions of an exchange.

    Returns:
        A library whose calls keep the GIL, for calls that are shorter than releasing it, and one whose calls release it,
        for calls that wait.
    """
    core = load_library()
    quick = ctypes.PyDLL(core._name, handle=core._handle)
    ranks = array = c_void_p  # A pointer to `nonet::Ranks`, and one to an array.
    for binding, name, result, arguments in (
        (core, "board_bytes", c_int64, (c_int64,)),
        (quick, "post", None, (ranks, c_uint64, c_int64, array, c_int64, c_int64)),
        (quick, "tell", None, (ranks, c_uint64, c_int64)),
        (core, "await", c_int64, (ranks, c_uint64, array, array, array)),
        (core, "gather", c_int64, (ranks, c_uint64, array, array, array, c_int64, c_int64, array)),
    ):
        function = getattr(binding, f"nonet_{name}")
        function.restype, function.argtypes = result, arguments
    return quick, core


def _create_memory_file(size: int) -> int:
    """Create memory of `size` bytes that other processes can map, and return its file descriptor."""
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

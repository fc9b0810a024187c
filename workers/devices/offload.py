"""Offloading: the buffers of a group are on its device or in host memory, and are moved between them.

    RESIDENT ── offload ──▶ MOVING ──▶ OFFLOADED ── resume ──▶ MOVING ──▶ RESIDENT

A move to the device is checked against the device's account before a byte is copied. A move that fails part-way is
undone, so all buffers are always on one side. Tensors keep their identity: their storage is emptied and filled again
with the same bits (that of tied weights once), so optimizers and fused roles that hold them need no change. On cpu the
bytes are written to a memory-mapped file, so the process's memory really shrinks. The planner's memory ledger decides
which groups take turns; this module carries the moves out.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError, PlacementError
from nonet.workers.devices.vendors import get_device


class ResidencyState(Enum):
    """Where the buffers of a group are."""

    RESIDENT = "resident"
    MOVING = "moving"
    OFFLOADED = "offloaded"


class MemoryAccount:
    """An account of the bytes of one device by owner; thread-safe.

    Attributes:
        capacity_bytes: Bytes of the device, 0 for no limit.
    """

    def __init__(self, capacity_bytes: int = 0):
        self.capacity_bytes = capacity_bytes
        self._bytes_by_owner: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def held(self) -> dict[str, int]:
        """The bytes held, by owner."""
        with self._lock:
            return dict(self._bytes_by_owner)

    def reserve(self, owner: str, wanted_bytes: int) -> None:
        """Record that an owner holds this number of bytes, instead of what it held before.

        Raises:
            PlacementError: The bytes do not fit on the device; nothing is recorded.
        """
        with self._lock:
            other_bytes = {name: held for name, held in self._bytes_by_owner.items() if name != owner}
            if self.capacity_bytes and sum(other_bytes.values()) + wanted_bytes > self.capacity_bytes:
                holders = ", ".join(f"{name} {held}" for name, held in other_bytes.items())
                raise PlacementError(
                    f"{owner} needs {wanted_bytes} resident bytes, the device has {self.capacity_bytes} "
                    f"and {holders or 'nobody'} held there; offload one of them first"
                )
            self._bytes_by_owner[owner] = wanted_bytes

    def release(self, owner: str) -> None:
        """Record that an owner holds nothing."""
        with self._lock:
            self._bytes_by_owner.pop(owner, None)


class OffloadableBuffers:
    """The buffers of one group in this process, which can be offloaded and resumed.

    Args:
        owner: Name of the group, for messages.
        list_tensors: Lists the tensors; called at every move, so that tensors made since (optimizer states) are moved
            too.
        account: The account of the device; by default one without limit.
        mapped_file_dir: Folder of the mapped files on cpu; by default the temporary folder.
    """

    def __init__(
        self,
        owner: str,
        list_tensors: Callable[[], Iterable[Tensor]],
        account: MemoryAccount | None = None,
        *,
        mapped_file_dir: Path | None = None,
    ):
        self.owner, self.account = owner, account or MemoryAccount()
        self._list_tensors, self._mapped_file_dir = list_tensors, mapped_file_dir
        self._host_copies: list[tuple[Any, Tensor]] = []  # The emptied storages, and their bytes on the host.
        self._move_lock = threading.Lock()
        self.state = ResidencyState.RESIDENT
        self.account.reserve(owner, self.resident_bytes)

    @property
    def resident_bytes(self) -> int:
        """The bytes on the device now."""
        return sum(storage.nbytes() for storage in self._list_storages())

    @property
    def offloaded_bytes(self) -> int:
        """The bytes in host memory now."""
        return sum(host_copy.numel() for _, host_copy in self._host_copies)

    def offload(self) -> int:
        """Move every buffer to host memory. Returns the bytes moved.

        Raises:
            PlacementError: The buffers are not resident.
        """
        with self._hold_move(ResidencyState.RESIDENT, "offload"):
            host_copies: list[tuple[Any, Tensor]] = []
            try:
                for storage in self._list_storages():
                    host_copies.append((storage, _copy_to_host(storage, self._mapped_file_dir)))
            except BaseException:
                self.state = ResidencyState.RESIDENT  # Only copies were made; no storage was emptied.
                raise
            for storage, _ in host_copies:
                storage.resize_(0)
            for kind in {storage.device.type for storage, _ in host_copies}:
                get_device(kind).release()
            self._host_copies = host_copies
            self.account.release(self.owner)
            self.state = ResidencyState.OFFLOADED
            return self.offloaded_bytes

    def resume(self) -> int:
        """Move every buffer back to the device. Returns the bytes moved.

        Raises:
            PlacementError: The buffers are not offloaded, or the device has no room.
        """
        with self._hold_move(ResidencyState.OFFLOADED, "resume"):
            size_bytes, resized_storages = self.offloaded_bytes, []
            try:
                self.account.reserve(self.owner, size_bytes)
                for storage, host_copy in self._host_copies:
                    resized_storages.append(storage)
                    storage.resize_(host_copy.numel())
                    _view_bytes(storage).copy_(host_copy)
            except BaseException:
                for storage in resized_storages:
                    storage.resize_(0)
                self.account.release(self.owner)
                self.state = ResidencyState.OFFLOADED
                raise
            self._host_copies = []
            self.state = ResidencyState.RESIDENT
            return size_bytes

    @contextmanager
    def _hold_move(self, expected: ResidencyState, action: str) -> Iterator[None]:
        """Set the state to MOVING within a context, which must set the state at its end; admits one move at a time.

        Raises:
            PlacementError: Another move is running, or the state is not `expected`.
        """
        if not self._move_lock.acquire(blocking=False):
            raise PlacementError(f"{self.owner} is moving: wait for that move before you {action}")
        try:
            if self.state is not expected:
                raise PlacementError(
                    f"cannot {action} {self.owner}: it is {self.state.value}, not {expected.value}"
                )
            self.state = ResidencyState.MOVING
            yield
        finally:
            self._move_lock.release()

    def _list_storages(self) -> list[Any]:
        """Return the storages of the tensors, each once, in the order of the tensors."""
        storages: dict[int, Any] = {}
        for tensor in self._list_tensors():
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage)
        return list(storages.values())


def list_training_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[Tensor]:
    """Return the parameters, gradients and buffers of a model, and the states of its optimizer."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for states in (optimizer.state if optimizer else {}).values():
        tensors += [value for value in states.values() if isinstance(value, Tensor)]
    return tensors


def _copy_to_host(storage: Any, folder: Path | None) -> Tensor:
    """Copy a storage to the host: to pinned memory from a device, to a memory-mapped file from host memory."""
    if not storage.resizable():
        raise ConfigError(
            "a buffer's memory belongs to NumPy or a mapped file and cannot be released; clone it first"
        )
    source = _view_bytes(storage)
    if source.device.type != "cpu":
        return torch.empty(source.shape, dtype=torch.uint8, pin_memory=True).copy_(source)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="nonet-parked-") as file:
        file.truncate(max(1, storage.nbytes()))
        mapped = torch.from_file(file.name, shared=True, size=storage.nbytes(), dtype=torch.uint8)
        return mapped.copy_(source)  # The mapping exists longer than the file's name.


def _view_bytes(storage: Any) -> Tensor:
    """View a whole storage as bytes, without a graph or a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

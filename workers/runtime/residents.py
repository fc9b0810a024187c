"""The roles of one process whose buffers are on its device, and those whose buffers are offloaded to host memory.

A buffer that several fused roles share is offloaded only when every role that holds it is offloaded; a buffer that
one role holds (such as the trainer's optimizer state beside a fused rollout) is offloaded with that role. A call of
an offloaded role is rejected before it runs, so nothing ever computes on an empty storage. The roles that hold a buffer
are its holders; one `OffloadableBuffers` for each distinct set of holders performs the copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from nonet.errors import NotResident
from nonet.workers.devices import OffloadableBuffers
from nonet.workers.runtime.worker import DistributeWorker


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """The bytes that one process offloaded and resumed, and the bytes on its device afterwards.

    Attributes:
        offload: Bytes moved to host memory.
        resume: Bytes moved back to the device.
        resident: Bytes on the device after the move.
    """

    offload: int
    resume: int
    resident: int


class RoleOffloader:
    """The roles of one process and the state of their buffers.

    Args:
        process_name: Name of the process, for messages.
        roles: The workers by role.

    Attributes:
        away: The offloaded roles.
    """

    def __init__(self, process_name: str, roles: Mapping[str, DistributeWorker]):
        self._process_name, self._roles = process_name, roles
        self.away: frozenset[str] = frozenset()
        self._offloaded_buffers: dict[frozenset[str], OffloadableBuffers] = {}  # By their holders.

    def offload_roles(self, offloaded_roles: Collection[str]) -> OffloadStats:
        """Offload exactly these roles and bring all others back to the device; offloads run first.

        If a move raises PlacementError, the roles of both the old and the new set stay marked as offloaded.
        """
        new_away = frozenset(offloaded_roles)
        self.away |= new_away
        offloaded_bytes = sum(
            self._offload(holders, tensors)
            for holders, tensors in self._group_resident_tensors().items()
            if holders <= new_away
        )
        resumed_bytes = 0
        for holders in [holders for holders in self._offloaded_buffers if not holders <= new_away]:
            resumed_bytes += self._offloaded_buffers[holders].resume()
            del self._offloaded_buffers[holders]
        self.away = new_away
        return OffloadStats(offload=offloaded_bytes, resume=resumed_bytes, resident=self.resident_bytes)

    def require_resident(self, role: str) -> None:
        """Raise NotResident if the role is offloaded.

        Roles that never hold device buffers, because they do not override `device_tensors`, always pass.
        """
        has_buffers = type(self._roles[role]).device_tensors is not DistributeWorker.device_tensors
        if role in self.away and has_buffers:
            raise NotResident(
                f"{self._process_name}: the buffers of {role!r} are offloaded to host memory; the call was rejected. "
                f"Enter the phase that uses {role!r} before calling it"
            )

    @property
    def resident_bytes(self) -> int:
        """Bytes of all roles on the device now."""
        return sum(
            tensor.untyped_storage().nbytes()
            for tensors in self._group_resident_tensors().values()
            for tensor in tensors
        )

    def _offload(self, holders: frozenset[str], tensors: list[Tensor]) -> int:
        """Offload the tensors of a set of holders. Returns the bytes moved."""
        buffers = OffloadableBuffers(f"{self._process_name} {' + '.join(sorted(holders))}", lambda: tensors)
        moved_bytes = buffers.offload()
        self._offloaded_buffers[holders] = buffers
        return moved_bytes

    def _group_resident_tensors(self) -> dict[frozenset[str], list[Tensor]]:
        """Return one tensor of each storage on the device, by the set of roles that hold it."""
        holders_by_storage: dict[int, set[str]] = {}
        tensor_by_storage: dict[int, Tensor] = {}
        for role, worker in self._roles.items():
            for tensor in worker.device_tensors():
                storage = tensor.untyped_storage()
                if storage.nbytes():  # An offloaded storage is empty.
                    holders_by_storage.setdefault(storage._cdata, set()).add(role)
                    tensor_by_storage[storage._cdata] = tensor
        tensors_by_holders: dict[frozenset[str], list[Tensor]] = {}
        for storage_id, tensor in tensor_by_storage.items():
            tensors_by_holders.setdefault(frozenset(holders_by_storage[storage_id]), []).append(tensor)
        return tensors_by_holders

"""Residents: which roles of one process have their buffers on its device, and which wait in host memory.

A buffer that several fused roles hold is away only when all of them are; what one role alone holds (a trainer's optimizer,
gradients and reference beside a fused rollout) goes with that role. A call of a role that is away is refused before it runs,
so nothing ever computes on an empty storage. One `Residency` a set of holders carries the moves out.
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
    """What a move did in one process: bytes out and back, and what is on the device after it."""

    offload: int
    resume: int
    resident: int


class RoleOffloader:
    """The roles of one process. `who`: its name, for messages."""

    def __init__(self, process_name: str, roles: Mapping[str, DistributeWorker]):
        self._who, self._roles = process_name, roles
        self.away: frozenset[str] = frozenset()
        self._parked: dict[frozenset[str], OffloadableBuffers] = {}

    def offload_roles(self, offloaded_roles: Collection[str]) -> OffloadStats:
        """Let these roles be away and all others be here, offloads first. Raises PlacementError; whoever is between is away."""
        parked_roles = frozenset(offloaded_roles)
        self.away |= parked_roles
        gone = sum(
            self._offload(holders, tensors)
            for holders, tensors in self._group_resident_tensors().items()
            if holders <= parked_roles
        )
        resumed = 0
        for holders in [holders for holders in self._parked if not holders <= parked_roles]:
            resumed += self._parked[holders].resume()
            del self._parked[holders]
        self.away = parked_roles
        return OffloadStats(gone, resumed, self.resident_bytes)

    def require_resident(self, role: str) -> None:
        """Raises NotResident where the role's buffers wait in host memory; a role that has none on the device may always work."""
        if (
            role in self.away
            and type(self._roles[role]).list_device_tensors is not DistributeWorker.list_device_tensors
        ):
            raise NotResident(
                f"{self._who}: the buffers of {role!r} wait in host memory while another group works; the call did not run. "
                "Let the session enter the phase it works in first"
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
        residency = OffloadableBuffers(f"{self._who} {' + '.join(sorted(holders))}", lambda: tensors)
        moved = residency.offload()
        self._parked[holders] = residency
        return moved

    def _group_resident_tensors(self) -> dict[frozenset[str], list[Tensor]]:
        """One tensor of each storage that is here, by the roles that hold it; parked ones are empty and left out."""
        holders: dict[int, set[str]] = {}
        tensors: dict[int, Tensor] = {}
        for role, worker in self._roles.items():
            for tensor in worker.list_device_tensors():
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    holders.setdefault(storage._cdata, set()).add(role)
                    tensors[storage._cdata] = tensor
        by_holders: dict[frozenset[str], list[Tensor]] = {}
        for key, tensor in tensors.items():
            by_holders.setdefault(frozenset(holders[key]), []).append(tensor)
        return by_holders

"""DistributeWorker: the base class of all roles, shipped or written by users.

A worker knows its place (rank, world, device, peers in the same process) before `setup` runs. It holds no Ray handle:
the host actor calls it, so the same class runs fused, collocated or alone, and in a plain process in a test.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nonet.deadlines import DEFAULTS
from nonet.storage import MountedRun
from nonet.trust import TrustState
from nonet.workers.runtime.rendezvous import StoreAddress, join_role_process_group


@dataclass(slots=True)
class Place:
    """The place of a worker.

    Attributes:
        role: Name of the role; of the actor group, for the process that hosts the role.
        rank: Rank in the group.
        world: Number of ranks.
        local_rank: Rank among the group's workers on this node.
        node: Ray's node id, shortened; "local" outside Ray.
        device: Torch device, such as "cpu" or "cuda:0".
        threads: Number of torch threads, 0 for a role that uses no torch.
        peers: The other roles in the same process (fused), by name.
        meeting: The store through which the ranks of the group meet; None outside a group.
        deadline_s: Seconds to wait for a value of another rank; ranks wait twice as long for each other in a
            collective.
        mounts: The runs in object storage whose files the process may read and write.
        trust: The folders whose code the process checks before it imports it, and the approved hashes.
    """

    role: str = "worker"
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: str = "local"
    device: str = "cpu"
    threads: int = 1
    peers: dict[str, Any] = field(default_factory=dict)
    meeting: StoreAddress | None = None
    deadline_s: float = DEFAULTS.step
    mounts: tuple[MountedRun, ...] = ()
    trust: TrustState = field(default_factory=TrustState)


class DistributeWorker:
    """Base class of workers. Mark methods with `@nonet.method` and call them through a `WorkerGroup`."""

    place: Place = Place()

    @property
    def rank(self) -> int:
        """The rank in the group."""
        return self.place.rank

    @property
    def world(self) -> int:
        """The number of ranks of the group."""
        return self.place.world

    @property
    def device(self) -> str:
        """The torch device, such as "cpu" or "cuda:0"."""
        return self.place.device

    @property
    def local_rank(self) -> int:
        """The rank among the group's workers on this node."""
        return self.place.local_rank

    @property
    def node(self) -> str:
        """Ray's node id, shortened; "local" outside Ray."""
        return self.place.node

    @property
    def log(self) -> logging.Logger:
        """A logger named after the worker, e.g. `nonet.rollout-3`."""
        return logging.getLogger(f"nonet.{self.place.role}-{self.place.rank}")

    @property
    def process_group(self) -> Any:
        """The group's own torch.distributed process group on the backend of its device, created on first access.

        Every rank must access it in the same call. Raises ConfigError outside a group.
        """
        return join_role_process_group(self.place)

    def device_tensors(self) -> Iterable[Any]:
        """Return the tensors that this role keeps on its device between calls, which are offloaded when groups take turns."""
        return ()

    def setup(self) -> None:
        """Set up the worker; called once, after its place is known and every fused peer is constructed."""

    def teardown(self) -> None:
        """Tear down the worker; called once before a graceful stop."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """The class of a role and the arguments of its constructor."""

    cls: type[DistributeWorker]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

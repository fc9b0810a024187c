"""DistributeWorker: what every role is, ours and the user's.

A worker knows its place (rank, world, device, peers in the same process) before `setup` runs. It holds no Ray handle: the
host actor calls it, so the same class runs fused, collocated or alone, and in a plain process in a test.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nonet.deadlines import DEFAULTS


@dataclass(slots=True)
class Place:
    """Where a worker is.

    role, rank, world   its group, and its place in it
    local_rank          its place among the group's workers on this node
    node                Ray's node id (short), "local" outside Ray
    device              "cpu", "cuda:0", ...
    threads             torch threads it may use; 0: the role needs no torch
    peers               the other roles in the same process (fused), by role
    meeting, listener   where the group's ranks meet, and rank 0's socket there
    deadline_s          of fetching what another rank made; ranks wait twice as long for each other in a collective
    """

    role: str = "worker"
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: str = "local"
    device: str = "cpu"
    threads: int = 1
    peers: dict[str, Any] = field(default_factory=dict)
    meeting: tuple[str, int] = ("", 0)
    listener: Any = None
    deadline_s: float = DEFAULTS.step


class DistributeWorker:
    """Base of all workers. Subclass it, mark methods with `@nonet.method`, drive them through a `WorkerGroup`."""

    place: Place = Place()

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def device(self) -> str:
        return self.place.device

    @property
    def local_rank(self) -> int:
        return self.place.local_rank

    @property
    def node(self) -> str:
        return self.place.node

    @property
    def log(self) -> logging.Logger:
        """A logger named after the worker, e.g. `nonet.rollout-3`."""
        return logging.getLogger(f"nonet.{self.place.role}-{self.place.rank}")

    @property
    def process_group(self) -> Any:
        """The group's own torch.distributed process group on its device's backend; ranks meet when first asked.

        Every rank must ask, in the same call. Raises ConfigError outside a group.
        """
        from nonet.workers.runtime.process_group import join_role_process_group

        return join_role_process_group(self.place)

    def list_device_tensors(self) -> Iterable[Any]:
        """Tensors that this role keeps on its device between calls: what moves to host memory when groups take turns."""
        return ()

    def setup(self) -> None:
        """Called once in the worker's process, after its place is known and every fused peer is constructed."""

    def teardown(self) -> None:
        """Called once before a graceful stop."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How to make one role: its class and constructor arguments."""

    cls: type[DistributeWorker]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

"""Process groups of torch.distributed: joining and leaving.

Trainers are the first ranks, and embedding shards in processes of their own are the last ones. The time-out of a group
is twice the step deadline instead of torch's 30 minutes. When a rank is lost, all ranks join a new group with a new
epoch, which is the prefix of its keys in the store (docs/explanation/design.md, section 5).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nonet.deadlines import DEFAULTS
from nonet.errors import ConfigError
from nonet.workers.devices import get_device
from nonet.workers.runtime.rendezvous.interfaces import choose_interfaces
from nonet.workers.runtime.rendezvous.stores import StoreAddress, connect_store, host_store


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The store and the layout of a process group that ranks join.

    Attributes:
        store: Address of the store.
        epoch: Number of the group; every group that is formed after the loss of a rank has a new number.
        trainers: Number of trainer ranks.
        shards: Number of embedding shards in processes of their own, 0 if they are fused with trainers.
        step_s: Step deadline in seconds.
    """

    store: StoreAddress
    epoch: int
    trainers: int
    shards: int
    step_s: float = DEFAULTS.step

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.trainers + self.shards


@dataclass(slots=True)
class Membership:
    """The rank of this process in a process group, and handles of the group.

    Attributes:
        rank: Rank of this process.
        world: Number of ranks.
        world_group: The group of all ranks.
        trainers: The process group of the trainers, None in a world of one.
        n_trainers: Number of trainers.
        trainers_backend: Backend of the trainers' group.
        timeout: Time-out of the groups.
        tensor: Number of trainers of a tensor group, which compute the same samples together: ranks 0 to `tensor` - 1, and so on.
        tensor_group: The process group of this rank's tensor group; None if `tensor` is 1.
    """

    rank: int
    world: int
    world_group: Any = None
    trainers: Any = None
    n_trainers: int = 1
    trainers_backend: str = "gloo"
    timeout: datetime.timedelta = datetime.timedelta(seconds=2 * DEFAULTS.step)
    tensor: int = 1
    tensor_group: Any = None

    @property
    def data_rank(self) -> int:
        """The index of this trainer's share of the samples."""
        return self.rank // self.tensor

    @property
    def data_world(self) -> int:
        """The number of shares into which the trainers divide samples."""
        return self.n_trainers // self.tensor

    @property
    def leads_tensor_group(self) -> bool:
        """Whether this trainer is the one of its tensor group that exchanges sparse rows and is counted in sums."""
        return self.rank % self.tensor == 0

    def make_subgroup(self, ranks: list[int]) -> Any:
        """Create a process group of some trainers, which are the ones that must call it."""
        import torch

        return torch.distributed.new_group(
            ranks, timeout=self.timeout, backend=self.trainers_backend, use_local_synchronization=True
        )

    def sum_over_trainers(self, *values: float) -> list[float]:
        """Return the sums of these numbers over the trainers, in float64; those of a tensor group count once."""
        return self.sum_over_ranks(*(values if self.leads_tensor_group else [0.0] * len(values)))

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Return the sums of these numbers over all ranks of the trainers, in float64."""
        if self.n_trainers == 1:
            return list(values)
        import torch

        sums = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(sums, group=self.trainers)
        return sums.tolist()

    def share_in_tensor_group(
        self, shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the host tensors of the leader of this rank's tensor group, by name.

        Args:
            shapes: Their shapes by name, in the same order on every rank.
            own: The tensors, of which only those of the leader are used; the dtype is that of each rank's.
        """
        import torch

        shared = {
            name: own[name].contiguous() if self.leads_tensor_group else own[name].new_empty(shape)
            for name, shape in shapes.items()
        }
        for tensor in shared.values():
            torch.distributed.broadcast(tensor, self.rank - self.rank % self.tensor, group=self.tensor_group)
        return shared

    def find_largest(self, value: int) -> int:
        """Return the largest of the trainer ranks' numbers."""
        if self.n_trainers == 1:
            return value
        import torch

        largest = torch.tensor(value)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.trainers)
        return int(largest)

    def gather_distinct_keys(self, keys: Any) -> Any:
        """Return the distinct keys of all trainer ranks, ascending [M] int64; every rank gets the same tensor."""
        if self.n_trainers == 1:
            return keys.unique()
        import torch

        counts = torch.zeros(self.n_trainers, dtype=torch.int64)
        trainer_rank = torch.distributed.get_rank(self.trainers)
        counts[trainer_rank] = len(keys)
        torch.distributed.all_reduce(counts, group=self.trainers)
        padded = torch.zeros(int(counts.max()), dtype=torch.int64)
        padded[: len(keys)] = keys
        keys_by_rank = [torch.empty_like(padded) for _ in range(self.n_trainers)]
        torch.distributed.all_gather(keys_by_rank, padded, group=self.trainers)
        unpadded = [rank_keys[:n] for rank_keys, n in zip(keys_by_rank, counts.tolist(), strict=True)]
        return torch.cat(unpadded).unique()


def join_process_group(
    rendezvous: Rendezvous,
    rank: int,
    backend: str = "gloo",
    trainers_backend: str = "gloo",
    tensor: int = 1,
) -> Membership:
    """Join a process group; blocks until all ranks have joined or the deadline has passed.

    Args:
        rendezvous: The store and the layout of the group.
        rank: Rank of this process.
        backend: Backend of the group of all ranks, which exchanges sparse keys and rows in host memory.
        trainers_backend: Backend of the trainers' own group, whose gradients are on their device.
        tensor: Number of trainers of a tensor group.

    Returns:
        The membership of this process.
    """
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=2 * rendezvous.step_s)
    if dist.is_initialized():
        dist.destroy_process_group()
    store = connect_store(rendezvous.store, rendezvous.world, timeout)
    prefixed = dist.PrefixStore(f"epoch-{rendezvous.epoch}", store)
    choose_interfaces(prefixed, rank, rendezvous.world)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=rendezvous.world, timeout=timeout)
    trainers = dist.new_group(list(range(rendezvous.trainers)), timeout=timeout, backend=trainers_backend)
    membership = Membership(
        rank,
        rendezvous.world,
        dist.group.WORLD,
        trainers,
        rendezvous.trainers,
        trainers_backend,
        timeout,
        tensor,
    )
    if tensor > 1 and rank < rendezvous.trainers:
        first = rank - rank % tensor
        membership.tensor_group = membership.make_subgroup(list(range(first, first + tensor)))
    return membership


class _RolePlace(Protocol):
    """The fields of a worker's `Place` that its role's process group needs; `meeting` is that of its store."""

    role: str
    rank: int
    world: int
    device: str
    meeting: StoreAddress | None
    deadline_s: float


def join_role_process_group(place: _RolePlace) -> Any:
    """Return the process group of a role's ranks; the first call creates it, and rank 0 holds its store.

    Raises:
        ConfigError: The worker does not belong to a `WorkerGroup`.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.group.WORLD
    if place.meeting is None:
        raise ConfigError(
            f"{place.role}-{place.rank} does not belong to a WorkerGroup, which a process group needs: start it in one"
        )
    timeout = datetime.timedelta(seconds=2 * place.deadline_s)
    if place.rank == 0:
        host_store(place.meeting.name).set("open", "")
    store = connect_store(place.meeting, place.world, timeout)
    store.wait(["open"])
    choose_interfaces(store, place.rank, place.world)
    backend = get_device(place.device.partition(":")[0]).backend
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    return dist.group.WORLD


def leave_process_group(membership: Membership) -> None:
    """Destroy the process group, if there is one."""
    if membership.world_group is not None:
        import torch.distributed as dist

        dist.destroy_process_group()

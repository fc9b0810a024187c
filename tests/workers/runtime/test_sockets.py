"""The sockets on which workers listen, while they are in process groups."""

from __future__ import annotations

import psutil
import ray

import nonet
from nonet.workers.runtime import (
    PerRank,
    Rendezvous,
    StoreAddress,
    close_store,
    open_store,
)
from nonet.workers.runtime.rendezvous import join_process_group


def list_listening_addresses():
    """Return the addresses of this process's listening sockets that others than this machine reach."""
    connections = psutil.Process().net_connections("all")
    listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    return sorted(address for address in listening if not address.startswith("127."))


@ray.remote(num_cpus=0)
class PlainActor:
    def list(self):
        return list_listening_addresses()


class Trains(nonet.DistributeWorker):
    @nonet.method(collect="first")
    def open(self) -> StoreAddress | None:
        if self.rank:
            return None
        self.store = open_store()
        return self.store

    @nonet.method(rendezvous=PerRank)
    def join(self, rendezvous):
        return join_process_group(rendezvous, self.rank).sum_over_ranks(self.rank + 1.0)

    @nonet.method()
    def meet(self):
        import torch

        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=self.process_group)
        return float(total)

    @nonet.method()
    def list(self):
        return list_listening_addresses()

    @nonet.method()
    def close(self):
        if self.rank == 0:
            close_store(self.store)


def test_workers_listen_beyond_loopback_where_ray_does_only(ray_local):
    """A group of one role and two groups of a gang, one after the loss of the other, on one node."""
    plain = PlainActor.remote()
    of_ray = ray.get(plain.list.remote())
    group = nonet.WorkerGroup(Trains, workers=2, cpus=0.1)
    try:
        assert group.list().get(120) == [of_ray] * 2
        assert group.meet().get(120) == [2.0, 2.0]
        assert group.list().get(120) == [of_ray] * 2
        for epoch in (0, 1):
            store = group.open().get(120)
            rendezvous = Rendezvous(store, epoch, trainers=2, shards=0, step_s=60)
            assert group.join(PerRank([rendezvous] * 2)).get(120) == [[3.0], [3.0]]
            assert group.list().get(120) == [of_ray] * 2
            group.close().get(120)
    finally:
        group.hosts.kill()
        ray.kill(plain)

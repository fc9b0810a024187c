"""A sparse world whose ranks are threads of one process: the real exchanges, over memory instead of gloo."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from nonet.embedding.exchange.all_to_all import Wire
from nonet.embedding.exchange.layout import RankLayout
from nonet.embedding.training.sharded_tables import ShardedTables

WAIT_S = 300


class Meeting:
    """Where the ranks put what they give."""

    def __init__(self, world):
        self.barrier, self.given = threading.Barrier(world, timeout=WAIT_S), [None] * world


class ThreadWire(Wire):
    def __init__(self, layout, names, meeting):
        super().__init__(layout, None, names)
        self._meeting = meeting

    def _exchange(self, got, given, got_counts, given_counts, meanwhile=None):
        if meanwhile is not None:
            meanwhile()
        rank, meeting = self._layout.rank, self._meeting
        meeting.given[rank] = torch.split(given, given_counts)
        meeting.barrier.wait()
        parts = [other[rank] for other in meeting.given]
        assert [len(part) for part in parts] == got_counts
        torch.cat(parts, out=got) if sum(got_counts) else None
        meeting.barrier.wait()


class ThreadWorld(ShardedTables):
    def __init__(self, specs, layout, meeting, **options):
        super().__init__(specs, seed=7, layout=layout, **options)
        self.wire = ThreadWire(layout, list(specs), meeting)

    def _check_layout(self):
        pass


def apart(specs, trainers, shards, **options):
    """Worlds of trainers and shards, the shards serving in threads: (worlds, threads)."""
    meeting = Meeting(trainers + shards)
    worlds = [
        ThreadWorld(specs, RankLayout.separate(rank, trainers, shards), meeting, **options)
        for rank in range(trainers + shards)
    ]
    threads = [threading.Thread(target=world.serve, daemon=True) for world in worlds[trainers:]]
    for thread in threads:
        thread.start()
    return worlds, threads


def fused(specs, world, **options):
    """Worlds whose ranks train and hold."""
    meeting = Meeting(world)
    return [ThreadWorld(specs, RankLayout.fused(rank, world), meeting, **options) for rank in range(world)]


def together(calls):
    """Run all calls at the same time, and return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(call) for call in calls]]

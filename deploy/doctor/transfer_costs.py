"""What crossing processes costs, for `nonet doctor --calibrate`: a sparse pull and push by all-to-all, an all-reduce, a Ray call,
a publication of rows.

Wall clock, medians of several: what a step waits for is the wall's time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.controller.predict import LinearCost
from nonet.deploy.doctor.ranks import beside
from nonet.embedding.exchange import Layout
from nonet.embedding.reading import ReplicaReader, join_updates, make_update
from nonet.embedding.tables import TableSpec
from nonet.embedding.training import ShardedTables
from nonet.timing import Times, median_s
from nonet.workers import buckets, pack, unpack
from nonet.workers.runtime import (
    DistributeWorker,
    Rendezvous,
    Replicate,
    join_process_group,
    leave,
    method,
)

_DIM, _SEED = 32, 7
_TABLE = {"item": TableSpec(dim=_DIM)}


class Echo(DistributeWorker):
    """Answers with bytes, passes them on; exports rows and weights and takes them up, as trainers, shards and rollouts do."""

    @method(collect="first")
    def zeros(self, count: int) -> bytes:
        """So many zero bytes."""
        return bytes(count)

    @method(value=Replicate)
    def take(self, value: bytes) -> int:
        """What another worker answered."""
        return len(value)

    @method(collect="first")
    def weights(self, count: int) -> np.ndarray:
        """A model of so many bytes, packed."""
        if not hasattr(self, "_dense") or self._dense["weight"].nbytes != count // 4 * 4:
            self._dense = {"weight": torch.zeros(count // 4)}
        (bucket,) = buckets(self._dense, count)
        return pack(bucket, self._dense)

    @method(packed=Replicate)
    def load(self, packed: np.ndarray) -> int:
        """Unpack a model and copy it into one of this process."""
        return sum(values.copy().nbytes for _, values in unpack(packed).pieces.values())

    @method()
    def fill(self, rows: int) -> None:
        """A table of so many rows, and an empty replica."""
        self._world, self._replica = ShardedTables(_TABLE, seed=_SEED), ReplicaReader({"item": _DIM})
        self._world.pull("item", torch.arange(rows))

    @method(collect="concat")
    def export(self, version: int) -> list[dict[str, Any]]:
        """All rows, as a full update."""
        return [make_update(self._world.tables, version)]

    @method(updates=Replicate)
    def apply(self, updates: list[dict[str, Any]]) -> int:
        """Take an update up; its version."""
        return self._replica.apply(join_updates(updates))


def line(points: Sequence[tuple[float, float]]) -> LinearCost:
    """The line through two measures, neither part below zero."""
    (small, at_small), (large, at_large) = points
    unit = max(1e-12, (at_large - at_small) / (large - small))
    return LinearCost(max(0.0, at_small - small * unit), unit)


def measure_exchange() -> tuple[LinearCost, LinearCost]:
    """Pull + push of a table over two processes, and an all-reduce, each at two sizes; wall clock."""
    with beside(exchange_rank, 2) as (host, port):
        return exchange_rank(host, port, 0, 2)


def exchange_rank(host: str, port: int, rank: int, ranks: int) -> tuple[LinearCost, LinearCost]:
    """One of the processes: pull + push of keys, and an all-reduce of bytes."""
    torch.set_num_threads(1)
    member = join_process_group(Rendezvous(host, port, 0, ranks, 0), rank)
    try:
        world = ShardedTables(
            _TABLE, seed=_SEED, layout=Layout.fused(rank, ranks), group=member.world_group, local=True
        )
        steps = itertools.count(1)

        def there_and_back(keys: Tensor, grads: Tensor) -> None:
            world.pull("item", keys)
            world.push("item", keys, grads, next(steps))

        points = []
        for keys in (200, 5000):
            ids, grads = torch.arange(keys), torch.ones(keys, _DIM)
            points.append((keys, median_s(lambda w=ids, g=grads: there_and_back(w, g), 15)))
        sums = []
        for length in (16, 1 << 19):
            flat = torch.ones(length)
            sums.append(
                (
                    4 * length,
                    median_s(lambda f=flat: torch.distributed.all_reduce(f, group=member.trainers), 15),
                )
            )
        return line(points), line(sums)
    finally:
        leave(member)


def measure_calls() -> tuple[dict[str, LinearCost], float]:
    """Lines by name (call, hop, weights, publish), and the start of a worker that imports torch."""
    import ray

    from nonet.workers.runtime import WorkerGroup, ensure_ray

    mine = not ray.is_initialized()
    ensure_ray()
    try:
        source = WorkerGroup(Echo, cpus=0.1)
        source.zeros(1).get(120)
        with Times() as starting:
            sink = WorkerGroup(Echo, cpus=0.1)
            sink.zeros(1).get(120)
        lines = {
            "call": _line(lambda n: source.zeros(n).get(60), (100, 8 << 20)),
            "hop": _line(lambda n: sink.take(source.zeros(n)).get(60), (20_000, 8 << 20)),
            "weights": _line(lambda n: sink.load(source.weights(n)).get(60), (100_000, 8 << 20)),
        }
        rows = [(count, _publication(source, sink, count)) for count in (500, 20_000)]
        source.stop()
        sink.stop()
        return lines | {"publish": line(rows)}, starting.last_s
    finally:
        if mine:
            ray.shutdown()


def _line(work: Callable[[int], Any], sizes: tuple[int, int]) -> LinearCost:
    return line([(size, median_s(lambda n=size: work(n), 9)) for size in sizes])


def _publication(source: Any, sink: Any, rows: int) -> float:
    """Wall seconds of a full update of so many rows, from a table to a replica in another process."""
    source.fill(rows).get(60)
    sink.fill(rows).get(60)
    versions = itertools.count(1)

    def publish() -> None:
        sink.apply(source.export(next(versions))).get(60)

    return median_s(publish, 9)

"""The two sides of `nonet bench dispatch`: a DistributeWorker and plain Ray actors that do the same work."""

from __future__ import annotations

from typing import Any

import numpy as np

from nonet.workers.runtime import DistributeWorker, Replicate, Shard, method

_MIB = 1 << 20


class Echo(DistributeWorker):
    """Gives back what it gets."""

    @method(collect="list")
    def nop(self) -> None:
        """Nothing."""

    @method(rows=Shard, collect="concat")
    def echo(self, rows: Any) -> Any:
        """The same rows."""
        return rows

    @method(data=Replicate, collect="list")
    def size(self, data: Any) -> int:
        """Bytes received."""
        return data.nbytes

    @method(collect="concat")
    def make(self, mib: int) -> np.ndarray:
        """Rows of one MiB each."""
        return np.zeros((mib, _MIB), np.uint8)

    @method(rows=Shard, collect="sum")
    def take(self, rows: np.ndarray) -> int:
        """Rows received."""
        return len(rows)


def start_plain_actors(world: int) -> list[Any]:
    """Plain actors with the same methods."""
    import ray

    @ray.remote(num_cpus=0.1)
    class Plain:
        def nop(self) -> None:
            pass

        def echo(self, rows: Any) -> Any:
            return rows

    return [Plain.remote() for _ in range(world)]  # type: ignore[attr-defined]


def measure_reference_growth(group: Any) -> int:
    """Bytes by which this process's private memory grows while 1 GiB goes from worker to worker by reference."""
    import gc

    import psutil

    process = psutil.Process()
    group.take(group.make(4)).get()
    gc.collect()
    before = process.memory_full_info().uss
    moved = 0
    while moved < 1024:
        moved += group.take(group.make(16)).get()
    gc.collect()
    return process.memory_full_info().uss - before

"""The two sides of `nonet bench dispatch`: a DistributeWorker and plain Ray actors that do the same work."""

from __future__ import annotations

from typing import Any

import numpy as np

from nonet.workers.runtime import DistributeWorker, Replicate, Shard, method

_MIB = 1 << 20


class Echo(DistributeWorker):
    """A worker that returns its arguments."""

    @method(collect="list")
    def nop(self) -> None:
        """Do nothing."""

    @method(rows=Shard, collect="concat")
    def echo(self, rows: Any) -> Any:
        """Return the same rows."""
        return rows

    @method(data=Replicate, collect="list")
    def size(self, data: Any) -> int:
        """Return the bytes received."""
        return data.nbytes

    @method(collect="concat")
    def make(self, mib: int) -> np.ndarray:
        """Make rows of one MiB each."""
        return np.zeros((mib, _MIB), np.uint8)

    @method(rows=Shard, collect="sum")
    def take(self, rows: np.ndarray) -> int:
        """Return the number of rows received."""
        return len(rows)


def start_plain_actors(world: int) -> list[Any]:
    """Start plain actors with the same methods."""
    import ray

    @ray.remote(num_cpus=0.1)
    class Plain:
        def nop(self) -> None:
            pass

        def echo(self, rows: Any) -> Any:
            return rows

    return [Plain.remote() for _ in range(world)]  # type: ignore[attr-defined]


def measure_reference_growth(group: Any) -> int:
    """Return the growth of this process's private memory in bytes while 1 GiB goes from worker to worker by reference."""
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

"""A remote lookup through Ray's actor calls, as one would write it by hand: the other side of `nonet bench wire`.

A shard is an actor that holds a dense table (no hashing, which flatters it). Keys are an argument, inline below Ray's 100 kB; the
rows are the call's result, which on one machine Ray writes into shared memory once and the caller reads without a copy.
"""

from __future__ import annotations

import time

import numpy as np

from nonet.timing import Times


def through_ray(rounds: int, rows_held: int = 1_000_000, dim: int = 64, keys: int = 8192) -> Times:
    """One caller's lookups from one actor."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=0.5)
    class Shard:
        def __init__(self) -> None:
            import torch

            torch.set_num_threads(1)
            self._table = torch.full((rows_held, dim), 0.5)

        def rows(self, numbers: np.ndarray) -> np.ndarray:
            import torch

            return self._table.index_select(0, torch.from_numpy(numbers.copy())).numpy()

    try:
        shard, source, taken = Shard.remote(), np.random.default_rng(2), Times(time.process_time)
        back = source.permutation(keys)
        for _ in range(rounds):
            numbers = source.integers(0, rows_held, keys)
            with taken:
                ray.get(shard.rows.remote(numbers))[back]
        return taken.from_lap(rounds // 5)
    finally:
        ray.shutdown()

"""Updating a replica by a delta against a full update: `nonet bench sync`.

The table has 1 M rows x 16, of which 1 % changed. The shard makes the update and the replica applies it; bytes are
those of the update's tables. One process, one thread, both in turns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nonet.bench.embedding.keys import scatter_ranks
from nonet.bench.timing import LapTimer

ROWS, DIM = 1_000_000, 16


def measure(rounds: int = 5, rows: int = ROWS, dim: int = DIM) -> dict[str, Any]:
    """Return seconds and bytes of a full update and a delta (and both in fp16), and their ratios."""
    import torch

    from nonet.embedding.reading import ReplicaReader, make_update
    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import ShardedTables

    torch.set_num_threads(1)
    world = ShardedTables({"item": TableSpec(dim)}, seed=7)
    keys = scatter_ranks(np.arange(rows))
    for part in np.array_split(keys, 64):
        world.pull("item", torch.from_numpy(part))
    world.push("item", torch.from_numpy(keys), torch.ones(rows, dim), 1)
    replica = ReplicaReader({"item": dim})
    timers = {"full": LapTimer(), "delta": LapTimer()}
    size: dict[str, int] = {}
    source, step = np.random.default_rng(3), 1
    for _ in range(rounds):
        with timers["full"]:
            update = make_update(world.tables, step)
            replica.apply(update)
        size["full"] = _count_bytes(update)
        touched = torch.from_numpy(keys[source.choice(rows, rows // 100, replace=False)])
        world.push("item", touched, torch.ones(len(touched), dim), step + 1)
        with timers["delta"]:
            update = make_update(world.tables, step + 1, base=step, since=step)
            replica.apply(update)
        size["delta"] = _count_bytes(update)
        size["delta fp16"] = _count_bytes(
            make_update(world.tables, step + 1, base=step, since=step, wire="fp16")
        )
        step += 1
    sample = torch.from_numpy(keys[source.integers(0, rows, 1000)])
    if not torch.equal(replica.read_rows("item", sample), world.pull("item", sample, train=False)):
        raise RuntimeError("the replica's rows are not those of the table")
    median = {name: times.compute_median_s() for name, times in timers.items()}
    rows_: list[dict[str, Any]] = [
        {"update": name, "seconds": seconds, "bytes": size[name]} for name, seconds in median.items()
    ]
    rows_.append({"update": "delta fp16", "bytes": size["delta fp16"]})
    ratio = {
        "delta / full, bytes": size["delta"] / size["full"],
        "delta fp16 / full, bytes": size["delta fp16"] / size["full"],
        "full / delta, seconds": median["full"] / median["delta"],
    }
    return {"rows": rows_, "ratio": ratio}


def _count_bytes(update: dict[str, Any]) -> int:
    return sum(table.nbytes for tables in update["tables"].values() for table in tables)

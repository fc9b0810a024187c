"""One rank of the worlds that test_sharded_tables.py looks at: python world_ranks.py RANK FOLDER.

Three processes run every world in turn, on process groups of two or three of them, and rank 0 the single one.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from nonet.embedding.exchange.layout import RankLayout
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import NonetError

SPECS = {
    "item": TableSpec(8, lr=0.1, init_scale=0.5),
    "user": TableSpec(4, optimizer="adam", lr=0.05),
}
STEPS, BATCH = 6, 64


def train(world, trainer, trainers, rounds=range(1, STEPS + 1)):
    """Pull rows towards targets; the global batch is dealt to the trainers by position."""
    for step in rounds:
        for name, spec in SPECS.items():
            source = np.random.default_rng([step, spec.dim])
            keys = torch.from_numpy(source.zipf(1.3, BATCH) * 1_000_003)[trainer::trainers]
            target = torch.from_numpy(source.standard_normal((BATCH, spec.dim)).astype(np.float32))
            unique, inverse = torch.unique(keys, return_inverse=True)
            rows = world.pull(name, unique).requires_grad_()
            loss = ((torch.nn.functional.embedding(inverse, rows) - target[trainer::trainers]) ** 2).sum()
            loss.backward()
            world.push(name, unique, rows.grad, step, lr=None if step % 2 else 0.02)


def outcome(world):
    """Return what a rank of a finished world holds."""
    tables = world.tables.values()
    return {
        "hash": {table.name: table.hash_state() for table in tables},
        "rows": {table.name: dict(zip(table.keys.tolist(), _rows(table), strict=True)) for table in tables},
        "owns_only_its_slices": all(
            set(table.list_touched_since(-1)) <= _owned(world, table) for table in tables
        ),
    }


def _rows(table):
    return table.lookup(table.keys.copy(), train=False).tolist()


def _owned(world, table):
    from nonet.embedding.slices import compute_slices

    return {
        key for key, place in zip(table.keys, compute_slices(table.keys), strict=True) if place in world.owned
    }


def run(layout, group=None):
    world = ShardedTables(SPECS, seed=7, layout=layout, group=group)
    result = {}
    if layout.trains:
        train(world, layout.rank, len(layout.trainers))
        result["read"] = world.pull("item", torch.tensor([1_000_003, -5]), train=False).tolist()
        world.stop()
    else:
        result["exchanges"] = world.serve()
    return {**result, **outcome(world)}


def disagree(rank, group):
    """Two fused trainers that pull different tables."""
    world = ShardedTables(SPECS, seed=7, layout=RankLayout.fused(rank, 2), group=group)
    try:
        world.pull(["item", "user"][rank], torch.tensor([1]))
    except NonetError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def lose(rank):
    """Imitate a shard that has died."""
    if rank:
        return None
    world = ShardedTables(SPECS, seed=7, layout=RankLayout.separate(0, 2, 1))
    try:
        world.pull("item", torch.tensor([1]))
    except NonetError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
    pair = dist.new_group([0, 1])
    results = {}
    if rank == 0:
        results["single"] = run(RankLayout.single())
    if rank < 2:
        results["fused"] = run(RankLayout.fused(rank, 2), pair)
        results["one_and_one"] = run(RankLayout.separate(rank, 1, 1), pair)
        results["disagree"] = disagree(rank, pair)
    results["two_and_one"] = run(RankLayout.separate(rank, 2, 1))
    results["one_and_two"] = run(RankLayout.separate(rank, 1, 2))
    dist.barrier()
    results["lose"] = lose(rank)
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    # The group of rank 0 has lost its peers by then, and an orderly shutdown would wait for them.
    import os

    os._exit(0)

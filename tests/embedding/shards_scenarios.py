"""What five ranks do for test_shards.py: the same training on one, two and four shards, odd widths, empty ranks, a kill."""

import json
import os

import numpy as np
import torch
import torch.distributed as dist

from nonet.embedding.exchange.layout import RankLayout
from nonet.embedding.slices import compute_slices
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import NonetError

SPECS = {
    "item": TableSpec(8, lr=0.1, init_scale=0.5),
    "one": TableSpec(1, "adam", lr=0.05),
    "wide": TableSpec(4096, "adagrad", lr=0.05),
}


def train(world, trainer, steps=5):
    """Keys with duplicates; trainer 1 has nothing on odd steps, nobody anything on step 3."""
    read = []
    for step in range(1, steps + 1):
        for name, spec in SPECS.items():
            source = np.random.default_rng([step, spec.dim, trainer])
            count = 0 if step == 3 or (trainer and step % 2) else (3 if name == "wide" else 40 * step)
            keys = torch.from_numpy(source.zipf(1.2, count).astype(np.int64) * -7_000_003)
            rows = world.pull(name, keys)
            grads = torch.from_numpy(source.standard_normal((count, spec.dim)).astype(np.float32)) + rows
            read.append(float(rows.double().sum()))
            if step == 2 and name == "item":
                world.pull("item", keys[:5], train=False)  # another pull comes between a pull and its push
            world.push(name, keys, grads, step)
    return read


def hashes(world):
    """Return the bytes of every row by key, with state and step, of every table."""
    found = {}
    for name, table in world.tables.items():
        for part in table.export():
            owners = world.slices.owners[compute_slices(part["key"].to_numpy())]
            assert (owners == world.shard).all()
            for row in part.to_pylist():
                found[f"{name}/{row['key']}"] = repr((row["row"], row["state"], row["step"]))
    return found


def part_of(rank, trainers, shards, group, **options):
    if rank >= trainers + shards:
        return None
    world = ShardedTables(
        SPECS, seed=7, layout=RankLayout.separate(rank, trainers, shards), group=group, **options
    )
    if rank < trainers:
        read = train(world, rank)
        world.stop()
        return {"read": read, "collectives": world.wire.traffic.collectives}
    return {"exchanges": world.serve(), "rows": hashes(world)}


def single():
    world = ShardedTables(SPECS, seed=7)
    return {"read": train(world, 0), "rows": hashes(world)}


def killed(rank, world_size):
    """Kill a shard in the middle of a step; every other rank must raise an error that names it."""
    world = ShardedTables(SPECS, seed=7, layout=RankLayout.separate(rank, 2, world_size - 2))
    if rank == world_size - 1:
        world.wire.exchange_keys(None, None)  # takes part in the first half of a pull
        os.kill(os.getpid(), 9)
    try:
        if rank < 2:
            world.pull("item", torch.arange(200) * 13)
            world.push("item", torch.arange(200) * 13, torch.ones(200, 8), 1)
            return "no error"
        world.serve()
    except NonetError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return "no error"


def main(rank, world_size, folder):
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4, 5)}
    results = {"single": single() if rank == 0 else None}
    for trainers, shards in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 3)):
        group = groups[trainers + shards]
        if rank < trainers + shards:
            results[f"{trainers}x{shards}"] = part_of(rank, trainers, shards, group)
    if rank < 3:
        results["fp16"] = part_of(rank, 1, 2, groups[3], wire="fp16")
    dist.barrier()
    if rank == world_size - 1:
        (folder / f"{rank}.json").write_text(json.dumps(results))  # it does not live to return them
    results["killed"] = killed(rank, world_size)
    return results

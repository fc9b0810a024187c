"""What three ranks do for test_pipeline.py: the same batches with and without overlap."""

import numpy as np
import torch
import torch.distributed as dist

from nonet.embedding.exchange.layout import RankLayout
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.pipeline import PrefetchPipeline
from nonet.embedding.training.sharded_tables import ShardedTables

SPECS = {
    "item": TableSpec(8, "adam", lr=0.1, init_scale=0.5),
    "user": TableSpec(3, "rowwise_adagrad", lr=0.2),
    "half": TableSpec(4, "adagrad", lr=0.2, dtype="bf16"),
}
BATCHES = 14


def read(number, trainer=0):
    """Keys with many repeats in a batch and over batches; some batches are empty."""
    found = {}
    for table in SPECS:
        source = np.random.default_rng([number, trainer, len(table)])
        count = 0 if number % 5 == 3 else 30 + 7 * number
        found[table] = torch.from_numpy(source.zipf(1.3, count) * 1_000_003)
    return found


def compute(number, data, rows):
    """Gradients that depend on every bit of the rows."""
    grads = {table: torch.sin(3 * values) + 0.1 * number for table, values in rows.items()}
    return grads, {table: values.double().sum().item() for table, values in rows.items()}


def trained(world, trainer=0, **options):
    pipeline = PrefetchPipeline(
        world,
        lambda number: read(number, trainer),
        lambda data: data,
        compute,
        lr=lambda number, table: None if number % 2 else 0.05,
        timeout_s=60,
        **options,
    )
    # In two runs: nothing may be in flight between them.
    results = pipeline.run(0, 5) + pipeline.run(5, BATCHES)
    return {"results": results, "carries": pipeline.carries}


def part_of(rank, trainers, shards, group=None, wire="fp32", **options):
    world = ShardedTables(
        SPECS, seed=7, layout=RankLayout.separate(rank, trainers, shards), group=group, wire=wire
    )
    if rank >= trainers:
        world.serve()
        return {"hash": {name: table.hash_state() for name, table in world.tables.items()}}
    found = trained(world, rank, **options)
    world.stop()
    return found


def main(rank, world_size, folder):
    pair = dist.new_group([0, 1])
    results = {}
    for depth in (1, 2, 3, 5):
        results[f"1x2/{depth}"] = part_of(rank, 1, 2, depth=depth)
        results[f"2x1/{depth}"] = part_of(rank, 2, 1, depth=depth)
    if rank < 2:
        for depth in (1, 3):
            results[f"fp16/{depth}"] = part_of(rank, 1, 1, pair, wire="fp16", depth=depth)
    return results

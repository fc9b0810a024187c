"""What three ranks do for test_shared_memory.py: the same all-to-alls through shared memory and through gloo."""

import json
import os

import numpy as np
import torch
import torch.distributed as dist

from nonet.embedding.exchange.connection import connect
from nonet.embedding.exchange.layout import RankLayout
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import WorkerLost


def exchanges(rank, world):
    """Sizes from nothing to more than the first memory, of several types, with something done meanwhile."""
    wire, same, done = connect(rank, None), 0, []
    for number in range(12):
        source = np.random.default_rng(number)
        counts = source.integers(0, 3 if number % 3 else 9000, (world, world))
        counts[number % world] = 0
        dtype, width = [(torch.float32, 40), (torch.int64, 1), (torch.uint8, 7)][number % 3]
        given_counts, got_counts = counts[rank].tolist(), counts[:, rank].tolist()
        given = torch.arange(sum(given_counts) * width).reshape(-1, width).to(dtype) * (rank + 1)
        first, second = (torch.zeros(sum(got_counts), width, dtype=dtype) for _ in range(2))
        wire.exchange(first, given, got_counts, given_counts, lambda: done.append(1))
        dist.all_to_all_single(second, given, got_counts, given_counts)
        same += torch.equal(first, second)
    return {"same": same, "done": len(done)}


def streamed(rank, world):
    """Rows that are announced before they are there, told of in pieces, and gathered with this rank's own among them."""
    wire, same = connect(rank, None), 0
    for number in range(12):
        source = np.random.default_rng(number)
        counts = source.integers(0, 9000 if number % 3 == 0 else 4, (world, world))  # [sender, receiver]
        width = 1 + number % 5
        everything = torch.from_numpy(source.random((world, int(counts.sum()), width), dtype=np.float32))
        blocks = [[everything[a, : counts[a, b]] + b for b in range(world)] for a in range(world)]
        sent = counts[rank].tolist()
        sent[rank] = 0
        rows = torch.cat([blocks[rank][other][: sent[other]] for other in range(world)])
        out = wire.get_outgoing(rows.nbytes).view(np.float32).reshape(-1, width)
        wire.announce([4 * width * count for count in sent])
        for stop in [*sorted(source.integers(0, len(rows) + 1, 3).tolist()), len(rows)]:
            out[:stop] = rows[:stop].numpy()
            wire.publish_bytes(4 * width * stop)
        got = torch.cat([blocks[other][rank] for other in range(world)])
        place = source.integers(0, len(got), 5000 * (len(got) > 0))
        found = torch.empty(len(place), width)
        wire.gather(place, counts[:, rank].tolist(), blocks[rank][rank], found)
        same += torch.equal(found, got[torch.from_numpy(place)])
    return same


def trained(rank, local):
    world = ShardedTables({"item": TableSpec(4)}, seed=7, layout=RankLayout.fused(rank, 3), local=local)
    for step in range(1, 5):
        keys = torch.from_numpy(np.random.default_rng([step, rank]).zipf(1.3, 50 * step))
        rows = world.pull("item", keys)
        world.push("item", keys, torch.sin(rows), step)
    return [world.tables["item"].hash_state(), world.wire._local is not None]


def lost(rank):
    """Check that a rank that dies ends the others' waits long before the group's timeout."""
    world = ShardedTables({"item": TableSpec(4)}, seed=7, layout=RankLayout.fused(rank, 3), local=True)
    world.pull("item", torch.arange(10))
    if rank == 2:
        os._exit(0)
    try:
        world.pull("item", torch.arange(10))
    except WorkerLost as error:
        return str(error)
    return "no error"


def main(rank, world_size, folder):
    results = {"exchanges": exchanges(rank, world_size), "streamed": streamed(rank, world_size)}
    results |= {"local": trained(rank, True), "network": trained(rank, False)}
    if rank == 2:
        (folder / "2.json").write_text(json.dumps(results))
    results["lost"] = lost(rank)
    return results

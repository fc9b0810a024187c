"""What three ranks do for test_collection_shards.py: the same modules trained on one, one apart and two fused."""

import hashlib

import numpy as np
import torch
import torch.distributed as dist

from nonet.embedding.exchange.layout import RankLayout
from nonet.embedding.modules.collection import EmbeddingBagCollection, TableConfig
from nonet.embedding.tables.spec import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.random import rng
from nonet.types import Jagged

CONFIGS = {
    "item": TableConfig(TableSpec(8, lr=0.1, init_scale=0.5), ("item", "history"), "mean"),
    "user": TableConfig(TableSpec(4, lr=0.1, init_scale=0.5), ("user",)),
}
STEPS, ROWS = 6, 32


def world(layout, group=None):
    specs = {name: config.spec for name, config in CONFIGS.items()}
    return ShardedTables(specs, seed=7, layout=layout, group=group)


def batch(step, part, parts):
    """Rows `part` of the step's 32, cut into equal blocks; some have no history."""
    draw = rng(7, "batch", step)
    item, user = draw.integers(0, 200, (2, ROWS))
    lengths = draw.integers(0, 4, ROWS)
    history = np.split(draw.integers(0, 200, int(lengths.sum())), np.cumsum(lengths)[:-1])
    mine = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    cuts = np.concatenate([[0], np.cumsum(lengths[mine])])
    values = np.concatenate([np.empty(0, np.int64), *history[mine]])
    return {
        "item": torch.from_numpy(item[mine]),
        "history": Jagged(torch.from_numpy(values), torch.from_numpy(cuts)),
        "user": torch.from_numpy(user[mine]),
    }


def train(source, part=0, parts=1):
    bags, seen = EmbeddingBagCollection(CONFIGS, source), []
    for step in range(1, STEPS + 1):
        pooled = bags(batch(step, part, parts))
        sum((rows**2).sum() for rows in pooled.values()).backward()
        bags.push(step)
        seen.append(float(sum(rows.sum() for rows in pooled.values())))
    read = bags.eval()(batch(1, 0, 1))
    digest = hashlib.sha256(b"".join(read[name].numpy().tobytes() for name in sorted(read)))
    close = [float(read[name].double().sum()) for name in sorted(read)]
    return {"seen": seen, "read": digest.hexdigest(), "close": close}


def main(rank, ranks, folder):
    found = {}
    pair, apart = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if rank == 0:
        found["single"] = train(world(RankLayout.single()))
    if rank < 2:
        found["fused"] = train(world(RankLayout.fused(rank, 2), pair), rank, 2)
    source = world(RankLayout.separate(rank, 1, 2), apart)
    if rank == 0:
        found["apart"] = train(source)
        source.stop()
    else:
        source.serve()
    return found

"""What two trainers find for test_shared_memory.py when their shard dies between the first rows of an answer and the next."""

import os

import torch

from nonet.embedding.exchange.layout import RankLayout
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import WorkerLost


def main(rank, world_size, folder):
    world = ShardedTables({"item": TableSpec(4)}, seed=7, layout=RankLayout.separate(rank, 2, 1), local=True)
    keys = torch.arange(1000)
    try:
        if rank == 2:
            look, looked = world.tables["item"].lookup, []

            def once(some, **how):
                looked.append(len(some))
                return look(some, **how) if sum(looked) < 5600 else os._exit(0)

            world.tables["item"].lookup = once
            world.serve()
        for _ in range(4):
            world.pull("item", keys, train=False)
    except WorkerLost as error:
        return str(error)
    return "no error"

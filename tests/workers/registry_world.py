"""Small versions for tests of registries: 1,000 rows and one weight."""

from __future__ import annotations

import numpy as np
import torch

from nonet.embedding.reading import RowLayer
from nonet.embedding.tables import TableSpec
from nonet.workers.registry import VersionContents
from nonet.workers.weight_files import write_tensors

SPECS = {"item": TableSpec(4, "sgd", default=0.5)}


def layer(rows, seed=0, count=1000):
    draw = np.random.default_rng(seed)
    key = np.sort(draw.choice(10**6, count, replace=False)).astype(np.int64)
    row = draw.standard_normal((count, 4)).astype(np.float32)
    for place in rows:
        row[place] += 1
    return RowLayer(key, row, np.empty(0, np.int64))


def contents(folder, rows=(), weight=1.0, item=None, step=1):
    path = folder / f"{weight}.safetensors"
    write_tensors(path, {"w": torch.full((8,), weight)})
    return VersionContents(path, {"item": item or layer(rows)}, {}, "trie", {"step": step})


def read(registry, number, keys):
    return registry.open_rows(number, SPECS).read_rows("item", torch.as_tensor(keys))


def before_write(registry, name, act):
    """Call `act` once, when a registry is about to write a file at the address."""
    write, acts = registry._replace_remote, [act]

    def act_and_write(written_name, content, old):
        if written_name.startswith(name) and acts:
            acts.pop()()
        write(written_name, content, old)

    registry._replace_remote = act_and_write

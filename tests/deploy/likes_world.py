"""A small click model's world: users of two kinds who like items of their own kind."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.random import rng

SCENARIO = """
name: likes
seed: 5
data:
  interactions: interactions.parquet
  items: items.parquet
  history: 8
  split: {use: leave_last_out, test: 4, valid: 2}
model: {use: deepfm, hidden: [16], dropout: 0.1}
sparse:
  defaults: {dim: 8, optimizer: adagrad, lr: 0.1}
  tables: {user: {}, item: {features: [item, liked]}, disliked: {}, categories: {}, moment: {features: [hour, age]}}
stages:
  train: {epochs: 4, batch: {tokens: 128}, lr: 3e-3, target: "rating >= 4"}
evaluate: {metrics: [auc, log_loss]}
checkpoint: {every: 20}
"""


def make_likes(folder, users=80, items=40, events=30):
    """Users of two kinds like items of their own kind: nothing that a sum of a user's and an item's weight can tell."""
    draw = rng(1, "likes")
    item = np.stack([draw.permutation(items)[:events] for _ in range(users)])
    kind_U, kind_I = np.arange(users) % 2, np.arange(items) % 2
    liked = (kind_U[:, None] == kind_I[item]) ^ (draw.random(item.shape) < 0.1)
    table = {
        "user_id": np.repeat(np.arange(100, 100 + users), events),
        "item_id": item.ravel() + 1000,
        "timestamp": np.tile(np.arange(events) * 3600, users),
        "rating": np.where(liked, 5.0, 2.0).astype(np.float32).ravel(),
        "age": np.repeat(np.arange(users) // 10, events).astype(np.float32),
    }
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    names = [f"item {i}" for i in range(items)]
    every = {"item_id": np.arange(1000, 1000 + items), "title": names, "categories": [["a"]] * items}
    pq.write_table(pa.table(every), folder / "items.parquet")
    (folder / "likes.yaml").write_text(SCENARIO)
    return folder

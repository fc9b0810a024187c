"""A small world: 60 users who walk a ring of 40 items, as Parquet tables and a scenario that trains in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCENARIO = """
name: ring
seed: 5
data:
  interactions: interactions.parquet
  items: items.parquet
  history: 8
  split: {use: leave_last_out, test: 1, valid: 1, rl: 2}
tokenizer: {use: rq_kmeans, vectors: [title, categories, cooccurrence], levels: 2, codes: 6, dim: 8}
model: {use: sid_decoder, width: 16, layers: 1, heads: 2, dropout: 0.0}
sparse: {tables: {item: {dim: 8}, user: {dim: 8}}}
stages:
  pretrain: {epochs: 3, batch: {users: 10}, lr: 3e-3}
  finetune: {epochs: 1, batch: {users: 10}, lr: 1e-3, target: "rating >= 4"}
  rl:
    steps: 4
    users: 8
    algorithm: {use: grpo, normalise: group}
    rollout: {use: beam, width: 4}
    rewards:
      hit: {weight: 1.0}
      own: {use: rewards/own.py, weight: 0.5, ceiling: 20}
evaluate: {metrics: [recall@5, recall@10, ndcg@5, ndcg@10], width: 10}
checkpoint: {every: 3}
"""

REWARD = """
import nonet


@nonet.reward
def own(item, *, ceiling: float):
    return item < ceiling
"""


def write_tables(folder: Path, users: int = 60, items: int = 40, events: int = 16) -> None:
    """Each user starts somewhere on the ring and mostly goes on to the next item."""
    draw = np.random.default_rng(0)
    steps = draw.choice([1, 2, 3], p=[0.7, 0.2, 0.1], size=(users, events))
    item = (draw.integers(0, items, users)[:, None] + steps.cumsum(1)) % items
    table = {
        "user_id": np.repeat(np.arange(100, 100 + users), events),
        "item_id": item.ravel() + 1000,
        "timestamp": np.tile(np.arange(events) * 3600, users),
        "rating": draw.choice([3.0, 4.0, 5.0], size=users * events).astype(np.float32),
    }
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    names = [f"item {chr(97 + i % 26)}{i}" for i in range(items)]
    kinds = [[f"kind{i % 5}"] for i in range(items)]
    pq.write_table(
        pa.table({"item_id": np.arange(1000, 1000 + items), "title": names, "categories": kinds}),
        folder / "items.parquet",
    )


def make_ring(folder: Path) -> Path:
    """Put tables, ring.yaml and its reward file into a folder; returns it."""
    write_tables(folder)
    (folder / "rewards").mkdir()
    (folder / "rewards" / "own.py").write_text(REWARD)
    (folder / "ring.yaml").write_text(SCENARIO)
    return folder

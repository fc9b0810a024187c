"""Scenarios, a reward file and tables from which `make_exhibits.py` makes runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

USERS, ITEMS, EVENTS = 24, 20, 14

DATA = """
data:
  interactions: {root}/data/log.parquet
  items: {root}/data/catalogue.parquet
  columns: {{user: member, item: sku, time: ts, title: name, categories: kinds}}
  history: 8
"""

SHOP = """
name: shop
seed: 5
{data}
  split: {{use: leave_last_out, test: 1, valid: 1, rl: 2}}
  {more}
tokenizer: {{use: rq_kmeans, vectors: [title, categories, cooccurrence], levels: 2, codes: 5, dim: 8}}
model: {model}
sparse: {{tables: {{item: {{dim: 4}}, user: {{dim: 4}}}}}}
stages:
  pretrain: {{epochs: 2, batch: {{users: 8}}, lr: 3e-3}}
  finetune: {{epochs: 1, batch: {{users: 8}}, lr: 1e-3, target: "rating >= 4"}}
  rl:
    steps: {steps}
    users: 6
    algorithm: {{use: grpo, kl: 0.01}}
    rollout: {{use: beam, width: 4}}
    rewards:
      hit: {{weight: 1.0}}
      own: {{use: rewards/own.py, weight: 0.5, ceiling: 10}}
evaluate: {{metrics: [recall@5, ndcg@5], width: 5}}
checkpoint: {{every: 2}}
"""

CLICKS = """
name: clicks
seed: 5
{data}
  split: {{use: leave_last_out, test: 2, valid: 2}}
model: {{use: deepfm, hidden: [8]}}
sparse:
  defaults: {{dim: 5, optimizer: adagrad, lr: 0.03}}
  tables: {{user: {{}}, item: {{features: [item, liked]}}, categories: {{}}}}
stages:
  train: {{epochs: 1, batch: {{tokens: 64}}, lr: 3e-3, target: "rating >= 4"}}
evaluate: {{metrics: [auc, log_loss]}}
"""

# A click model with two files of labels that arrive later, and a task for each.
LABELS = """
name: labels
seed: 5
{data}
  labels:
  - {{path: {root}/data/carts.parquet, within: 30m, name: carted}}
  - {{path: {root}/data/purchases.parquet, within: 40m, name: bought}}
  split: {{use: leave_last_out, test: 2, valid: 2}}
model: {{use: deepfm, hidden: [8], experts: 2, towers: [4]}}
sparse:
  defaults: {{dim: 5, optimizer: adagrad, lr: 0.03}}
  tables: {{user: {{}}, item: {{features: [item, liked]}}, categories: {{}}}}
stages:
  train:
    epochs: 1
    batch: {{tokens: 64}}
    lr: 3e-3
    target: "rating >= 4"
    tasks:
      cart: "carted == 1"
      paid: {{target: "bought == 1", weight: 0.5}}
evaluate: {{metrics: [auc, log_loss, auc@cart, log_loss@paid]}}
"""

REWARD = """
import nonet


@nonet.reward
def own(price, *, ceiling: float):
    return price < ceiling
"""

BACKBONE = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(3)
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
             intermediate_size=32, vocab_size=32)
AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes)).save_pretrained(sys.argv[1])
"""


def write_tables(folder: Path) -> None:
    """Write a small log with text ids, columns of other names and times in milliseconds."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    steps = draw.choice([1, 2, 3], p=[0.7, 0.2, 0.1], size=(USERS, EVENTS))
    item = (draw.integers(0, ITEMS, USERS)[:, None] + steps.cumsum(1)) % ITEMS
    log = {
        "member": np.repeat([f"user_{u:03d}" for u in range(USERS)], EVENTS),
        "sku": [f"SKU-{i:04d}" for i in item.ravel()],
        "ts": (1_700_000_000 + np.tile(np.arange(EVENTS) * 3600, USERS)) * 1000,
        "rating": draw.choice([3.0, 4.0, 5.0], size=USERS * EVENTS).astype(np.float32),
    }
    pq.write_table(pa.table(log), folder / "log.parquet")
    items = {
        "sku": [f"SKU-{i:04d}" for i in range(ITEMS)],
        "name": [f"thing {chr(97 + i)}{i}" for i in range(ITEMS)],
        "kinds": [[f"kind{i % 4}"] for i in range(ITEMS)],
        "price": np.arange(ITEMS).astype(np.float64),
    }
    pq.write_table(pa.table(items), folder / "catalogue.parquet")
    usual = pa.table(items).rename_columns(["sku", "title", "categories", "price"])
    pq.write_table(usual, folder / "catalogue_usual.parquet")  # preparation on disk reads no mapped title
    for name, every in (("carts", 2), ("purchases", 3)):
        rows = np.arange(0, USERS * EVENTS, every)
        labels = {
            "member": np.array(log["member"])[rows],
            "sku": np.array(log["sku"])[rows],
            "ts": np.array(log["ts"])[rows] + 600_000,
        }
        pq.write_table(pa.table(labels), folder / f"{name}.parquet")
    prices = {
        "sku": np.repeat(items["sku"], 2),
        "updated": np.tile([1_600_000_000, 1_700_010_000], ITEMS),
        "discount": draw.random(2 * ITEMS).round(3),
    }
    pq.write_table(pa.table(prices), folder / "discounts.parquet")

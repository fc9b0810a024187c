"""The cost in AUC of fewer bits on the wire: `nonet bench codec`.

Click labels are drawn from a known factor model over 20,000 users and 5,000 Zipf items. A factorisation of width 16
is trained with rows and gradients through each codec, as if every row were remote (encode and decode of the codec, no
network), with the same seeds and batches. AUC is measured on 100,000 held-out pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

USERS, ITEMS, DIM, BATCH = 20_000, 5_000, 16, 4096


def measure(steps: int = 400, seeds: tuple[int, ...] = (7, 8, 9)) -> dict[str, Any]:
    """Return AUC by codec and seed; ratios are the largest difference from fp32 over the seeds."""
    import torch

    torch.set_num_threads(1)
    rows, worst = [], {"fp16": 0.0, "bf16": 0.0, "int8": 0.0}
    for seed in seeds:
        aucs = {name: _measure_auc(name, steps, seed) for name in ("fp32", *worst)}
        rows.append({"seed": seed, **aucs})
        for name in worst:
            worst[name] = max(worst[name], abs(aucs[name] - aucs["fp32"]))
    return {
        "rows": rows,
        "ratio": {f"AUC, {name} against fp32, largest difference": gap for name, gap in worst.items()},
    }


def _measure_auc(name: str, steps: int, seed: int) -> float:
    """Train with a codec and return the AUC."""
    import torch

    from nonet.embedding.exchange import get_codec
    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import ShardedTables

    tables = ShardedTables(
        {table: TableSpec(DIM, lr=0.1, init_scale=0.1) for table in ("user", "item")}, seed=seed
    )
    wire = get_codec(name)

    def pass_codec(rows: Any) -> Any:
        return wire.decode(wire.encode(rows), DIM)

    for step in range(1, steps + 1):
        keys, label = _draw_pairs(seed, step, BATCH)
        leaves = {table: pass_codec(tables.pull(table, key)).requires_grad_() for table, key in keys.items()}
        score = (leaves["user"] * leaves["item"]).sum(1)
        torch.nn.functional.binary_cross_entropy_with_logits(score, label, reduction="sum").backward()
        for table, key in keys.items():
            # The trainer sums a key's gradients before they travel.
            distinct, inverse = torch.unique(key, return_inverse=True)
            summed = torch.zeros(len(distinct), DIM).index_add_(0, inverse, leaves[table].grad)
            tables.push(table, distinct, pass_codec(summed), step)
    keys, label = _draw_pairs(seed, 0, 100_000)
    rows = [pass_codec(tables.pull(table, keys[table], train=False)) for table in ("user", "item")]
    return _compute_auc((rows[0] * rows[1]).sum(1).numpy(), label.numpy())


def _draw_pairs(seed: int, step: int, count: int) -> tuple[dict[str, Any], Any]:
    """Draw user and item keys with their click labels."""
    import torch

    from nonet.random import rng

    truth = rng(seed, "bench", "codec truth")
    user_factors, item_factors = (truth.standard_normal((size, 4)) for size in (USERS, ITEMS))
    source = rng(seed, "bench", "codec", step)
    user = source.integers(0, USERS, count)
    item = (source.zipf(1.2, count) - 1) % ITEMS
    chance = 1 / (1 + np.exp(-(user_factors[user] * item_factors[item]).sum(1)))
    label = torch.from_numpy((source.random(count) < chance).astype(np.float32))
    return {"user": torch.from_numpy(user), "item": torch.from_numpy(item)}, label


def _compute_auc(score: np.ndarray, label: np.ndarray) -> float:
    """Compute the AUC of scores against binary labels."""
    rank = np.empty(len(score))
    rank[np.argsort(score, kind="stable")] = np.arange(1, len(score) + 1)
    positive = label > 0.5
    hits, misses = int(positive.sum()), int((~positive).sum())
    return float((rank[positive].sum() - hits * (hits + 1) / 2) / (hits * misses))

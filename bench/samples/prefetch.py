"""How much of a join's reading is hidden beside the step: runs that join item columns over a socket.

Runs with and without reading ahead are compared. The store is the stand-in for HBase's protocol in a process of its
own. Metrics have the time of a step and the part of it that the trainer waited for its samples. With
`sparse.in_flight: 1` it waits for all reading, with three batches for what was not hidden.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet import yaml
from nonet.bench.timing import run_scenario
from nonet.samples.stores import open_store
from nonet.samples.tables import read_items

_COLUMNS = {"price": "d:price float64", "shop": "d:shop int64"}
_AHEAD = {"none ahead": 1, "three batches in flight": 3}
_CALLS = 3  # of ten steps, each a record; the run's first, where processes warm up, is left out


def measure_hidden_share(folder: Path, port: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return milliseconds of ten steps and of their waiting, medians, and the share of the waiting that reading ahead removes."""
    use = f"hbase://127.0.0.1:{port}/items"
    _fill_store(use)
    rows = []
    for name, ahead in _AHEAD.items():
        path = folder / f"{ahead}.yaml"
        path.write_text(yaml.dump(_make_scenario(use, ahead)))
        rows.append({"reader": name, **_read_step_times(run_scenario(path, folder / f"run-{ahead}"))})
    alone, ahead = (row["waited_ms"] for row in rows)
    return rows, {"join, share of its waiting that reading ahead hides": 1 - ahead / alone}


def _fill_store(use: str) -> None:
    """Fill the store with columns of the items."""
    ids = read_items("builtin:movielens-small/items.parquet")["item_id"].to_numpy()
    draw = np.random.default_rng(7)
    table = pa.table({"price": draw.random(len(ids)), "shop": draw.integers(0, 99, len(ids))})
    store = open_store(use, _COLUMNS)
    store.put(ids, table, np.zeros(len(ids), np.int64))
    store.close()


def _make_scenario(use: str, ahead: int) -> dict[str, Any]:
    """Make the scenario of a run."""
    return {
        "name": "prefetch",
        "seed": 7,
        "data": {
            "interactions": "builtin:movielens-small/interactions.parquet",
            "items": "builtin:movielens-small/items.parquet",
            "keep": {"item_events": 5},
            "split": {"use": "leave_last_out", "test": 1, "valid": 1},
            "join": {"item": {"use": use, "columns": _COLUMNS}},
        },
        "tokenizer": {"use": "rq_kmeans", "vectors": ["title", "categories"], "levels": 3, "codes": 64},
        "model": {"use": "sid_decoder", "width": 64, "layers": 3, "heads": 4},
        "sparse": {"tables": {"item": {"dim": 32}, "shop": {"dim": 8}}, "in_flight": ahead},
        "stages": {"pretrain": {"steps": 10 * (_CALLS + 1), "batch": {"tokens": 2048}, "lr": 3e-3}},
        "evaluate": {"metrics": ["recall@10"], "users": 50, "baselines": ["popularity"]},
    }


def _read_step_times(run: Path) -> dict[str, float]:
    """Return the median times of a run's steps and of their waiting."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    series = {
        name: [
            float(each["value"]) for each in records if (each["stage"], each["name"]) == ("pretrain", name)
        ][1:]
        for name in ("rows/s", "events", "data wait")
    }
    step = [1e3 * rows / rate for rows, rate in zip(series["events"], series["rows/s"], strict=True)]
    waited = [share * ms for share, ms in zip(series["data wait"], step, strict=True)]
    return {"ten steps_ms": statistics.median(step), "waited_ms": statistics.median(waited)}

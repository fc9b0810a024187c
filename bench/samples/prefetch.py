"""Measures how much of the time of a join is hidden by prefetching, in runs that join item columns over a socket.

The store is the stand-in for HBase, which runs in another process. The metrics of a run have the time of a step and the share
of it for which the trainer waited for its samples. With `sparse.in_flight: 1`, batches are not prefetched, so the trainer waits
for all reads. With three batches in flight, it waits only for the reads that are not hidden.
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
_BATCHES_IN_FLIGHT = {"none ahead": 1, "three batches in flight": 3}
_RECORDS = 3  # measured records of ten steps each; the first record of a run is left out as warm-up


def measure_hidden_share(folder: Path, port: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run with and without prefetching, and compare the waiting times.

    Args:
        folder: Folder of the runs.
        port: Port of the stand-in for HBase.

    Returns:
        Rows with the median milliseconds of ten steps and of the waiting in them, and the share of the waiting that prefetching
        removes.
    """
    address = f"hbase://127.0.0.1:{port}/items"
    _fill_store(address)
    rows = []
    for name, in_flight in _BATCHES_IN_FLIGHT.items():
        path = folder / f"{in_flight}.yaml"
        path.write_text(yaml.dump(_make_scenario(address, in_flight)))
        rows.append({"reader": name, **_read_step_times(run_scenario(path, folder / f"run-{in_flight}"))})
    sequential_ms, prefetched_ms = (row["waited_ms"] for row in rows)
    return rows, {"join, share of its waiting that reading ahead hides": 1 - prefetched_ms / sequential_ms}


def _fill_store(address: str) -> None:
    """Write random columns of all items to the store."""
    ids = read_items("builtin:movielens-small/items.parquet")["item_id"].to_numpy()
    draw = np.random.default_rng(7)
    table = pa.table({"price": draw.random(len(ids)), "shop": draw.integers(0, 99, len(ids))})
    store = open_store(address, _COLUMNS)
    store.put(ids, table, np.zeros(len(ids), np.int64))
    store.close()


def _make_scenario(address: str, in_flight: int) -> dict[str, Any]:
    """Return the scenario of a run that joins from a store."""
    return {
        "name": "prefetch",
        "seed": 7,
        "data": {
            "interactions": "builtin:movielens-small/interactions.parquet",
            "items": "builtin:movielens-small/items.parquet",
            "keep": {"item_events": 5},
            "split": {"use": "leave_last_out", "test": 1, "valid": 1},
            "join": {"item": {"use": address, "columns": _COLUMNS}},
        },
        "tokenizer": {"use": "rq_kmeans", "vectors": ["title", "categories"], "levels": 3, "codes": 64},
        "model": {"use": "sid_decoder", "width": 64, "layers": 3, "heads": 4},
        "sparse": {"tables": {"item": {"dim": 32}, "shop": {"dim": 8}}, "in_flight": in_flight},
        "stages": {"pretrain": {"steps": 10 * (_RECORDS + 1), "batch": {"tokens": 2048}, "lr": 3e-3}},
        "evaluate": {"metrics": ["recall@10"], "users": 50, "baselines": ["popularity"]},
    }


def _read_step_times(run: Path) -> dict[str, float]:
    """Return the median milliseconds of ten steps of a run, and of the waiting in them."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    series = {
        name: [
            float(record["value"])
            for record in records
            if (record["stage"], record["name"]) == ("pretrain", name)
        ][1:]
        for name in ("rows/s", "events", "data wait")
    }
    step_ms = [1e3 * rows / rate for rows, rate in zip(series["events"], series["rows/s"], strict=True)]
    waited_ms = [share * ms for share, ms in zip(series["data wait"], step_ms, strict=True)]
    return {"ten steps_ms": statistics.median(step_ms), "waited_ms": statistics.median(waited_ms)}

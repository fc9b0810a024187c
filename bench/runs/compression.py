"""Compressed events beside the original log: how many fewer, whether they expand to the same rows, and what ranking loses.

There are two logs: the shipped MovieLens ratings with added repeats that make up 30 % of it (seeded), and, if `data`
names its folder, `train_full.tsv` of Yoochoose's clicks. Each is run with and without `data.events`, in processes of
their own; recall is paired over the test events that both runs have.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from nonet import yaml
from nonet.bench.timing import run_scenario
from nonet.controller.record import find_run
from nonet.deploy.after import TestedRun
from nonet.models.ranking import compare_paired, compute_per_event
from nonet.random import rng
from nonet.samples.sequences import compress_log, expand_log
from nonet.samples.tables import read_interactions, read_items

_SHARE = 0.3
_METRICS = ("recall@10", "ndcg@10")
_PERIOD = "1d"


def bench_compression(seeds: list[int], data: str = "", epochs: int = 3, by: str = "item") -> dict[str, Any]:
    """Compare compressed and original logs.

    Args:
        seeds: The first one is used.
        data: Folder with Yoochoose's train_full.tsv, "" for none.
        epochs: Epochs of pretraining in each run.
        by: "item" or "category": which events are merged.
    """
    with tempfile.TemporaryDirectory(prefix="nonet-bench-compression-") as name:
        folder = Path(name)
        logs = {"movielens, 30 % repeats": make_repeated_log(seeds[0])}
        if data:
            logs["yoochoose"] = read_yoochoose(Path(data) / "train_full.tsv")
        rows = [
            _measure_log(folder / f"log-{number}", name, log, items, by, seeds[0], epochs)
            for number, (name, (log, items)) in enumerate(logs.items())
        ]
    ratio = {f"{row['log']}: rows / events": row["rows"] / row["events"] for row in rows}
    return {"rows": rows, "ratio": ratio}


def make_repeated_log(seed: int) -> tuple[pa.Table, pa.Table]:
    """Return the shipped ratings and items; three of ten rows repeat a rating of the user within a minute."""
    log = read_interactions(
        "builtin:movielens-small/interactions.parquet", only=["user_id", "item_id", "timestamp"]
    ).select(["user_id", "item_id", "timestamp"])
    dice = rng(seed, "bench", "repeats")
    again = log.take(pa.array(np.sort(dice.integers(0, len(log), int(len(log) * _SHARE / (1 - _SHARE))))))
    later = again["timestamp"].to_numpy() + dice.integers(1, 60, len(again))
    again = again.set_column(2, "timestamp", pa.array(later, log.schema.field(2).type))
    both = pa.concat_tables([log, again]).sort_by([("timestamp", "ascending")]).combine_chunks()
    return both, read_items("builtin:movielens-small/items.parquet")


def read_yoochoose(path: Path) -> tuple[Any, Any]:
    """Read clicks by session, in seconds, and the items in them, as tables of pyarrow."""
    clicks = csv.read_csv(path, parse_options=csv.ParseOptions(delimiter="\t"))
    log = pa.table(
        {
            "user_id": clicks["SessionId"],
            "item_id": clicks["ItemId"],
            "timestamp": pa.array(clicks["Time"].to_numpy().astype(np.int64)),
        }
    )
    items = np.unique(log["item_id"].to_numpy())
    return log, pa.table({"item_id": items, "title": [f"item {item}" for item in items.tolist()]})


def _measure_log(
    folder: Path, name: str, log: pa.Table, items: pa.Table, by: str, seed: int, epochs: int
) -> dict[str, Any]:
    """Run one log in both forms, and return its row."""
    folder.mkdir()
    pq.write_table(log, folder / "interactions.parquet")
    pq.write_table(items, folder / "items.parquet")
    made = compress_log(log, 86_400, by, items)
    facts = made.measure_savings()
    for kind, events in (("as it is", None), ("compressed", {"compress": _PERIOD, "by": by})):
        scenario = _make_scenario(folder, events, "categories" in items.column_names, seed, epochs)
        path = folder / f"{kind}.yaml"
        path.write_text(yaml.dump(scenario))
        run_scenario(path, folder / kind)
    return {
        "log": name,
        "rows": facts["rows"],
        "events": facts["events"],
        "rows / events": facts["rows"] / facts["events"],
        "bytes before / after": facts["bytes_before"] / facts["bytes_after"],
        "expands to the same rows": expand_log(made).equals(log.combine_chunks()),
        **_compare_runs(folder),
    }


def _make_scenario(folder: Path, events: Any, categories: bool, seed: int, epochs: int) -> dict[str, Any]:
    """Make the scenario of one run."""
    data = {"interactions": str(folder / "interactions.parquet"), "items": str(folder / "items.parquet")}
    sources = ["categories", "cooccurrence"] if categories else ["cooccurrence"]
    return {
        "name": "compression",
        "seed": seed,
        "data": {
            **data,
            **({"events": events} if events else {}),
            "history": 30,
            "keep": {"user_events": 3},
            "split": {"use": "leave_last_out", "test": 1, "valid": 1},
        },
        "tokenizer": {"use": "rq_kmeans", "vectors": sources, "codes": 64, "dim": 32},
        "model": {"use": "sid_decoder", "width": 64, "layers": 2, "heads": 4, "memory": "on"},
        "sparse": {"tables": {"item": {"dim": 32}, **({"count": {"dim": 8}} if events else {})}},
        "stages": {"pretrain": {"epochs": epochs, "lr": 3e-3}},
        "evaluate": {"metrics": list(_METRICS), "width": 20},
    }


def _compare_runs(folder: Path) -> dict[str, Any]:
    """Compare the last stages of both runs over the test events that both have, with an interval of the difference."""
    plain, packed = (TestedRun.from_run(find_run(str(folder / kind))) for kind in ("as it is", "compressed"))
    place = {event: at for at, event in enumerate(plain.events)}
    pairs = [(place[event], at) for at, event in enumerate(packed.events) if event in place]
    here, there = np.array(pairs).T
    ranks = (
        plain.load_results(plain.find_last_stage())[here],
        packed.load_results(packed.find_last_stage())[there],
    )
    row: dict[str, Any] = {"test events of both": len(pairs)}
    for metric in _METRICS:
        values = [compute_per_event(metric, each) for each in ranks]
        difference = compare_paired(values[1], values[0], plain.results.user[here], plain.seed)
        row[f"{metric} as it is"], row[f"{metric} compressed"] = (float(each.mean()) for each in values)
        row[f"{metric} difference"] = json.dumps({key: round(value, 4) for key, value in difference.items()})
    return row

"""The cost of samples besides computing: CPU seconds of reading, drawing and planning in a trainer (`nonet bench samples`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.random import draw_first_integers, rng
from nonet.samples.ledger import EpochSteps, RowOrder, StepRange
from nonet.samples.sequences import RL, Sequences
from nonet.samples.sources import RlPrompts, SampleRequest, open_source
from nonet.samples.streams import plan_tasks, read

_USERS, _EVENTS = 20_000, 20


def measure_cost(folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return rows of measures, each in CPU time of this process."""
    rows = [_measure_file_source(folder, items) for items in (10_000, 1_000_000)]
    rows += [_measure_slices(folder, size) for size in (32, 512)]
    return [*rows, _measure_plan(), _measure_prompts(), *_measure_draws()], {}


def _measure_file_source(folder: Path, items: int) -> dict[str, Any]:
    """Measure the users per second of `data.source: parquet` in steps of 512, including batches."""
    draw = np.random.default_rng(0)
    lists = pa.ListArray.from_arrays(
        np.arange(0, _EVENTS * _USERS + 1, _EVENTS, dtype=np.int32), draw.integers(0, items, _EVENTS * _USERS)
    )
    path = folder / f"lists-{items}.parquet"
    pq.write_table(
        pa.table({"user_id": np.arange(_USERS), "item_id": lists}), path, row_group_size=_USERS // 4
    )
    table, sids = pa.table({"item_id": np.arange(items)}), np.zeros((items, 3), np.int32)
    nothing: Any = dict  # the events of a run are not read
    request = SampleRequest(
        "pretrain", 7, "users", 512, 50, None, 1 << 16, ("item",), nothing, lambda: table, sids
    )
    source: Any = open_source({"use": "parquet", "path": str(path)}, request)

    def step(number: int) -> None:
        for make in source.batch(number, 0, 1):
            make()
        source.ledger.apply_step(number)

    step(0)  # opens the files and hashes the catalogue
    seconds = _measure_cpu_s(lambda: [step(number) for number in range(1, 31)])
    return {"cost": f"data.source: parquet, {items:,} items", "users/s": 30 * 512 / seconds}


def _measure_slices(folder: Path, size: int) -> dict[str, Any]:
    """Measure the rows per second of the local engine with shuffled rows, by the number of rows of a slice."""
    path = folder / "flat.parquet"
    if not path.exists():
        count = 400_000
        table = pa.table({"user_id": np.arange(count), "item_id": np.arange(count) % 7})
        pq.write_table(table, path, row_group_size=100_000)
    feed = read(str(path)).shuffle(7).prefetch(4).open(rows=size, step_rows=512)
    seconds = _measure_cpu_s(lambda: [len(batch) for batch in feed.iterate_epoch(0)])
    return {"cost": f"local engine, {size} rows a slice", "rows/s": feed.rows / seconds}


def _measure_plan() -> dict[str, Any]:
    """Measure the time in which the Ray engine plans the read tasks of 1e9 rows in 5,000 row groups."""
    steps = EpochSteps(10**9, 512, 32)
    feed: Any = SimpleNamespace(
        leaves=[SimpleNamespace(order=RowOrder(np.full(5000, 200_000), 7))], steps=steps
    )
    epoch = next(StepRange(steps, 0, None, 0, 1).iterate_epochs())
    return {
        "cost": "Ray engine, plan of 1e9 rows",
        "ms": 1e3 * _measure_cpu_s(lambda: plan_tasks(feed, epoch)),
    }


def _measure_prompts() -> dict[str, Any]:
    """Measure the milliseconds of a step's RL prompts out of 20 M events, after the first step."""
    users, length = 1_000_000, 20
    split = np.zeros((users, length), np.int8)
    split[:, -3] = RL
    item = np.random.default_rng(0).integers(0, 100_000, users * length).astype(np.int32)
    seq = Sequences(
        user_id=np.arange(users),
        offsets=np.arange(users + 1) * length,
        item=item,
        time=np.tile(np.arange(length), users),
        event=np.broadcast_to(np.int32(0), len(item)),
        split=split.reshape(-1),
        user_key=np.arange(users),
        item_key=np.arange(100_000),
    )
    prompts = RlPrompts(seq, 7, "rl", 64)
    prompts.get_step_prompts(0)
    seconds = _measure_cpu_s(lambda: [prompts.get_step_prompts(step) for step in range(1, 101)])
    return {"cost": "RL prompts of a step, 20 M events", "ms": 10 * seconds}


def _measure_draws() -> list[dict[str, Any]]:
    """Measure the milliseconds of 2,048 users' window cuts, with one generator each and all at once."""
    users = np.arange(2048)
    words = ("pretrain", "window", 0)
    each = _measure_cpu_s(lambda: [rng(7, *words, user).integers(0, 50) for user in users.tolist()])
    together = _measure_cpu_s(lambda: [draw_first_integers(7, words, users, 50) for _ in range(10)]) / 10
    return [
        {"cost": "draws for 2,048 users, a generator each", "ms": 1e3 * each},
        {"cost": "draws for 2,048 users, at once", "ms": 1e3 * together},
    ]


def _measure_cpu_s(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began

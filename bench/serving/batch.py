"""Users of a table answered by processes that each hold the engine, beside one engine alone; memory by chunk."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.bench.serving.load import compute_median
from nonet.bench.serving.queue import Result, make_questions, open_engine
from nonet.deploy.serving.features import ServedRun
from nonet.deploy.serving.offline import recommend_all

_CHUNKS = (256, 1024, 4096)
_ALONE, _MERGED = 4096, 64


def bench_batch(run: str, rounds: int, users: int = 100_000) -> Result:
    """Measure `nonet recommend --users`, with one process for each core.

    Args:
        run: The run.
        rounds: Rounds of the engine alone.
        users: Number of users; those of the run are repeated if it has fewer.

    Returns:
        Users a second, relative to the engine's own rate times the processes, and the largest process by chunk, over
        fewer users.
    """
    workers = os.cpu_count() or 1
    made, engine = open_engine(run)
    asked = make_questions(made)
    seconds = []
    for turn in range(rounds):
        some = [asked[(turn * _ALONE + place) % len(asked)] for place in range(min(_ALONE, len(asked)))]
        began = time.perf_counter()
        for start in range(0, len(some), _MERGED):
            engine.answer(some[start : start + _MERGED])
        seconds.append((time.perf_counter() - began) / len(some))
    alone = 1 / compute_median(seconds)
    rows = [{"what": "the engine alone", "users/s": alone}]
    with tempfile.TemporaryDirectory() as folder:
        known = ServedRun.open(run).corpus.seq.user_id
        for chunk in _CHUNKS:  # ascending: the system tells the largest child so far
            file = _write_users(Path(folder), known, workers * chunk)
            recommend_all(run, file, Path(folder) / "out.parquet", 10, workers, chunk)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            rows.append({"what": f"chunks of {chunk}", "peak of a process, MB": peak})
        file = _write_users(Path(folder), known, users)
        began = time.perf_counter()
        recommend_all(run, file, Path(folder) / "out.parquet", 10, workers)
        taken = time.perf_counter() - began
    rows.append({"what": f"{users} users, {workers} processes", "users/s": users / taken, "s": taken})
    return rows, {"rate: batch / (engine x processes)": users / taken / (alone * workers)}


def _write_users(folder: Path, known: np.ndarray, count: int) -> Path:
    """Write a table of users."""
    path = folder / f"users-{count}.parquet"
    pq.write_table(pa.table({"user_id": np.resize(known, count)}), path)
    return path

"""A benchmark of `nonet recommend --users`: its throughput compared with one engine, and its memory by chunk size."""

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
from nonet.deploy.opened import OpenedRun
from nonet.deploy.serving.offline import recommend_all

_CHUNKS = (256, 1024, 4096)  # users per chunk
_ENGINE_QUESTIONS, _ENGINE_BATCH = 4096, 64  # questions of a round of the single engine, and of one call


def bench_batch(run: str, rounds: int, users: int = 100_000) -> Result:
    """Measure `nonet recommend --users` with one process per core, and one engine without other processes.

    Args:
        run: The run.
        rounds: Number of rounds of the single engine.
        users: Maximum number of users; a run with fewer is asked for all of them.

    Returns:
        Rows with the users per second, and with the peak memory of the largest process by chunk size. The ratio divides the
        users per second by those of the single engine times the number of processes.
    """
    workers = os.cpu_count() or 1
    served_run, engine = open_engine(run)
    questions = make_questions(served_run)
    seconds = []
    for turn in range(rounds):
        count = min(_ENGINE_QUESTIONS, len(questions))
        round_questions = [questions[(turn * _ENGINE_QUESTIONS + i) % len(questions)] for i in range(count)]
        began = time.perf_counter()
        for start in range(0, count, _ENGINE_BATCH):
            engine.answer(round_questions[start : start + _ENGINE_BATCH])
        seconds.append((time.perf_counter() - began) / count)
    engine_rate = 1 / compute_median(seconds)
    rows = [{"what": "the engine alone", "users/s": engine_rate}]
    with tempfile.TemporaryDirectory() as folder:
        user_ids = OpenedRun.open(run).corpus.seq.user_id
        for chunk in _CHUNKS:  # ascending, because ru_maxrss is the peak of the largest child process so far
            file = _write_users(Path(folder), user_ids, workers * chunk)
            recommend_all(run, file, Path(folder) / "out.parquet", 10, workers, chunk)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            rows.append({"what": f"chunks of {chunk}", "peak of a process, MB": peak})
        users = min(users, len(user_ids))
        file = _write_users(Path(folder), user_ids, users)
        began = time.perf_counter()
        recommend_all(run, file, Path(folder) / "out.parquet", 10, workers)
        elapsed_s = time.perf_counter() - began
    rows.append({"what": f"{users} users, {workers} processes", "users/s": users / elapsed_s, "s": elapsed_s})
    return rows, {"rate: batch / (engine x processes)": users / elapsed_s / (engine_rate * workers)}


def _write_users(folder: Path, user_ids: np.ndarray, count: int) -> Path:
    """Write a table of `count` users, or of all if there are fewer."""
    path = folder / f"users-{count}.parquet"
    pq.write_table(pa.table({"user_id": user_ids[:count]}), path)
    return path

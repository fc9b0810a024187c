"""`nonet recommend RUN --users U.parquet --out R.parquet`: one row per user, by the serving engine in parallel processes.

Users are read and written in chunks and in order, with few chunks in progress, so memory depends on the
chunk size and not on the table. The output file is renamed to its name when it is complete.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import replace_file
from nonet.deploy.serving.features import RequestFeatures, ServedRun
from nonet.errors import DataError, WorkerLost
from nonet.models.inference import InferenceEngine

_CHUNK, _MERGED = 4096, 64


class BatchRecommender:
    """The engine of a run's version in one process.

    Args:
        run: The run's folder.
        version: The version.
        top: Number of items per user.
    """

    def __init__(self, run: str, version: int, top: int):
        import torch

        torch.set_num_threads(1)
        opened = ServedRun.open(run)
        self._engine = InferenceEngine(
            opened.load_recommender(opened.registry.read_version(version)), version
        )
        self._features = RequestFeatures.from_run(opened, posts=False)
        self._withdrawn, self._top = opened.registry.serving.withdrawn, top

    def recommend(self, users: list[Any]) -> pa.Table:
        """Return a table of user_id, item_id and score (lists, best first), cold_start and version."""
        asked = [
            self._features.make_list_question(str(user), None, self._top, withdrawn=self._withdrawn)
            for user in users
        ]
        items, scores = [], []
        for start in range(0, len(asked), _MERGED):
            for answer in self._engine.answer([each.question for each in asked[start : start + _MERGED]]):
                items.append(self._features.items.get_ids(answer.item))
                scores.append(answer.score.tolist())
        return pa.table(
            {
                "user_id": users,
                "item_id": items,
                "score": pa.array(scores, pa.list_(pa.float32())),
                "cold_start": [each.cold_start for each in asked],
                "version": pa.array([self._engine.version] * len(users), pa.int32()),
            }
        )


def recommend_all(
    run: str, users: Path, out: Path, top: int, workers: int | None = None, chunk: int = _CHUNK
) -> dict[str, Any]:
    """Recommend items for each user of a Parquet file.

    Args:
        run: A folder, an id, a prefix, or `last`.
        users: The file, with a column user_id.
        out: The Parquet file to write.
        top: Number of items per user.
        workers: Number of processes, by default one per CPU.
        chunk: Number of users per chunk.

    Returns:
        {"users", "version", "workers", "file"}.

    Raises:
        DataError: The file has no column user_id or no rows.
        ConfigError: The run has no checkpoint.
        WorkerLost: A process died.
    """
    opened = ServedRun.open(run)
    opened.check_servable("recommend --users")
    version = opened.registry.serving.default or opened.publish_newest().number
    chunks = _read_chunks(users, chunk)
    arguments = (str(opened.folder.path), version, top)
    count = max(1, workers if workers is not None else os.cpu_count() or 1)
    written = 0
    with replace_file(out) as draft:
        writer = None
        for table in (
            _recommend_in_process(chunks, arguments)
            if count == 1
            else _recommend_in_pool(chunks, arguments, count)
        ):
            writer = writer or pq.ParquetWriter(draft, table.schema)
            writer.write_table(table)
            written += len(table)
        if writer is None:
            raise DataError(f"{users} has no rows, so there are no users to recommend to")
        writer.close()
    return {"users": written, "version": version, "workers": count, "file": str(out)}


def _recommend_in_process(chunks: Iterator[list[Any]], arguments: tuple[str, int, int]) -> Iterator[pa.Table]:
    """Recommend in this process."""
    answers = BatchRecommender(*arguments)
    return (answers.recommend(chunk) for chunk in chunks)


def _recommend_in_pool(
    chunks: Iterator[list[Any]], arguments: tuple[str, int, int], workers: int
) -> Iterator[pa.Table]:
    """Recommend in several processes and yield tables in order, with two chunks per worker in progress."""
    context = get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(workers, context, _start_worker, arguments) as pool:
        under_way: deque[Future[pa.Table]] = deque()
        for chunk in itertools.chain(chunks, itertools.repeat(None, 2 * workers)):
            if chunk is not None:
                under_way.append(pool.submit(_recommend_in_worker, chunk))
            if under_way and (chunk is None or len(under_way) >= 2 * workers):
                try:
                    yield under_way.popleft().result()
                except BrokenProcessPool:
                    raise WorkerLost(
                        "a worker process died; check whether the memory suffices for so many workers"
                    ) from None


_answers: BatchRecommender | None = None


def _start_worker(*arguments: Any) -> None:
    global _answers
    _answers = BatchRecommender(*arguments)


def _recommend_in_worker(users: list[Any]) -> pa.Table:
    assert _answers is not None
    return _answers.recommend(users)


def _read_chunks(users: Path, size: int) -> Iterator[list[Any]]:
    """Read the users in chunks. Raises DataError if the file is not Parquet or has no column user_id."""
    try:
        file = pq.ParquetFile(users)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{users} cannot be read as a Parquet file: {str(error).splitlines()[0]}") from None
    if "user_id" not in file.schema_arrow.names:
        there = ", ".join(file.schema_arrow.names)
        raise DataError(f"{users} has no column user_id; it has {there}")
    return (batch["user_id"].to_pylist() for batch in file.iter_batches(size, columns=["user_id"]))

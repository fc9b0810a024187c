"""`nonet recommend RUN --users U.parquet --out R.parquet`: recommendations for many users, made in parallel processes.

Users are read and written in chunks and in the order of their first rows, with few chunks in progress, so memory depends on
the chunk size and the ids, and not on the rows. The output file is renamed to its name when it is complete.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import replace_file
from nonet.deploy.opened import OpenedRun, RequestFeatures, iterate_user_ids
from nonet.errors import DataError, WorkerLost
from nonet.models.inference import InferenceEngine

ALL_USERS = "all"
"""The name of the table of all users of the run."""
_USERS_PER_CHUNK = 4096  # read, sent to a process and written at once
_USERS_PER_BATCH = 64  # that the model computes at once


class BatchRecommender:
    """The inference engine of one version of a run, in one process.

    Args:
        run: The run's folder.
        version: The version's number.
        top: Number of items per user.
    """

    def __init__(self, run: str, version: int, top: int):
        import torch

        torch.set_num_threads(1)
        served_run = OpenedRun.open(run)
        recommender = served_run.load_recommender(served_run.registry.read_version(version))
        self._engine = InferenceEngine(recommender, version)
        self._features = RequestFeatures.from_run(served_run, posts=False)
        self._vocabulary = served_run.vocabulary
        self._withdrawn, self._top = served_run.withdrawn, top

    def recommend(self, user_ids: list[Any]) -> pa.Table:
        """Recommend items for users.

        Returns:
            A row for each user, in order: the user, the items and score (lists, best first), cold_start and version. The columns
            of users and items have the names that the run's files have.
        """
        prepared = self._features.read_joined_columns(
            [
                self._features.prepare_list_question(
                    user_id, history=None, k=self._top, withdrawn=self._withdrawn
                )
                for user_id in user_ids
            ]
        )
        questions = [each.question for each in prepared]
        item_ids, scores = [], []
        for start in range(0, len(questions), _USERS_PER_BATCH):
            for answer in self._engine.answer(questions[start : start + _USERS_PER_BATCH]):
                item_ids.append(self._features.items.get_ids(answer.item))
                scores.append(answer.score.tolist())
        table = pa.table(
            {
                "user_id": user_ids,
                "item_id": item_ids,
                "score": pa.array(scores, pa.list_(pa.float32())),
                "cold_start": [each.cold_start for each in prepared],
                "version": pa.array([self._engine.version] * len(user_ids), pa.int32()),
            }
        )
        return table.rename_columns(self._vocabulary.get_own_columns(table.column_names))


def recommend_all(
    run: str,
    users: Path,
    out: Path,
    top: int,
    workers: int | None = None,
    chunk: int = _USERS_PER_CHUNK,
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Recommend items for each user of a table once, by the served version or else the newest checkpoint.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        users: A table with the run's column of users, Parquet or delimited text; "all" for all users of the run.
        out: The Parquet file to write.
        top: Number of items per user.
        workers: Number of processes, by default one per CPU.
        chunk: Number of users per chunk.
        columns: The name of the column of users in the table, by its role, if it differs from the run's.

    Returns:
        {"users": number of users, "version": number, "workers": number of processes, "file": the written file}.

    Raises:
        DataError: The table cannot be read, has no column of users, no rows, or a value that can be no id of the run.
        ConfigError: The run has no checkpoint.
        WorkerLost: A process died.
    """
    served_run = OpenedRun.open(run, verb="recommend --users")
    version = served_run.registry.serving.default or served_run.publish_newest().number
    chunks = _read_user_ids(users, served_run, chunk, columns)
    arguments = (str(served_run.folder.path), version, top)  # of `BatchRecommender`
    worker_count = max(1, workers if workers is not None else os.cpu_count() or 1)
    user_count = 0
    with replace_file(out) as draft:
        writer = None
        for table in (
            _recommend_in_process(chunks, arguments)
            if worker_count == 1
            else _recommend_in_pool(chunks, arguments, worker_count)
        ):
            writer = writer or pq.ParquetWriter(draft, table.schema)
            writer.write_table(table)
            user_count += len(table)
        if writer is None:
            raise DataError(f"{users} has no rows, so there are no users to recommend to")
        writer.close()
    return {"users": user_count, "version": version, "workers": worker_count, "file": str(out)}


def _recommend_in_process(chunks: Iterator[list[Any]], arguments: tuple[str, int, int]) -> Iterator[pa.Table]:
    """Recommend in this process, and yield a table for each chunk of user ids."""
    recommender = BatchRecommender(*arguments)
    return (recommender.recommend(chunk) for chunk in chunks)


def _recommend_in_pool(
    chunks: Iterator[list[Any]], arguments: tuple[str, int, int], workers: int
) -> Iterator[pa.Table]:
    """Recommend in several processes, and yield a table for each chunk of user ids, in order.

    At most two chunks per worker are in progress, so that memory does not grow with the number of users.
    """
    context = get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(workers, context, _start_worker, arguments) as pool:
        futures: deque[Future[pa.Table]] = deque()  # of the chunks in progress, oldest first
        # After the chunks come as many None as there may be chunks in progress, each to wait for one of them.
        for chunk in itertools.chain(chunks, itertools.repeat(None, 2 * workers)):
            if chunk is not None:
                futures.append(pool.submit(_recommend_in_worker, chunk))
            if futures and (chunk is None or len(futures) >= 2 * workers):
                try:
                    yield futures.popleft().result()
                except BrokenProcessPool:
                    raise WorkerLost(
                        "a worker process died; check whether the memory suffices for so many workers"
                    ) from None


_worker_recommender: BatchRecommender | None = None  # of a worker process


def _start_worker(*arguments: Any) -> None:
    """Create the recommender of this worker process."""
    global _worker_recommender
    _worker_recommender = BatchRecommender(*arguments)


def _recommend_in_worker(user_ids: list[Any]) -> pa.Table:
    """Recommend items by the recommender of this worker process."""
    assert _worker_recommender is not None
    return _worker_recommender.recommend(user_ids)


def _read_user_ids(
    users: Path, run: OpenedRun, chunk_size: int, columns: Mapping[str, str] | None
) -> Iterator[list[Any]]:
    """Yield the ids of users in chunks; the arguments are those of `recommend_all`. Raises DataError for a wrong table."""
    if str(users) != ALL_USERS:
        return iterate_user_ids(users, run.vocabulary, chunk_size, columns or {})
    user_ids = run.corpus.seq.user_id
    return (user_ids[start : start + chunk_size].tolist() for start in range(0, len(user_ids), chunk_size))

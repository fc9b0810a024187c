"""The queue of the inference engine: what merging requests saves in operators and seconds, and the highest rate at a p99."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from nonet.bench.serving.hugging_face import HuggingFace
from nonet.bench.serving.load import compute_median, find_best_rates
from nonet.deploy.opened import HistoryJoins, OpenedRun, RequestFeatures, UserHistories
from nonet.models.inference import InferenceEngine, Question, TensorBatch
from nonet.samples.stores import Join, create_store

P99_MS = 200.0  # largest p99 at which a rate counts
_SECONDS, _STEPS = 3.0, 6  # duration of a load, and number of loads of the search for a rate
_JOINED = 16  # number of merged questions with joined columns
_DEADLINE_S = 10.0  # of a request

# Rows and ratios.
Result = tuple[list[dict[str, Any]], dict[str, float]]


def open_engine(run: str) -> tuple[OpenedRun, InferenceEngine]:
    """Open a run and an engine of its newest checkpoint, which is published to a temporary folder."""
    served_run = OpenedRun.open(run, Path(tempfile.mkdtemp(prefix="nonet-bench-")))
    version = served_run.publish_newest()
    return served_run, InferenceEngine(served_run.load_recommender(version), version.number)


def make_questions(run: OpenedRun) -> list[Question]:
    """Make a request for ten items for every user of the data."""
    histories = UserHistories(run.corpus, run.beside / "events.jsonl")
    features = RequestFeatures(run.corpus, histories, run.setup.history, run.scenario.evaluate.width)
    users = run.corpus.seq.user_id.tolist()
    return [features.make_list_question(str(user), None, 10).question for user in users]


def bench_merging(run: str, rounds: int) -> Result:
    """Measure the operators and seconds of merged requests, compared with those of one request."""
    served_run, engine = open_engine(run)
    questions = make_questions(served_run)
    counts = {n: _count_operators(engine, questions[:n]) for n in (1, 16)}
    seconds = {n: [] for n in (1, 4, 16, 64)}  # per request, by number of merged requests
    for turn in range(5 * rounds):
        for n, samples in seconds.items():
            merged = [questions[(turn * 64 + i) % len(questions)] for i in range(n)]
            began = time.perf_counter()
            engine.answer(merged)
            samples.append((time.perf_counter() - began) / n)
    rows = [{"merged": n, "ms a request": 1e3 * compute_median(samples)} for n, samples in seconds.items()]
    ratio = {
        "operators of 16 merged / of one": counts[16] / counts[1],
        "seconds a request: one at a time / 16 merged": compute_median(seconds[1])
        / compute_median(seconds[16]),
    }
    return [*rows, *({"merged": n, "operators": count} for n, count in counts.items())], ratio


def bench_joins(run: str, rounds: int) -> Result:
    """Measure the rate of questions with a join of two columns from an LMDB store, compared with the same without a join.

    A question is the whole way of a request behind HTTP: features, joined columns and engine, 16 merged.
    """
    served_run, engine = open_engine(run)
    corpus, window = served_run.corpus, served_run.setup.history
    address = f"lmdb:{tempfile.mkdtemp(prefix='nonet-bench-')}/prices"
    columns = {name: pa.array(np.arange(len(corpus.item_id)) % 7) for name in ("price", "discount")}
    key = pa.string() if corpus.item_id.dtype.kind == "U" else pa.int64()
    store = create_store(address, pa.table(columns).schema, key=key, versions=True)
    for moment in (0, int(np.median(corpus.seq.time))):
        store.put(corpus.item_id, pa.table(columns), np.full(len(corpus.item_id), moment))
    store.close()
    join = Join(use=address, columns=list(columns), on="item")
    users = corpus.seq.user_id.tolist()
    features = {
        name: RequestFeatures(
            corpus, UserHistories(corpus, None), window, served_run.scenario.evaluate.width, joins=joins
        )
        for name, joins in (("no join", None), ("join", HistoryJoins({"item": join}, columns)))
    }
    rates: dict[str, list[float]] = {name: [] for name in features}
    for turn in range(20 * rounds):
        merged = [users[(turn * _JOINED + i) % len(users)] for i in range(_JOINED)]
        for name, maker in features.items():
            began = time.perf_counter()
            prepared = maker.read_joined_columns(
                [maker.prepare_list_question(user, None, 10) for user in merged]
            )
            engine.answer([each.question for each in prepared])
            rates[name].append(_JOINED / (time.perf_counter() - began))
    best = {name: compute_median(samples) for name, samples in rates.items()}
    rows = [{"questions": name, "questions/s": rate} for name, rate in best.items()]
    return rows, {"rate: with the join / without": best["join"] / best["no join"]}


def bench_queue(run: str, rounds: int) -> Result:
    """Find the highest rate at a p99 of `P99_MS`: merged, one at a time, and Hugging Face behind `@serve.batch`."""
    served_run, engine = open_engine(run)
    questions = make_questions(served_run)
    model, corpus = engine.model, served_run.corpus
    hugging_face = HuggingFace(
        corpus.trie, corpus.sids, model.width, len(model.blocks), model.blocks[0].heads, served_run.setup.history,
        served_run.scenario.evaluate.width,
    )  # fmt: skip
    merged = TensorBatch(engine.answer, engine.estimate_cost)
    alone = TensorBatch(engine.answer, engine.estimate_cost, most=1)

    def submit_merged(user: int) -> Future[Any]:
        return merged.submit(questions[user], _DEADLINE_S)

    def submit_alone(user: int) -> Future[Any]:
        return alone.submit(questions[user], _DEADLINE_S)

    def submit_hugging_face(user: int) -> Future[Any]:
        return hugging_face.submit(questions[user].events.item)

    systems = {
        "merged": submit_merged,
        "one at a time": submit_alone,
        "Hugging Face behind @serve.batch": submit_hugging_face,
    }
    for submit in systems.values():
        submit(0).result(60)
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds):
        best_rates, _ = find_best_rates(
            systems,
            len(questions),
            p99_ms=P99_MS,
            seconds=_SECONDS,
            first=dict(zip(systems, (128.0, 32.0, 2.0), strict=True)),
            steps=_STEPS,
            seed=100 * turn,
        )
        for name, rate in best_rates.items():
            rates[name].append(rate)
    for queue in (merged, alone, hugging_face):
        queue.close()
    best = {name: compute_median(rounds_rates) for name, rounds_rates in rates.items()}
    rows = [
        {"system": name, "requests/s at p99 <= 200 ms": best[name], "rounds": [round(r) for r in rates[name]]}
        for name in systems
    ]
    (merged_name, merged_rate), *others = best.items()
    return rows, {f"rate: {merged_name} / {name}": merged_rate / max(rate, 1e-9) for name, rate in others}


def _count_operators(engine: InferenceEngine, questions: list[Question]) -> int:
    """Count the operators launched for an answer, without nested ones."""
    engine.answer(questions)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.answer(questions)
    return sum(1 for event in profile.events() or () if event.cpu_parent is None)

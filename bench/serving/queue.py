"""The engine's queue: the gain of merging in operators, seconds and rate at a p99."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from nonet.bench.serving.hugging_face import HuggingFace
from nonet.bench.serving.load import compute_median, find_best_rates
from nonet.deploy.serving.features import RequestFeatures, ServedRun, UserHistories
from nonet.models.inference import InferenceEngine, Question, TensorBatch

P99_MS = 200.0
_SECONDS, _STEPS = 3.0, 6
_WITHIN_S = 10.0

Result = tuple[list[dict[str, Any]], dict[str, float]]


def open_engine(run: str) -> tuple[ServedRun, InferenceEngine]:
    """Open a run and an engine of its newest commit, published into a folder of the bench."""
    made = ServedRun.open(run, Path(tempfile.mkdtemp(prefix="nonet-bench-")))
    version = made.publish_newest()
    return made, InferenceEngine(made.load_recommender(version), version.number)


def make_questions(run: ServedRun) -> list[Question]:
    """Make a request for ten items for every user of the data."""
    histories = UserHistories(run.corpus, run.beside / "events.jsonl")
    features = RequestFeatures(run.corpus, histories, run.setup.history, run.scenario.evaluate.width)
    users = run.corpus.seq.user_id.tolist()
    return [features.make_list_question(str(user), None, 10).question for user in users]


def bench_merging(run: str, rounds: int) -> Result:
    """Measure operators and seconds of 16 merged requests against one."""
    made, engine = open_engine(run)
    questions = make_questions(made)
    counts = {n: _count_operators(engine, questions[:n]) for n in (1, 16)}
    seconds = {n: [] for n in (1, 4, 16, 64)}
    for turn in range(5 * rounds):
        for n, samples in seconds.items():
            some = [questions[(turn * 64 + place) % len(questions)] for place in range(n)]
            began = time.perf_counter()
            engine.answer(some)
            samples.append((time.perf_counter() - began) / n)
    rows = [{"merged": n, "ms a request": 1e3 * compute_median(samples)} for n, samples in seconds.items()]
    ratio = {
        "operators of 16 merged / of one": counts[16] / counts[1],
        "seconds a request: one at a time / 16 merged": compute_median(seconds[1])
        / compute_median(seconds[16]),
    }
    return [*rows, *({"merged": n, "operators": count} for n, count in counts.items())], ratio


def bench_queue(run: str, rounds: int) -> Result:
    """Find the rate at p99 <= 200 ms: merged, one at a time, and Hugging Face behind `@serve.batch`."""
    made, engine = open_engine(run)
    questions = make_questions(made)
    model = engine.model
    other = HuggingFace(
        made.corpus.trie, made.corpus.sids, model.width, len(model.blocks), model.blocks[0].heads, made.setup.history,
        made.scenario.evaluate.width,
    )  # fmt: skip
    merged = TensorBatch(engine.answer, engine.estimate_cost)
    alone = TensorBatch(engine.answer, engine.estimate_cost, most=1)

    def submit_merged(user: int) -> Future[Any]:
        return merged.submit(questions[user], _WITHIN_S)

    def submit_alone(user: int) -> Future[Any]:
        return alone.submit(questions[user], _WITHIN_S)

    def submit_hugging_face(user: int) -> Future[Any]:
        return other.submit(questions[user].events.item)

    systems = {
        "merged": submit_merged,
        "one at a time": submit_alone,
        "Hugging Face behind @serve.batch": submit_hugging_face,
    }
    for submit in systems.values():
        submit(0).result(60)
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds):
        found, _ = find_best_rates(
            systems,
            len(questions),
            p99_ms=P99_MS,
            seconds=_SECONDS,
            first=dict(zip(systems, (128.0, 32.0, 2.0), strict=True)),
            steps=_STEPS,
            seed=100 * turn,
        )
        for name, rate in found.items():
            rates[name].append(rate)
    for each in (merged, alone, other):
        each.close()
    best = {name: compute_median(each) for name, each in rates.items()}
    rows = [
        {"system": name, "requests/s at p99 <= 200 ms": best[name], "rounds": [round(r) for r in rates[name]]}
        for name in systems
    ]
    mine, *others = best.items()
    return rows, {f"rate: {mine[0]} / {name}": mine[1] / max(rate, 1e-9) for name, rate in others}


def _count_operators(engine: InferenceEngine, questions: list[Question]) -> int:
    """Count the operators launched for an answer, without nested ones."""
    engine.answer(questions)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.answer(questions)
    return sum(1 for event in profile.events() or () if event.cpu_parent is None)

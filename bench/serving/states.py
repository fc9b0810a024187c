"""Cached states: the cost of a request when its user's state is cached, when it is not, and without a cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nonet.bench.serving.load import compute_median
from nonet.bench.serving.queue import Result, make_questions, open_engine
from nonet.models.inference import InferenceEngine, PrefixStates, Question

_USERS = 16


def bench_states(run: str, rounds: int) -> Result:
    """Measure 16 merged users with one new event each: hit, miss and without states, for reading histories and whole answers."""
    made, plain = open_engine(run)
    recommender = made.load_recommender(made.registry.read_version(plain.version))
    keeping = InferenceEngine(recommender, plain.version, PrefixStates())
    questions = [question for question in make_questions(made) if len(question.events) >= 16][: 8 * _USERS]
    before = [replace(question, events=_drop_newest(question)) for question in questions]
    parts = {
        "reading": (keeping._prefill_and_vote, plain._prefill_and_vote),
        "answer": (keeping.answer, plain.answer),
    }
    times: dict[str, list[float]] = {
        f"{part}, {kind}": [] for part in parts for kind in ("hit", "miss", "without")
    }
    for turn in range(8 * rounds):
        some = slice(_USERS * (turn % 8), _USERS * (turn % 8 + 1))
        for part, (ours, without) in parts.items():
            times[f"{part}, without"].append(_measure_seconds(without, questions[some]))
            keeping.states = PrefixStates()
            times[f"{part}, miss"].append(_measure_seconds(ours, questions[some]))
            keeping.states = PrefixStates()
            keeping.answer(before[some])
            times[f"{part}, hit"].append(_measure_seconds(ours, questions[some]))
    best = {name: compute_median(seconds) for name, seconds in times.items()}
    ratio = {
        f"{part}: {kind} / without": best[f"{part}, {kind}"] / best[f"{part}, without"]
        for part in parts
        for kind in ("hit", "miss")
    }
    return [
        {"what": name, "ms of a core, 16 requests": 1e3 * seconds} for name, seconds in best.items()
    ], ratio


@torch.inference_mode()
def _measure_seconds(call: Callable[[list[Question]], Any], questions: list[Question]) -> float:
    """Return the CPU seconds of a call in this thread, which does all of the work."""
    began = time.thread_time()
    call(questions)
    return time.thread_time() - began


def _drop_newest(question: Question):
    """Return the events of a question without the newest one."""
    events = question.events
    columns = {name: values[:-1] for name, values in events.columns.items()}
    return replace(
        events, item=events.item[:-1], time=events.time[:-1], event=events.event[:-1], columns=columns
    )

"""States: what a request costs when its user's history is known, when it is not, and without keeping any."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nonet.bench.serving.load import compute_median
from nonet.bench.serving.queue import Result, make_questions, open_engine
from nonet.models.inference import Engine, Question, States

_USERS = 16


def bench_states(run: str, rounds: int) -> Result:
    """16 merged users, each with one new event: reading their histories, and the whole answer, hit, missed and without states."""
    made, plain = open_engine(run)
    recommender = made.recommender(made.registry.read_version(plain.version))
    keeping = Engine(recommender, plain.version, States())
    asked = [question for question in make_questions(made) if len(question.events) >= 16][: 8 * _USERS]
    before = [replace(question, events=_drop_newest(question)) for question in asked]
    parts = {"reading": (keeping._read, plain._read), "answer": (keeping.answer, plain.answer)}
    times: dict[str, list[float]] = {
        f"{part}, {kind}": [] for part in parts for kind in ("hit", "miss", "without")
    }
    for turn in range(8 * rounds):
        some = slice(_USERS * (turn % 8), _USERS * (turn % 8 + 1))
        for part, (ours, without) in parts.items():
            times[f"{part}, without"].append(_measure_seconds(without, asked[some]))
            keeping.states = States()
            times[f"{part}, miss"].append(_measure_seconds(ours, asked[some]))
            keeping.states = States()
            keeping.answer(before[some])
            times[f"{part}, hit"].append(_measure_seconds(ours, asked[some]))
    best = {name: compute_median(taken) for name, taken in times.items()}
    ratio = {
        f"{part}: {kind} / without": best[f"{part}, {kind}"] / best[f"{part}, without"]
        for part in parts
        for kind in ("hit", "miss")
    }
    return [
        {"what": name, "ms of a core, 16 requests": 1e3 * seconds} for name, seconds in best.items()
    ], ratio


@torch.inference_mode()
def _measure_seconds(call: Callable[[list[Question]], Any], asked: list[Question]) -> float:
    """Of the core that computes: one thread does, and other work of the machine does not count."""
    began = time.thread_time()
    call(asked)
    return time.thread_time() - began


def _drop_newest(question: Question):
    events = question.events
    columns = {name: values[:-1] for name, values in events.columns.items()}
    return replace(
        events, item=events.item[:-1], time=events.time[:-1], event=events.event[:-1], columns=columns
    )

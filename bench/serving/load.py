"""Open-loop load: requests arrive at random times, from users with uneven activity, whether or not others are answered.

Arrivals are a Poisson process and activities follow Zipf's law. A latency is measured from the time at which a
request was due, so a slow generator hides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

_MOST_WAITING = 2000
_ZIPF = 1.1
_LEAST = 12  # requests of a rate


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load at one rate.

    Attributes:
        rate: Requests a second.
        p50_ms: Median latency.
        p99_ms: 99th percentile of the latency, inf if too many failed.
        failed: Failed requests.
        requests: All requests.
    """

    rate: float
    p50_ms: float
    p99_ms: float
    failed: int
    requests: int


def drive_load(
    submit: Callable[[int], Future[Any]], users: int, rate: float, seconds: float, seed: int
) -> LoadResult:
    """Send requests at a rate.

    Args:
        submit: Takes a user's number and returns a future of the answer.
        users: Number of users.
        rate: Requests a second.
        seconds: Duration.
        seed: Seed of times and users.
    """
    draw = np.random.default_rng(seed)
    due = np.cumsum(draw.exponential(1 / rate, max(_LEAST, int(rate * seconds))))
    users_by_request = draw_zipf_users(draw, users, len(due))
    done = np.full(len(due), np.inf)
    futures: list[Future[Any]] = []
    began = time.perf_counter()

    def make_callback(place: int) -> Callable[[Future[Any]], None]:
        def note(future: Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                done[place] = time.perf_counter() - began

        return note

    answered = 0
    for place, (moment, user) in enumerate(zip(due.tolist(), users_by_request.tolist(), strict=True)):
        if (left := moment - (time.perf_counter() - began)) > 0:
            time.sleep(left)
        if place - answered > _MOST_WAITING:  # it will not catch up: the rate is too high
            break
        if place % 64 == 0:
            answered = int(np.isfinite(done[:place]).sum())
        future = submit(user)
        future.add_done_callback(make_callback(place))
        futures.append(future)
    wait(futures, timeout=10)
    latencies = done[: len(futures)] - due[: len(futures)]
    failed = int((~np.isfinite(latencies)).sum()) + len(due) - len(futures)
    p50, p99 = np.quantile(np.where(np.isfinite(latencies), latencies, 1e6), [0.5, 0.99]).tolist()
    return LoadResult(
        rate, 1e3 * p50, float("inf") if failed > len(due) // 100 else 1e3 * p99, failed, len(due)
    )


def draw_zipf_users(draw: np.random.Generator, users: int, count: int) -> np.ndarray:
    """Draw users [count]; the n-th most active one sends n^-1.1 as many requests as the first."""
    chance = np.arange(1, users + 1) ** -_ZIPF
    return draw.permutation(users)[draw.choice(users, count, p=chance / chance.sum())]


def find_best_rates(
    systems: dict[str, Callable[[int], Future[Any]]],
    users: int,
    *,
    p99_ms: float,
    seconds: float,
    first: dict[str, float],
    steps: int,
    seed: int,
) -> tuple[dict[str, float], list[LoadResult]]:
    """Find the highest rate of each system that keeps a p99.

    Systems are searched in turn, step by step: rates are doubled until one fails, then bisected.

    Args:
        systems: Submit functions by name.
        users: Number of users.
        p99_ms: Largest p99 in milliseconds.
        seconds: Duration of a step.
        first: First rate of each system.
        steps: Number of steps.
        seed: Seed of times and users.

    Returns:
        The highest rate of each system, and the results of all loads.
    """
    low, high = dict.fromkeys(systems, 0.0), dict.fromkeys(systems, float("inf"))
    rate = dict(first)
    loads: list[LoadResult] = []
    for step in range(steps):
        for name, submit in systems.items():
            load = drive_load(submit, users, rate[name], seconds, seed + step)
            loads.append(load)
            if load.p99_ms <= p99_ms:
                low[name] = max(low[name], rate[name])
            else:
                high[name] = min(high[name], rate[name])
            rate[name] = _choose_next_rate(low[name], high[name])
    return low, loads


def _choose_next_rate(low: float, high: float) -> float:
    if not low:
        return high / 2
    return 2 * low if high == float("inf") else float(np.sqrt(low * high))


def compute_median(values: Sequence[float]) -> float:
    """Return the median of several rounds."""
    return float(np.median(np.asarray(values)))

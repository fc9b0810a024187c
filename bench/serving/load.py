"""Open-loop load: requests are sent at random times, whether or not earlier ones are answered, from users of uneven activity.

Arrivals are a Poisson process and activities follow Zipf's law. A latency is measured from the time at which a request was due,
so that it includes delays of the generator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

_MAX_WAITING = 2000  # number of requests without an answer at which a load is stopped
_ZIPF_EXPONENT = 1.1
_MIN_REQUESTS = 12  # of a load
_COUNT_INTERVAL = 64  # number of requests between two counts of the answers


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load at one rate.

    Attributes:
        rate: Requests per second.
        p50_ms: Median latency.
        p99_ms: 99th percentile of the latency; inf if more than 1 % of the requests failed.
        failed: Number of requests that failed or were not sent.
        requests: Number of all requests.
    """

    rate: float
    p50_ms: float
    p99_ms: float
    failed: int
    requests: int


def drive_load(
    submit: Callable[[int], Future[Any]], users: int, rate: float, seconds: float, seed: int
) -> LoadResult:
    """Send requests at a rate and wait for their answers.

    Args:
        submit: Takes a user's number and returns a future of the answer.
        users: Number of users.
        rate: Requests per second.
        seconds: Duration.
        seed: Seed of times and users.
    """
    generator = np.random.default_rng(seed)
    # Seconds after the start at which each request is due, and at which it was answered.
    due_s = np.cumsum(generator.exponential(1 / rate, max(_MIN_REQUESTS, int(rate * seconds))))
    users_by_request = draw_zipf_users(generator, users, len(due_s))
    answered_s = np.full(len(due_s), np.inf)
    futures: list[Future[Any]] = []
    began = time.perf_counter()

    def make_callback(number: int) -> Callable[[Future[Any]], None]:
        def record_answer(future: Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                answered_s[number] = time.perf_counter() - began

        return record_answer

    answered_count = 0
    for number, (request_due_s, user) in enumerate(
        zip(due_s.tolist(), users_by_request.tolist(), strict=True)
    ):
        if (wait_s := request_due_s - (time.perf_counter() - began)) > 0:
            time.sleep(wait_s)
        if number - answered_count > _MAX_WAITING:  # the rate is too high for the system
            break
        if number % _COUNT_INTERVAL == 0:
            answered_count = int(np.isfinite(answered_s[:number]).sum())
        future = submit(user)
        future.add_done_callback(make_callback(number))
        futures.append(future)
    wait(futures, timeout=10)
    latencies_s = answered_s[: len(futures)] - due_s[: len(futures)]
    failed = int((~np.isfinite(latencies_s)).sum()) + len(due_s) - len(futures)
    p50_s, p99_s = np.quantile(np.where(np.isfinite(latencies_s), latencies_s, 1e6), [0.5, 0.99]).tolist()
    p99_ms = float("inf") if failed > len(due_s) // 100 else 1e3 * p99_s
    return LoadResult(rate, p50_ms=1e3 * p50_s, p99_ms=p99_ms, failed=failed, requests=len(due_s))


def draw_zipf_users(generator: np.random.Generator, users: int, count: int) -> np.ndarray:
    """Draw users [count]; the n-th most active one sends n^-1.1 as many requests as the first."""
    weight = np.arange(1, users + 1) ** -_ZIPF_EXPONENT
    return generator.permutation(users)[generator.choice(users, count, p=weight / weight.sum())]


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
    """Find the highest rate of each system at which its p99 is at most `p99_ms`.

    The systems take turns, one load per step: the rate is doubled until a load fails, then bisected.

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
    """Return the rate to try between the highest one that passed (0: none) and the lowest one that failed (inf: none)."""
    if not low:
        return high / 2
    return 2 * low if high == float("inf") else float(np.sqrt(low * high))


def compute_median(values: Sequence[float]) -> float:
    """Return the median of several rounds."""
    return float(np.median(np.asarray(values)))

"""Serving over HTTP: a run, compared with an empty answer of Ray Serve and Hugging Face behind `@serve.batch`, behind one proxy.

The load is open: requests are sent at random times, from users with Zipf activities, over connections of one asyncio loop in this
process. So the generator of the load, the proxy and the replicas share the machine's cores.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import aiohttp
import numpy as np

from nonet.bench.serving.hugging_face import MAX_BATCH, WAIT_S, HuggingFace
from nonet.bench.serving.load import LoadResult, compute_median, drive_load, find_best_rates
from nonet.bench.serving.queue import P99_MS, Result
from nonet.bench.timing import find_free_port
from nonet.deploy.opened import OpenedRun
from nonet.deploy.serving import serve_application
from nonet.deploy.serving.service import ServeConfig

_RATES, _SECONDS = (5.0, 10.0, 20.0, 40.0), 8.0  # fixed rates in requests per second, and duration of a load
_STEPS = 5  # number of loads of the search for the highest rate
_CALLERS, _LIMIT = 997, 5.0  # number of callers, and the limit of a caller in requests per second
_OTHERS_RATE = 10.0  # requests per second of all other callers, beside one that exceeds its limit
OURS, EMPTY, THEIRS = "over HTTP", "Ray Serve's empty answer", "Hugging Face behind @serve.batch, over HTTP"


class HttpCallers:
    """Sends requests to one address over many connections, from an asyncio loop in a thread."""

    def __init__(self, url: str):
        self._url, self._loop = url, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._session = asyncio.run_coroutine_threadsafe(self._open_session(), self._loop).result()

    async def _open_session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=30)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    def post(self, path: str, body: dict[str, Any], caller: str) -> Future[tuple[int, dict[str, str]]]:
        """Post a request, and return a future of status and headers."""
        return asyncio.run_coroutine_threadsafe(self._post(path, body, caller), self._loop)

    def post_checked(self, path: str, body: dict[str, Any], caller: str) -> Future[None]:
        """Post a request, and return a future that fails unless the answer is a success."""
        return asyncio.run_coroutine_threadsafe(self._post_checked(path, body, caller), self._loop)

    async def _post(self, path: str, body: dict[str, Any], caller: str) -> tuple[int, dict[str, str]]:
        headers = {"X-Caller": caller, "Authorization": f"Bearer {os.environ['NONET_TOKEN']}"}
        async with self._session.post(self._url + path, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}

    async def _post_checked(self, path: str, body: dict[str, Any], caller: str) -> None:
        status, headers = await self._post(path, body, caller)
        if status != 200 or headers.get("x-version") == "none":
            raise RuntimeError(f"{path}: {status}, version {headers.get('x-version')}")

    def close(self) -> None:
        """Close the connections and end the thread."""
        asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def bench_http(run: str, rounds: int) -> Result:
    """Measure latency at fixed rates, the rate at p99 <= 200 ms, and a caller at ten times its limit."""
    opened = OpenedRun.open(run)
    os.environ.setdefault("NONET_TOKEN", secrets.token_hex(8))  # names count for limits beside a token
    users = opened.corpus.seq.user_id.tolist()
    port = find_free_port()
    settings = ServeConfig(rate=_LIMIT, burst=_LIMIT, deadline_s=5.0)
    with serve_application(opened.folder.path, settings, "127.0.0.1", port) as serve:
        _deploy_others(serve, str(opened.folder.path))
        callers = HttpCallers(f"http://127.0.0.1:{port}")
        turn = iter(range(1 << 30))

        def make_submit(path: str) -> Callable[[int], Future[None]]:
            def submit(user: int) -> Future[None]:
                body = {"user": users[user], "k": 10}
                return callers.post_checked(path, body, f"caller {next(turn) % _CALLERS}")

            return submit

        systems = {
            OURS: make_submit("/recommend"),
            EMPTY: make_submit("/empty"),
            THEIRS: make_submit("/generate"),
        }
        for submit in systems.values():
            submit(0).result(120)
        rows = _measure_fixed_rates({name: systems[name] for name in (OURS, EMPTY)}, len(users), rounds)
        best = _find_best_rates(systems, len(users), rounds)
        rows += [{"system": name, f"requests/s at p99 <= {P99_MS:g} ms": rate} for name, rate in best.items()]
        limited, ratio = _measure_greedy_caller(callers, systems[OURS], users, rounds)
        callers.close()
    ratio |= {f"rate: {OURS} / {name}": best[OURS] / max(best[name], 1e-9) for name in (EMPTY, THEIRS)}
    return rows + limited, ratio


def _measure_fixed_rates(
    systems: dict[str, Callable[[int], Future[Any]]], users: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure the latency of each system at fixed rates."""
    results_by_case: dict[tuple[str, float], list[LoadResult]] = {}
    for turn in range(rounds):
        for rate in _RATES:
            for name, submit in systems.items():
                results_by_case.setdefault((name, rate), []).append(
                    drive_load(submit, users, rate, _SECONDS, turn)
                )
    return [
        {
            "system": name,
            "requests/s": rate,
            "p50, ms": compute_median([load.p50_ms for load in loads]),
            "p99, ms": compute_median([load.p99_ms for load in loads]),
            "failed": sum(load.failed for load in loads),
        }
        for (name, rate), loads in results_by_case.items()
    ]


def _find_best_rates(
    systems: dict[str, Callable[[int], Future[Any]]], users: int, rounds: int
) -> dict[str, float]:
    """Find the highest rate of each system at a p99 of `P99_MS`, the median over rounds."""
    first = dict(zip(systems, (32.0, 128.0, 2.0), strict=True))
    rates_by_round = [
        find_best_rates(
            systems, users, p99_ms=P99_MS, seconds=3.0, first=first, steps=_STEPS, seed=100 * turn
        )[0]
        for turn in range(rounds)
    ]
    return {name: compute_median([rates[name] for rates in rates_by_round]) for name in systems}


def _measure_greedy_caller(
    callers: HttpCallers, others: Callable[[int], Future[Any]], users: list[Any], rounds: int
) -> Result:
    """Measure the p99 of others with and without a caller at ten times its limit, and count that caller's answers by status."""
    answers: Counter[str] = Counter()
    p99: dict[str, list[float]] = {"before": [], "beside": []}

    def submit_greedy(user: int) -> Future[Any]:
        future = callers.post("/recommend", {"user": users[user], "k": 10}, "greedy")

        def count(done: Future[Any]) -> None:
            status, headers = done.result()
            answers[
                "refused, Retry-After" if status == 429 and "retry-after" in headers else str(status)
            ] += 1

        future.add_done_callback(count)
        return future

    for turn in range(rounds):
        p99["before"].append(drive_load(others, len(users), _OTHERS_RATE, _SECONDS, turn).p99_ms)
        greedy_load = (submit_greedy, len(users), 10 * _LIMIT, _SECONDS, turn)
        greedy_thread = threading.Thread(target=drive_load, args=greedy_load)
        greedy_thread.start()
        p99["beside"].append(drive_load(others, len(users), _OTHERS_RATE, _SECONDS, turn).p99_ms)
        greedy_thread.join()
    before, after = compute_median(p99["before"]), compute_median(p99["beside"])
    row = {"system": "a caller at 10x its limit", "others' p99 before, ms": before, "beside it, ms": after}
    return [row | {f"answers: {name}": count for name, count in answers.items()}], {
        "others' p99: beside / before": after / before
    }


def _deploy_others(serve: Any, run: str) -> None:
    """Deploy the empty answer and Hugging Face to Ray Serve; `run` is the folder of the run."""

    @serve.deployment(name="Empty", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
    class Empty:
        async def __call__(self, request: Any) -> dict[str, Any]:
            await request.json()
            return {"items": [{"item": place, "score": -1.5} for place in range(10)], "version": 1}

    @serve.deployment(name="Generate", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
    class Generate:
        def __init__(self):
            import torch

            torch.set_num_threads(1)
            served_run = OpenedRun.open(run)
            model = served_run.load_recommender(served_run.publish_newest()).model
            self._model = HuggingFace(
                served_run.corpus.trie, served_run.corpus.sids, model.width, len(model.blocks), model.blocks[0].heads,
                served_run.setup.history, served_run.scenario.evaluate.width, here=False,
            )  # fmt: skip
            seq = served_run.corpus.seq
            cuts = zip(seq.offsets[:-1].tolist(), seq.offsets[1:].tolist(), strict=True)
            self._items = {
                user: np.asarray(seq.item[a:b])
                for user, (a, b) in zip(seq.user_id.tolist(), cuts, strict=True)
            }

        @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=WAIT_S)
        async def answer_batch(self, users: list[Any]) -> list[Any]:
            return [beams.tolist() for beams in self._model.generate([self._items[user] for user in users])]

        async def __call__(self, request: Any) -> Any:
            return await self.answer_batch((await request.json())["user"])

    serve.run(Empty.bind(), name="empty", route_prefix="/empty")
    serve.run(Generate.bind(), name="generate", route_prefix="/generate")

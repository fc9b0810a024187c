"""Services that are killed while callers ask and post: schedules, and forked processes in place of Serve's replicas.

    python killed_services.py RUN FOLDER

imports once, forks features and two engines, each behind a socket in FOLDER, and forks one anew when it dies, as Serve does.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from pathlib import Path

import numpy as np

NAMES = {"Features": ("Features",), "Engine": ("Engine0", "Engine1")}
AGAIN_S = 60


def schedule(asked, kill, seed, names):
    """Callers ask and post while services of these names are killed; what was acknowledged, what came, and what went wrong.

    asked(path, body) -> status, answer; it raises OSError where it was cut off. kill(name, rng).
    """
    rng = np.random.default_rng(seed)
    over, acknowledged, answered, wrong = threading.Event(), [], [], []

    def ask():
        number = 0
        while not over.is_set():
            number += 1
            try:
                status, answer = asked("/recommend", {"user": 100 + number % 20, "k": 5})
            except OSError as error:  # it was cut off with the replica: a caller asks again
                answered.append(type(error).__name__)
                continue
            if status == 200:
                items = [row["item"] for row in answer["items"]]
                if len(set(items)) != 5 or (answer["fallback"] is None and answer["version"] is None):
                    wrong.append(answer)
            elif status < 500:
                wrong.append((status, answer))
            answered.append(status)

    def post():
        number = 0
        while not over.is_set():
            number += 1
            event = [{"item": 1001 + number % 30, "time": 2_000_000_000 + number}]
            body = {"user": f"new-{seed}", "events": event, "id": f"{seed}-{number}"}
            for _ in range(200):  # the same post until it is acknowledged
                try:
                    status, answer = asked("/events", body)
                except OSError:
                    status, answer = 503, {}
                if status == 200:
                    acknowledged.append((1001 + number % 30, answer))
                    break
                if over.is_set():
                    break
                time.sleep(0.1)

    callers = [threading.Thread(target=call) for call in (ask, post)]
    for caller in callers:
        caller.start()
    try:
        for name in [*rng.choice(names, 1), "Features"][: 1 + seed % 2]:
            time.sleep(rng.uniform(0.1, 0.5))
            kill(str(name), rng)
            time.sleep(rng.uniform(0.2, 0.8))
        until, answer = time.monotonic() + AGAIN_S, None
        while time.monotonic() < until:
            try:
                status, answer = asked("/recommend", {"user": 103, "k": 5})
                if status == 200 and answer["fallback"] is None:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        else:
            wrong.append(f"no answer of the engine came again within {AGAIN_S} s; the last: {answer}")
    finally:
        over.set()
        for caller in callers:
            caller.join()
    return acknowledged, answered, wrong


class Processes:
    """The forked services of a run; `handle` is asked as a handle of Serve, `kill` ends one by SIGKILL."""

    def __init__(self, run, folder):
        self._folder = folder
        self._process = subprocess.Popen([sys.executable, __file__, str(run), str(folder)])
        self.wait()

    def handle(self, name):
        return _Handle([self._folder / f"{each}.sock" for each in NAMES[name]])

    def kill(self, name, rng):
        place, until = self._folder / f"{rng.choice(NAMES[name])}.pid", time.monotonic() + AGAIN_S
        while time.monotonic() < until:  # where it is just being made anew, that one
            try:
                os.kill(int(place.read_text()), signal.SIGKILL)
                return
            except ProcessLookupError:
                time.sleep(0.05)

    def wait(self):
        until = time.monotonic() + AGAIN_S
        while not all((self._folder / f"{each}.sock").exists() for some in NAMES.values() for each in some):
            assert time.monotonic() < until
            assert self._process.poll() is None
            time.sleep(0.05)

    def close(self):
        self._process.terminate()
        self._process.wait()


class _Handle:
    def __init__(self, sockets):
        self._sockets, self._pool, self._turn = sockets, ThreadPoolExecutor(16), 0

    def __getattr__(self, method):
        return _Method(self, method)

    def call(self, method, args, options):
        from ray.exceptions import RayActorError

        self._turn += 1
        try:
            with Client(str(self._sockets[self._turn % len(self._sockets)]), "AF_UNIX") as line:
                line.send((method, args, options))
                good, value = line.recv()
        except (OSError, EOFError):
            raise RayActorError from None
        if not good:
            raise value
        return value

    def submit(self, *call):
        return _Response(self._pool.submit(self.call, *call))


class _Method:
    def __init__(self, handle, method):
        self._handle, self._method = handle, method

    def remote(self, *args, **options):
        return self._handle.submit(self._method, args, options)


class _Response:
    def __init__(self, future: Future):
        self._future = future

    def __await__(self):
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout_s):
        return self._future.result(timeout_s)


def main(run, folder):
    """Fork the services, and again those that die, until SIGTERM."""
    import torch

    import nonet.deploy.opened.features
    import nonet.deploy.serving.service.engines  # noqa: F401  what a service imports, once

    torch.set_num_threads(1)
    alive: dict[int, str] = {}

    def end(*_):
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for some in NAMES.values():
        for name in some:
            alive[_fork(run, folder, name)] = name
    while True:
        name = alive.pop(os.wait()[0])
        time.sleep(0.3)  # what Serve takes to see it is longer
        alive[_fork(run, folder, name)] = name


def _fork(run, folder, name):
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _serve(run, folder, name)
    finally:
        os._exit(1)


def _serve(run, folder, name):
    from nonet.deploy.serving.apart.deployments import EngineService, FeaturesService
    from nonet.deploy.serving.service import ServeConfig

    kind = FeaturesService if name == "Features" else EngineService
    service, loop = kind(run, ServeConfig(deadline_s=2.0, follow=False)), asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    place = folder / f"{name}.sock"
    place.unlink(missing_ok=True)
    listener = Listener(str(place), "AF_UNIX", backlog=64)
    (folder / f"{name}.pid").write_text(str(os.getpid()))

    def answer(line):
        with line:
            method, args, options = line.recv()
            try:
                value = getattr(service, method)(*args, **options)
                if inspect.isawaitable(value):
                    value = asyncio.run_coroutine_threadsafe(value, loop).result()
                line.send((True, value))
            except Exception as error:
                line.send((False, error))

    while True:
        threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

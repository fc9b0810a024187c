"""A coordinator and workers as real processes over files, and a schedule that kills, adds and ends them at random.

The coordinator's model is the history of row ids that it was taught. It commits model and ledger together every few steps;
killed, another one goes on from the newest whole commit. Workers read their slices from the files and answer with the ids that
they read.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from nonet.atomic import write_whole
from nonet.samples.ledger.coordinator import Coordinator, Worker, serve
from nonet.samples.ledger.leases import Leases
from nonet.samples.ledger.ledger import Ledger
from nonet.samples.ledger.manifest import DataFile, Manifest
from nonet.samples.ledger.order import Order, Steps

GROUPS, STEP, SLICE, EVERY = (37, 5, 61, 20), 24, 5, 3
_CONTEXT = multiprocessing.get_context("fork")  # of a process that runs schedules and has no threads
PAUSE_S = 0.002  # that a slice takes, so that processes die with work in hand


def parts(seed: int):
    """Manifest, order and steps of two files of 123 rows."""
    manifest = Manifest(tuple(DataFile(name, 1, GROUPS, name) for name in ("a", "b")))
    order = Order(manifest.group_rows, seed, "elastic")
    return manifest, order, Steps(manifest.rows, STEP, SLICE)


def ids_of(manifest, order, part) -> list[int]:
    ids = []
    for group, first, last in order.parts(part.epoch, part.start, part.stop):
        within = order.within(part.epoch, group)
        assert within is not None
        ids += manifest.ids(group, within[first:last]).tolist()
    return ids


def coordinate(folder: Path, seed: int, epochs: int) -> None:
    """One life of the coordinator, from the newest commit to the end."""
    manifest, order, steps = parts(seed)
    ledger, history, commit = Ledger(manifest, order.digest, order.rows), [], folder / "commit.json"
    if commit.exists():
        body = json.loads(commit.read_text())
        history = body["history"]
        ledger.restore(body["ledger"].encode(), bytes.fromhex(body["bitmaps"]))
    stop = epochs * steps.an_epoch

    def applied(step, answers):
        history.append([id_ for answer in answers for id_ in answer])
        if (step + 1) % EVERY == 0 or step + 1 == stop:
            facts, bitmaps = ledger.snapshot()
            body = {"history": history, "ledger": facts.decode(), "bitmaps": bitmaps.hex()}
            write_whole(commit, json.dumps(body).encode())

    leases = Leases(ledger, steps, len(history), stop)
    serve(Coordinator(leases, applied), str(folder / "socket"))


def work(folder: Path, seed: int, name: str) -> None:
    """One worker, until the last step is applied."""
    manifest, order, _ = parts(seed)
    with Worker(str(folder / "socket"), name, patience_s=20) as worker:
        for part in worker.slices():
            time.sleep(PAUSE_S)
            worker.done(part, ids_of(manifest, order, part))


class Schedule:
    """Random kills, departures and arrivals until the coordinator has ended by itself."""

    def __init__(self, folder: Path, seed: int, epochs: int = 2):
        self.folder, self.seed, self.epochs = folder, seed, epochs
        self.draw = np.random.default_rng(seed)
        self.kills = {"coordinator": 0, "worker": 0}
        self._born = 0
        self.workers: list[BaseProcess] = []

    def run(self, until_s: float = 60.0) -> list[list[int]]:
        """The surviving history: row ids by step."""
        coordinator = self._start(coordinate, self.epochs)
        self.workers = [self._join() for _ in range(int(self.draw.integers(1, 4)))]
        end = time.monotonic() + until_s
        try:
            while coordinator.is_alive():
                assert time.monotonic() < end, "the schedule hangs"
                time.sleep(float(self.draw.uniform(0.02, 0.08)))
                coordinator = self._event(coordinator)
            assert coordinator.exitcode == 0
        finally:
            for process in (coordinator, *self.workers):
                process.kill()
                process.join()
        return json.loads((self.folder / "commit.json").read_text())["history"]

    def _event(self, coordinator: BaseProcess) -> BaseProcess:
        kind = self.draw.choice(["coordinator", "worker", "leave", "join"], p=[0.2, 0.35, 0.1, 0.35])
        if kind == "coordinator" and self.kills["coordinator"] < 2 and coordinator.is_alive():
            coordinator.kill()
            coordinator.join()
            self.kills["coordinator"] += 1
            (self.folder / "socket").unlink(missing_ok=True)
            return self._start(coordinate, self.epochs)
        if kind in ("worker", "leave") and self.workers and self.kills["worker"] < 6:
            worker = self.workers.pop(int(self.draw.integers(len(self.workers))))
            worker.kill() if kind == "worker" else worker.terminate()
            worker.join()
            self.kills["worker"] += 1
        if (kind == "join" and len(self.workers) < 5) or not self.workers:
            self.workers.append(self._join())
        return coordinator

    def _join(self) -> BaseProcess:
        self._born += 1
        return self._start(work, f"w{self._born}")

    def _start(self, what: Callable[..., None], last: str | int) -> BaseProcess:
        process = _CONTEXT.Process(target=what, args=(self.folder, self.seed, last), daemon=True)
        process.start()
        return process


def run_schedules(folder: Path, seeds: list[int]) -> dict[int, tuple[list[list[int]], dict[str, int]]]:
    """The surviving history and the kills of each seed's schedule, run in a process of their own."""
    command = [sys.executable, __file__, str(folder), *map(str, seeds)]
    answer = subprocess.run(
        command, env={"PYTHONPATH": ":".join(filter(None, sys.path))}, capture_output=True, check=False
    )
    assert not answer.returncode, answer.stderr.decode()
    return {int(seed): (body["history"], body["kills"]) for seed, body in json.loads(answer.stdout).items()}


def _main() -> None:
    answers = {}
    for seed in map(int, sys.argv[2:]):
        folder = Path(sys.argv[1]) / str(seed)
        folder.mkdir()
        schedule = Schedule(folder, seed)
        answers[seed] = {"history": schedule.run(), "kills": schedule.kills}
    print(json.dumps(answers))


if __name__ == "__main__":
    _main()

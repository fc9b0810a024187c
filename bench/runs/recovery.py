"""Recovery of a run from a killed worker, against Ray restarting plain actors, in turns.

Ours: the training process of the quickstart is killed in pretraining; measured until the run applies a step that it had not
applied before, less the loading of the checkpoint. It writes a checkpoint after every step, so that no step is repeated: how many
are depends on `checkpoint.every`. By hand: as many actors as the run has worker processes, with the imports of
the same roles, are killed; measured until Ray has restarted all and they answer. Each round begins with new processes on both
sides.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from nonet.bench.timing import LapTimer
from nonet.controller.groups import CONTROLLER
from nonet.deploy.after.chaos import list_processes, select_process
from nonet.deploy.run import api
from nonet.workers.runtime import NAMESPACE, ensure_ray

_FIRST_STEP = 5  # after which the trainer is killed
_POLL_S = 0.02
_CHANGES = [
    "stages.pretrain.epochs=10000",
    "checkpoint.every=1",
    "evaluate.baselines=[]",
    "evaluate.every=100000",
]


def bench_recovery(rounds: int = 5) -> dict[str, Any]:
    """Return the median seconds of both sides and their ratio.

    Args:
        rounds: The number of rounds; each runs both sides once.
    """
    recovery_s, loading_s, by_hand = list[float](), list[float](), LapTimer()
    ensure_ray()
    with tempfile.TemporaryDirectory() as folder:
        scenario_file = api.scenario("quickstart", _CHANGES)
        for turn in range(rounds):
            seconds, loading, roles = _kill_trainer(scenario_file, Path(folder) / f"run-{turn}")
            recovery_s.append(seconds - loading)
            loading_s.append(loading)
            _restart_actors(roles, by_hand)
    ours_s, hand_s = statistics.median(recovery_s), by_hand.compute_median_s()
    rows = [
        {"side": "a run: trainer killed to next step", "median_s": ours_s, "max_s": max(recovery_s)},
        {
            "side": f"{len(roles)} plain actors: killed to answers",
            "median_s": hand_s,
            "max_s": max(by_hand.wall_s),
        },
        {"side": "loading of the checkpoint, left out", "median_s": statistics.median(loading_s)},
    ]
    return {"rows": rows, "ratio": {"recovery of a run, over plain actors": ours_s / hand_s}}


def _kill_trainer(
    scenario_file: api.ScenarioFile, folder: Path
) -> tuple[float, float, list[tuple[str, ...]]]:
    """Kill the trainer of a new run.

    Returns:
        Seconds until the next new step, seconds of loading the checkpoint, and the roles of each worker process.
    """
    run = api.start(scenario_file, run_dir=folder)
    try:
        progress = _wait_for_step(run.id, _FIRST_STEP)
        processes = list_processes(run.id, progress["groups"])
        trainer = select_process(processes, "trainer", 0)
        assert trainer is not None
        began = time.perf_counter()
        os.kill(trainer[1], signal.SIGKILL)
        while _wait_for_step(run.id, progress["applied"] + 1)["losses"] == 0:  # a step that was on its way
            progress = _wait_for_step(run.id, 0)
        seconds = time.perf_counter() - began
        roles = [process[3] for process in processes if CONTROLLER not in process[3]]
    finally:
        run.close()
    spans = [json.loads(line.rstrip(",\n")) for line in run.folder.trace.read_text().splitlines()[1:] if line]
    loading_s = [span["dur"] / 1e6 for span in spans if span.get("name") == "restore"]
    return seconds, loading_s[-1], roles


def _wait_for_step(run_id: str, step: int) -> dict[str, Any]:
    """Wait until a run has applied a number of steps, and return its progress."""
    while True:
        try:
            controller: Any = ray.get_actor(f"{run_id}/{CONTROLLER}", NAMESPACE)
            progress: Any = ray.get(controller.read_progress.remote("step", 0.0))
        except (ValueError, RayError):
            continue
        if progress["applied"] >= step:
            return progress
        time.sleep(_POLL_S)


def _restart_actors(roles: list[tuple[str, ...]], timer: LapTimer) -> None:
    """Start an actor for each process of a run, kill all, and add a lap until all answer again."""

    @ray.remote(num_cpus=0, max_restarts=1, max_task_retries=-1)
    class Plain:
        def __init__(self, roles: tuple[str, ...]) -> None:
            from nonet.plugins import load_heavy
            from nonet.workers.roles.kinds import ROLES
            from nonet.workers.runtime import RoleSpec  # noqa: F401

            for role in set(roles) & set(ROLES.list_shipped()):
                load_heavy(ROLES.get(role).cls)

        def get_pid(self) -> int:
            return os.getpid()

    actors: list[Any] = [Plain.remote(names) for names in roles]
    pids = ray.get([actor.get_pid.remote() for actor in actors])
    with timer:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while set(ray.get([actor.get_pid.remote() for actor in actors])) & set(pids):
            time.sleep(_POLL_S)
    for actor in actors:
        ray.kill(actor)

"""One job of a search in its own process: a run as `nonet run` starts it, and its score.

The actors that a run starts would join the placement group of Ray Tune's actor. Therefore the driver of a run is a
separate actor outside of any placement group, on the node of the search. It runs one job after the other.
"""

from __future__ import annotations

import io
import json
import shutil
import time
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from nonet.controller.record import RunFolder, lock_run
from nonet.deploy.run import DriverRun, Panel, ScenarioFile, api
from nonet.deploy.tune.subject import TunedScenario
from nonet.errors import ConfigError, NonetError, WorkerFailed

NO_NUMBER = "its validation is not a number"


def run_trial(subject: TunedScenario, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job and return its score.

    An unfinished run is continued, and a finished one is only read. A run that failed by itself is tried
    once more, because the machine may have been the cause; after that it is a trial without a score.

    Args:
        subject: The scenario that is tuned.
        job: {"values", "share", "folder"}.

    Returns:
        {"score", "failed", "broken", "minutes"}. `failed` is the reason if the values failed. `broken` is the
        reason if the search cannot continue, whatever the values.
    """
    start_s = time.monotonic()
    answer: dict[str, Any] = {"score": None, "failed": None, "broken": None}
    run = RunFolder(Path(job["folder"]))
    try:
        failure = _run_job(subject, job, run)
        failure = failure and _run_job(subject, job, run)  # a second try if the first failed
        answer["failed"] = failure or None
        if not failure:
            answer["score"] = subject.read_score(run)
            answer["failed"] = NO_NUMBER if answer["score"] is None else None
    except NonetError as error:
        answer["broken"] = f"{run.id}: {error}"
    return answer | {"minutes": (time.monotonic() - start_s) / 60}


def _run_job(subject: TunedScenario, job: dict[str, Any], run: RunFolder) -> str:
    """Run a job to its end, unless it has ended before.

    Returns:
        The reason if the job's values failed; "" if the run is done.

    Raises:
        NonetError: Any other failure, for example a stop.
    """
    if run.report.exists():
        return ""
    try:
        scenario_file = subject.build_trial(job["values"], Fraction(job["share"]))
    except ConfigError as error:
        return str(error)
    panel = Panel(io.StringIO(), live=False)
    try:
        if run.scenario.exists() and list(run.checkpoints.glob("step-*")):
            outcome = api.resume(run.path, scenario_file=scenario_file, panel=panel)
        else:
            _clear_run(run)
            outcome = _start_run(scenario_file, run, panel)
    except WorkerFailed as error:
        return str(error)
    if isinstance(outcome, str):
        return outcome
    if outcome.state != "done":
        raise NonetError("it was stopped; run the same command to continue")
    return ""


def _start_run(scenario_file: ScenarioFile, run: RunFolder, panel: Panel) -> DriverRun | str:
    """Run a scenario to its end; return the finished run, or the reason if the scenario or its data are refused."""
    try:
        return api.run(scenario_file, run_dir=run.path, panel=panel)
    except ConfigError as error:
        return str(error)


def _clear_run(run: RunFolder) -> None:
    """Delete the folder of a run that was killed before its first checkpoint. Raises ConfigError if it is in progress."""
    with lock_run(run):
        shutil.rmtree(run.path)


def train_trial(config: dict[str, Any], *, subject: TunedScenario, node_id: str) -> None:
    """Run one job and report its answer once: the trainable of Ray Tune.

    Args:
        config: {"job": the job of `run_trial` as JSON}.
        subject: The scenario that is tuned.
        node_id: The Ray node on which the driver of the run is started.
    """
    import ray
    from ray import tune

    tune.report(ray.get(_get_driver(node_id).run.remote(subject, json.loads(config["job"]))))


@cache
def _get_driver(node_id: str) -> Any:
    """Return this process's actor that drives runs, started at the first call; it ends with this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(_TrialDriver).options(num_cpus=0, scheduling_strategy=on_node).remote()


class _TrialDriver:
    """The actor that drives the runs of jobs."""

    def run(self, subject: TunedScenario, job: dict[str, Any]) -> dict[str, Any]:
        """Call `run_trial`."""
        return run_trial(subject, job)

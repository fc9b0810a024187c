"""One trial in its own process: a run as `nonet run` starts it, and its score.

Ray Tune's actor has a placement group and would capture everything that a run starts. Therefore the driver
of a run is a separate actor outside of any placement group, on the node of the search. It is reused for one
trial after the other.
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
        {"score", "failed", "broken", "minutes"}. `failed` says why the values failed. `broken` says why the
        search cannot continue, whatever the values.
    """
    began = time.monotonic()
    answer: dict[str, Any] = {"score": None, "failed": None, "broken": None}
    run = RunFolder(Path(job["folder"]))
    try:
        failure = _run_job(subject, job, run) and _run_job(subject, job, run)
        answer["failed"] = failure or None
        if not failure:
            answer["score"] = subject.read_score(run)
            answer["failed"] = NO_NUMBER if answer["score"] is None else None
    except NonetError as error:
        answer["broken"] = f"{run.id}: {error}"
    return answer | {"minutes": (time.monotonic() - began) / 60}


def _run_job(subject: TunedScenario, job: dict[str, Any], run: RunFolder) -> str:
    """Run a job to its end.

    Returns the reason if its values failed, else "". Raises NonetError for any other failure.
    """
    if run.report.exists():
        return ""
    try:
        made = subject.build_trial(job["values"], Fraction(job["share"]))
    except ConfigError as error:
        return str(error)
    panel = Panel(io.StringIO(), live=False)
    try:
        if run.scenario.exists() and list(run.checkpoints.glob("step-*")):
            ended = api.resume(run.path, scenario_file=made, panel=panel)
        else:
            _clear_run(run)
            ended = _start_run(made, run, panel)
    except WorkerFailed as error:
        return str(error)
    if isinstance(ended, str):
        return ended
    if ended.state != "done":
        raise NonetError("it was stopped; run the same command to continue")
    return ""


def _start_run(made: ScenarioFile, run: RunFolder, panel: Panel) -> DriverRun | str:
    """Run a trial to its end; return the reason if the scenario refuses its values."""
    try:
        return api.run(made, run_dir=run.path, panel=panel)
    except ConfigError as error:
        return str(error)


def _clear_run(run: RunFolder) -> None:
    """Remove what a killed run left before its first checkpoint. Raises ConfigError if a process still runs it."""
    with lock_run(run):
        shutil.rmtree(run.path)


def train_trial(config: dict[str, Any], *, subject: TunedScenario, node: str) -> None:
    """Run one job and report it once, as a trainable of Ray Tune."""
    import ray
    from ray import tune

    tune.report(ray.get(_get_driver(node).run.remote(subject, json.loads(config["job"]))))


@cache
def _get_driver(node: str) -> Any:
    """Return this process's actor that drives runs; it ends with this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_TrialDriver).options(num_cpus=0, scheduling_strategy=here).remote()


class _TrialDriver:
    """The actor that drives runs."""

    def run(self, subject: TunedScenario, job: dict[str, Any]) -> dict[str, Any]:
        """Run a job and return its score."""
        return run_trial(subject, job)

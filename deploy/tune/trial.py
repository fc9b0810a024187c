"""One trial, in a process of its own: a run as `nonet run` makes it, and its score.

Ray Tune's actor holds a placement group and would put all that a run starts into it. So a run's driver is an actor beside it, in
no group, on the node of the search, and used for one trial after the other.
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

from nonet.controller.record import RunFolder, claim
from nonet.deploy.run import Panel, Run, ScenarioFile, api
from nonet.deploy.tune.subject import Subject
from nonet.errors import ConfigError, NonetError, WorkerFailed

NO_NUMBER = "its validation is not a number"


def run_trial(subject: Subject, job: dict[str, Any]) -> dict[str, Any]:
    """{"score", "failed", "broken", "minutes"} of a job {"values", "share", "folder"}.

    A run that is there goes on, a finished one is only read. One that failed by itself is tried once more, for a machine may have
    failed it; after that it is a trial without a score. `broken`: the search cannot go on, and the trial is nobody's loss.
    """
    began = time.monotonic()
    answer: dict[str, Any] = {"score": None, "failed": None, "broken": None}
    run = RunFolder(Path(job["folder"]))
    try:
        failure = _ran(subject, job, run) and _ran(subject, job, run)
        answer["failed"] = failure or None
        if not failure:
            answer["score"] = subject.score(run)
            answer["failed"] = NO_NUMBER if answer["score"] is None else None
    except NonetError as error:
        answer["broken"] = f"{run.id}: {error}"
    return answer | {"minutes": (time.monotonic() - began) / 60}


def _ran(subject: Subject, job: dict[str, Any], run: RunFolder) -> str:
    """Run a job to its end; why its values failed, "" where they did not. Raises NonetError for anything else."""
    if run.report.exists():
        return ""
    try:
        made = subject.trial(job["values"], Fraction(job["share"]))
    except ConfigError as error:
        return str(error)
    panel = Panel(io.StringIO(), live=False)
    try:
        if run.scenario.exists() and list(run.checkpoints.glob("step-*")):
            ended = api.resume(run.path, given=made, panel=panel)
        else:
            _clear(run)
            ended = _started(made, run, panel)
    except WorkerFailed as error:
        return str(error)
    if isinstance(ended, str):
        return ended
    if ended.state != "done":
        raise NonetError("it was stopped; the same command goes on")
    return ""


def _started(made: ScenarioFile, run: RunFolder, panel: Panel) -> Run | str:
    """The run's end, or what of its values cannot be."""
    try:
        return api.run(made, run_dir=run.path, panel=panel)
    except ConfigError as error:
        return str(error)


def _clear(run: RunFolder) -> None:
    """Remove what a kill left before the first commit. Raises ConfigError where somebody still runs it."""
    with claim(run):
        shutil.rmtree(run.path)


def train(config: dict[str, Any], *, subject: Subject, node: str) -> None:
    """The trainable of Ray Tune: one job, reported once."""
    import ray
    from ray import tune

    tune.report(ray.get(_driver(node).run.remote(subject, json.loads(config["job"]))))


@cache
def _driver(node: str) -> Any:
    """The actor of this process that drives runs; it ends with this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_Driver).options(num_cpus=0, scheduling_strategy=here).remote()


class _Driver:
    def run(self, subject: Subject, job: dict[str, Any]) -> dict[str, Any]:
        return run_trial(subject, job)

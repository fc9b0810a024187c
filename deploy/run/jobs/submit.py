"""Submit a scenario as a Ray job, which runs `nonet job` in a folder with the files that the scenario needs."""

from __future__ import annotations

import itertools
import re
import shlex
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import nonet
from nonet.controller.record import create_run
from nonet.controller.scenario import check_scenario, find_scenario, load_scenario
from nonet.deploy.run import ScenarioFile, planning
from nonet.deploy.run.jobs.client import ClusterClient
from nonet.deploy.run.jobs.package import write_package
from nonet.deploy.run.jobs.runs import (
    RUN_KEY,
    SCENARIO_KEY,
    ClusterRun,
    describe_run,
    follow_run,
    list_cluster_runs,
)
from nonet.errors import ConfigError, NonetError

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,99}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AGENT_TIMEOUT_S, _AGENT_PAUSE_S = (
    60.0,
    1.0,
)  # for the agent that starts jobs; it is started after the dashboard
_NO_AGENT = "No available agent"


def submit_job(
    source: str,
    address: str,
    changes: list[str] | None = None,
    *,
    name: str | None = None,
    env: list[str] | None = None,
    detach: bool = False,
) -> int:
    """Submit a job and follow its log to the end.

    Args:
        source: A scenario's file or the name of a shipped one.
        address: The URL of the cluster's dashboard.
        changes: Changes of the scenario, each `a.b=c`.
        name: The id of the run; a run of this name that has not finished is continued. By default a new id.
        env: Names of environment variables that the job must have. Their values do not travel.
        detach: Whether to return when the job is accepted.

    Returns:
        The exit code of the job; 0 when detached.

    Raises:
        ConfigError: The scenario or an argument is wrong, the package is too large, the cluster cannot be reached or has other
            versions, or the run is in progress or has finished.
        NonetError: The cluster does not accept the job.
    """
    changes, env = changes or [], env or []
    _check_names(name, env)
    path = find_scenario(source)
    scenario, folder = load_scenario(path, changes)
    check_scenario(scenario)
    planning.check_files(ScenarioFile(scenario, folder), allows_absent=True)  # the job checks the rest
    run_id = name or create_run(scenario.name).id
    with tempfile.TemporaryDirectory(prefix="nonet-submit-") as staging_dir:
        package = Path(staging_dir) / "package.zip"
        write_package(package, scenario, path, changes, env, nonet.__version__)
        client = ClusterClient(address)
        client.check_versions()
        runs = list_cluster_runs(client)
        run = next((run for run in runs if run.id == run_id), ClusterRun(run_id))
        _check_unfinished(client, run)
        job_id = _choose_job_id(run_id, client.list_job_ids())
        _send_job(client, job_id, run_id, scenario.name, package)
    print(
        f"run        {run_id}{' (continued if it has a checkpoint)' if run.jobs else ''}\njob        {job_id}",
        flush=True,
    )
    if detach:
        for verb in ("status", "logs -f", "stop"):
            print(f"{verb.partition(' ')[0]:<10} nonet {_place_run(verb, run_id)} --address {client.address}")
        return 0
    exit_code = follow_run(client, run_id, job_id)
    if exit_code == 2:
        client.remove_job(job_id)  # it did not run anything
    else:
        _print_end(client, run_id, source, exit_code)
    return exit_code


def _print_end(client: ClusterClient, run_id: str, source: str, exit_code: int) -> None:
    """Print where the run's report is, what to do next, and the exit code of its job."""
    status = describe_run(client, next(run for run in list_cluster_runs(client) if run.id == run_id))
    address = status.get("address")
    page = f"{status['folder']}/report.html on {status['host']}" if "folder" in status else "-"
    place, command = (
        (address, f"nonet report {address}") if address else (page, f"nonet report {run_id}, on that machine")
    )
    again = f"nonet submit {shlex.quote(source)} --name {run_id} --address {client.address}"
    print(f"\nrun        {run_id}: {status['state']}")
    if status["state"] == "done":
        print(f"report     {place}\nnext       {command}")
    else:
        print(f"continue   {again}")
    print(f"exit code  {exit_code}", flush=True)


def _check_names(name: str | None, env: list[str]) -> None:
    """Raise ConfigError if --name is not the name of a folder, or --env has a value."""
    if name is not None and (not _RUN_NAME.fullmatch(name) or name == "last"):
        raise ConfigError(
            f"--name is {name!r}; it must have 1 to 100 letters, digits, '.', '-' and '_', begin with a letter or a digit, and "
            "not be last"
        )
    for variable in env:
        if not _VARIABLE.fullmatch(variable):
            raise ConfigError(
                f"--env takes the name of a variable that the cluster has, got {variable.partition('=')[0] + '=...'!r}; "
                "values do not travel, since Ray shows them to everybody who can list jobs"
            )


def _check_unfinished(client: ClusterClient, run: ClusterRun) -> None:
    """Raise ConfigError if a run is in progress or has finished."""
    if not run.jobs and run.controller is None:
        return
    state = describe_run(client, run)["state"]
    if state == "done":
        raise ConfigError(
            f"run {run.id} has finished; see nonet status {run.id} --address {client.address}, or choose another --name"
        )
    if (
        not run.has_ended and state != "stopping"
    ):  # then its job has ended, and the new one ends its controller
        raise ConfigError(
            f"run {run.id} is in progress ({state}); follow it with: nonet logs {run.id} -f --address {client.address}"
        )


def _send_job(client: ClusterClient, job_id: str, run_id: str, scenario_name: str, package: Path) -> None:
    """Submit the job, and wait for an agent that starts it.

    Raises:
        NonetError: The cluster does not accept the job.
    """
    deadline_s = time.monotonic() + _AGENT_TIMEOUT_S
    while True:
        try:
            client.submit_job(
                entrypoint=f"nonet job {run_id}",
                submission_id=job_id,
                runtime_env={"working_dir": str(package)},
                metadata={RUN_KEY: run_id, SCENARIO_KEY: scenario_name},
            )
            return
        except (RuntimeError, ValueError) as error:
            if _NO_AGENT not in str(error) or time.monotonic() > deadline_s:
                text = " ".join(str(error).split())[-300:]
                if _NO_AGENT in text:
                    text += (
                        " The agent of its dashboard does not run, often because another Ray of the machine has its port 52365: "
                        "ray start --head --dashboard-agent-listen-port PORT"
                    )
                raise NonetError(f"the cluster at {client.address} does not accept the job: {text}") from None
        time.sleep(_AGENT_PAUSE_S)


def _choose_job_id(run_id: str, used_ids: Collection[str]) -> str:
    """Return an unused id for a job of a run: the id of the run for the first job, with a number for a later one."""
    numbered = (run_id if number == 1 else f"{run_id}-{number}" for number in itertools.count(1))
    return next(job_id for job_id in numbered if job_id not in used_ids)


def _place_run(verb: str, run_id: str) -> str:
    """Return a verb with the run after its name, such as "logs RUN -f"."""
    name, _, options = verb.partition(" ")
    return f"{name} {run_id} {options}".strip()

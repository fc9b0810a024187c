"""The runs of a cluster, as its dashboard shows them: the jobs that `nonet submit` made, and the controllers.

The status of a run is the last line of JSON that its controller wrote to its log (`controller/groups/run_status.py`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ray.job_submission import JobDetails, JobStatus

from nonet.controller.groups import CONTROLLER
from nonet.deploy.run import find_group_of_role
from nonet.deploy.run.jobs.client import ClusterClient
from nonet.deploy.run.jobs.logs import follow_logs, print_logs
from nonet.errors import ConfigError, NonetError

RUN_KEY, SCENARIO_KEY = "nonet_run", "nonet_scenario"  # keys of a job's metadata
_NAMESPACE, _CONTROLLER_CLASS = "nonet", "SingleController"
_STATUS_LINES = 40  # lines of a controller's log in which its last status is
_SHOWN_RUNS = 8  # number of runs that an error lists
_JOB_STATES = {JobStatus.SUCCEEDED: "done", JobStatus.FAILED: "failed", JobStatus.STOPPED: "stopped"}
_STREAMS = ("out", "err")
_STOP_POLL_S = 0.3
_JOB_POLL_S, _RUN_POLL_S = (
    0.5,
    2.0,
)  # between two questions whether a job or a run has ended; the second lists all jobs


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """A run that a cluster knows.

    Attributes:
        id: The id of the run.
        jobs: Its jobs, oldest first.
        controller: The row of its newest controller in Ray's state API, or None.
    """

    id: str
    jobs: tuple[JobDetails, ...] = ()
    controller: Mapping[str, Any] | None = None

    @property
    def is_controlled(self) -> bool:
        """Whether a controller of the run exists and has not ended."""
        return self.controller is not None and self.controller["state"] != "DEAD"

    @property
    def has_ended(self) -> bool:
        """Whether neither a job nor a controller of the run works."""
        return not self.is_controlled and (not self.jobs or self.jobs[-1].status.is_terminal())


def list_cluster_runs(client: ClusterClient) -> list[ClusterRun]:
    """Return the runs that a cluster knows, in the order of their first jobs; those without a job come last."""
    jobs_by_run: dict[str, list[JobDetails]] = {}
    for job in sorted(client.list_jobs(), key=lambda job: job.start_time or 0):
        if run := (job.metadata or {}).get(RUN_KEY):
            jobs_by_run.setdefault(run, []).append(job)
    controllers: dict[str, Mapping[str, Any]] = {}
    rows = client.list_state("actors", class_name=_CONTROLLER_CLASS, ray_namespace=_NAMESPACE)
    for row in sorted(rows, key=lambda row: (row["state"] != "DEAD", row["job_id"])):
        controllers[row["name"].removesuffix(f"/{CONTROLLER}")] = row
    return [
        ClusterRun(run, tuple(jobs_by_run.get(run, ())), controllers.get(run))
        for run in dict.fromkeys([*jobs_by_run, *controllers])
    ]


def find_cluster_run(client: ClusterClient, name: str) -> ClusterRun:
    """Return the run that an id, a unique prefix of an id, or `last` names.

    Raises:
        ConfigError: There is no such run, or several.
    """
    runs = list_cluster_runs(client)
    if name == "last" and runs:
        return runs[-1]
    matching = [run for run in runs if run.id == name] or [run for run in runs if run.id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    problem = f"{len(matching)} runs start with {name!r}" if matching else f"there is no run {name!r}"
    shown = ", ".join(run.id for run in (matching or runs)[-_SHOWN_RUNS:]) or "none"
    raise ConfigError(
        f"{problem} on the cluster at {client.address}; {'they are' if matching else 'the newest runs'}: {shown}"
    )


def describe_run(client: ClusterClient, run: ClusterRun) -> dict[str, Any]:
    """Return the status of a run.

    Returns:
        "run", "state" and, as far as they are known: "stage", "step", "steps", "metrics", "phase", "started" (ISO 8601),
        "at" (unix seconds of the controller's last status), "job", "job_state", "exit_code", "message", "folder", "host",
        "groups" and "waits".
    """
    status = _read_status(client, run)
    job = run.jobs[-1] if run.jobs else None
    state = _choose_state(run, status)
    started_s = (
        run.jobs[0].start_time / 1000 if run.jobs and run.jobs[0].start_time else status.get("started")
    )
    row: dict[str, Any] = {"run": run.id, "state": state}
    if started_s:
        row["started"] = datetime.fromtimestamp(started_s).astimezone().isoformat(timespec="seconds")
    row |= {key: value for key, value in status.items() if key not in ("run", "state", "started", "format")}
    if job is not None:
        row |= {"job": job.submission_id, "job_state": str(job.status.value)}
        if job.driver_exit_code is not None:
            row["exit_code"] = job.driver_exit_code
        if state in ("pending", "failed"):
            row["message"] = " ".join((job.message or "").split())[:300]
    return row


def describe_cluster_runs(client: ClusterClient) -> list[dict[str, Any]]:
    """Return a row for each run that a cluster knows: run, state, started, stage, step and job."""
    keys = ("run", "state", "started", "stage", "step", "job")
    rows = []
    for run in list_cluster_runs(client):
        status = describe_run(client, run)
        row = {key: status[key] for key in keys if status.get(key) is not None}
        if steps := status.get("steps"):
            row["step"] = f"{row['step']}/{steps}"
        else:  # a stage without steps, such as evaluate
            row.pop("step", None)
        rows.append(row)
    return rows


def list_waits(client: ClusterClient, run: ClusterRun) -> list[str]:
    """Return what a run waits for: what its controller reports, and what Ray has not started for it."""
    status = describe_run(client, run)
    waits = list(status.get("waits", ()))
    if status["state"] == "pending":
        waits.append(
            f"Ray has not started the job {status['job']}: {status.get('message') or 'no reason is given'}"
        )
    for row in client.list_state("placement_groups", state="PENDING"):
        if (row["name"] or "").startswith(f"{run.id}/") and not any(row["name"] in wait for wait in waits):
            bundles = [bundle["unit_resources"] for bundle in row["bundles"]]
            waits.append(f"placement group {row['name']} is not placed: {len(bundles)} x {bundles[0]}")
    for state in ("PENDING_CREATION", "RESTARTING"):
        for row in client.list_state("actors", state=state, ray_namespace=_NAMESPACE):
            if (row["name"] or "").startswith(f"{run.id}/"):
                waits.append(
                    f"{row['name']} has no process: Ray reports {state}, it asks for {row['required_resources']}"
                )
    return waits


def find_log_sources(
    client: ClusterClient, run: ClusterRun, role: str | None, rank: int
) -> list[dict[str, str]]:
    """Return the parameters of Ray's log API for the logs of a run.

    Args:
        client: The client of the cluster.
        run: The run.
        role: The role whose worker's log is meant, or `controller`; None for the job, or the controller without a job.
        rank: The rank of the worker.

    Raises:
        ConfigError: The run has no such worker, or its job has not started.
    """
    if role is None and run.jobs:
        job = run.jobs[-1]
        if not job.driver_node_id:
            raise ConfigError(f"the job {job.submission_id} has not started yet: {job.message}")
        return [_name_job_log(job)]
    if role in (None, CONTROLLER):
        if run.controller is None:
            raise ConfigError(
                f"run {run.id} has no controller yet; see: nonet why {run.id} --address {client.address}"
            )
        return _name_actor_logs(run.controller)
    groups = describe_run(client, run).get("groups", {})
    group = find_group_of_role(run.id, groups, role)
    rows = client.list_state("actors", name=f"{run.id}/{group}-{rank}", ray_namespace=_NAMESPACE)
    if not rows:
        count = groups[group]["workers"]
        raise ConfigError(f"run {run.id} has no rank {rank} of {role}; its ranks are 0 to {count - 1}")
    return _name_actor_logs(max(rows, key=lambda row: (row["state"] != "DEAD", row["job_id"])))


def print_run_logs(
    client: ClusterClient, run: ClusterRun, role: str | None = None, rank: int = 0, *, follow: bool = False
) -> None:
    """Print the log of a run's job, controller or worker, and with `follow` what is written until the run ends."""
    sources = find_log_sources(client, run, role, rank)
    next_step = f"continue with: nonet logs {run.id} -f --address {client.address}"
    if follow:
        follow_logs(
            client,
            sources,
            lambda: find_cluster_run(client, run.id).has_ended or None,
            next_step=next_step,
            poll_s=_RUN_POLL_S,
        )
    else:
        print_logs(client, sources, next_step=next_step)


def follow_run(client: ClusterClient, run_id: str, job_id: str) -> int:
    """Print the log of a job until it ends, and return its exit code."""
    next_step = f"the job continues; follow it with: nonet logs {run_id} -f --address {client.address}"
    job = client.get_job_info(job_id)
    while not job.driver_node_id and not job.status.is_terminal():  # its log has no place yet
        time.sleep(0.2)
        job = client.get_job_info(job_id)

    def find_end() -> JobDetails | None:
        job = client.get_job_info(job_id)
        return job if job.status.is_terminal() else None

    sources = [_name_job_log(job)] if job.driver_node_id else []
    ended = follow_logs(client, sources, find_end, next_step=next_step, poll_s=_JOB_POLL_S)
    if ended.driver_exit_code is None and ended.status != JobStatus.SUCCEEDED:
        print(f"job {job_id}: {' '.join((ended.message or ended.status.value).split())[-500:]}", flush=True)
    if ended.driver_exit_code is None:
        return int(ended.status != JobStatus.SUCCEEDED)
    return (
        ended.driver_exit_code if ended.driver_exit_code >= 0 else 128 - ended.driver_exit_code
    )  # by a signal


def stop_cluster_run(client: ClusterClient, name: str) -> str:
    """Stop a run after a checkpoint, by a job on the cluster that calls its controller, and return what was done.

    Raises:
        ConfigError: There is no such run, or it has ended.
        NonetError: The job that stops it has failed.
    """
    run = find_cluster_run(client, name)
    if run.has_ended:
        state = describe_run(client, run)["state"]
        raise ConfigError(f"run {run.id} has ended ({state}); there is nothing to stop")
    if not run.is_controlled:  # it has not begun to train
        client.stop_job(run.jobs[-1].submission_id or "")
        return f"stopped {run.id}, which had not started"
    # The job must not follow the variable to this function again.
    job_id = client.submit_job(
        entrypoint=f"env -u RAY_API_SERVER_ADDRESS nonet stop {run.id}",
        submission_id=f"nonet-stop-{run.id}-{secrets.token_hex(2)}",
    )
    job = client.get_job_info(job_id)
    while not job.status.is_terminal():
        time.sleep(_STOP_POLL_S)
        job = client.get_job_info(job_id)
    text = client.read_log_end(_name_job_log(job), 5) if job.driver_node_id else (job.message or "")
    client.remove_job(job_id)
    if job.status != JobStatus.SUCCEEDED:
        raise NonetError(f"{run.id} was not stopped: {' '.join(text.split())[-300:]}")
    return text.strip().splitlines()[-1]


def _choose_state(run: ClusterRun, status: Mapping[str, Any]) -> str:
    """Return the state of a run from its newest job, its controller and its last status."""
    job = run.jobs[-1] if run.jobs else None
    if run.is_controlled:
        if run.controller and run.controller["state"] == "RESTARTING":
            return "restarting"
        return "stopping" if job is not None and job.status.is_terminal() else status.get("state", "starting")
    final = status.get("state") if status.get("state") in _JOB_STATES.values() else None
    if job is None:
        return final or "lost"
    if job.status.is_terminal():
        return final if final and job.status != JobStatus.SUCCEEDED else _JOB_STATES[job.status]
    return "pending" if job.status == JobStatus.PENDING else "starting"


def _read_status(client: ClusterClient, run: ClusterRun) -> dict[str, Any]:
    """Return the last status that the controller of a run wrote; empty if there is none or its node is gone."""
    if run.controller is None:
        return {}
    try:
        text = client.read_log_end(_name_actor_logs(run.controller)[0], _STATUS_LINES)
    except ConfigError:
        return {}
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                status = json.loads(line)
            except ValueError:  # a line that is being written
                continue
            if status.get("run") == run.id:
                return status
    return {}


def _name_job_log(job: JobDetails) -> dict[str, str]:
    """Return the parameters of Ray's log API for what a job's process writes."""
    return {"node_id": str(job.driver_node_id), "filename": f"job-driver-{job.submission_id}.log"}


def _name_actor_logs(actor: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the parameters of Ray's log API for standard output and standard error of an actor."""
    return [{"actor_id": actor["actor_id"], "suffix": stream} for stream in _STREAMS]

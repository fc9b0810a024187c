"""Submit a scenario as a Ray job: its folder becomes the job's working directory, `nonet run` its entry point."""

from __future__ import annotations

import shlex
import sys
import time

from nonet.controller.scenario import check_runnable, find, load_scenario
from nonet.errors import NonetError

_POLL_S = 2.0


def submit_job(source: str, address: str, changes: list[str], wait: bool) -> int:
    """Submit and, with `wait`, follow the log; the job's exit code (0 when not waiting). Raises NonetError."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    path = find(source)
    check_runnable(load_scenario(path, changes)[0])
    try:
        client = JobSubmissionClient(address)
        options = " ".join(f"--set {shlex.quote(change)}" for change in changes)
        job = client.submit_job(
            entrypoint=f"nonet run {shlex.quote(path.name)} {options}".strip(),
            runtime_env={"working_dir": str(path.parent)},
        )
    except (ConnectionError, RuntimeError) as error:
        raise NonetError(f"cannot submit to {address}: {' '.join(str(error).split())}") from None
    print(f"job {job}", flush=True)
    shown = 0
    while wait:
        log, state = client.get_job_logs(job), client.get_job_status(job)
        sys.stdout.write(log[shown:])
        sys.stdout.flush()
        shown = len(log)
        if state.is_terminal():
            return 0 if state == JobStatus.SUCCEEDED else 1
        time.sleep(_POLL_S)
    return 0

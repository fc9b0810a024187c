"""From the command line to a running run: `nonet submit` against `ray job submit` of a script with the same imports, in turns.

Both start a new process, upload nothing (their packages are there from the round before), import the same modules on the
cluster, join Ray there, start the same detached actor without waiting for it, and print a line. The time ends when the line
arrives at the process that submitted. The run also reads its scenario and checks its data.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nonet.bench.timing import LapTimer

_ROUNDS, _START_S = 5, 120.0
_NONET = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'nonet'; from nonet.deploy.cli import main; main()",
]
_OUR_LINE, _BARE_LINE = "this run's folder:", "running"
_BARE = f"""
import json
from importlib import import_module
for name in json.load(open("modules.json")):
    import_module(name)
from nonet.controller import SingleController
from nonet.workers.runtime import ensure_ray
ensure_ray()
import ray, sys, time
@ray.remote(num_cpus=0)
class Plain:
    def __init__(self):
        from nonet.controller import SingleController
actor = Plain.options(name=f"plain-{{time.time_ns()}}", lifetime="detached").remote()
print({_BARE_LINE!r}, flush=True)
ray.kill(actor)
"""
# Prints the modules that `nonet job` has imported when it starts its controller.
_LIST_MODULES = """
import json, sys
sys.argv[0] = "nonet"
from pathlib import Path
from nonet.deploy import cli
from nonet.deploy.run import driver, jobs
from nonet.deploy.verbs import watching
def stop(*_, **__):
    from nonet.controller import SingleController
    from nonet.workers.runtime import ensure_ray
    print(json.dumps([name for name in sys.modules if name.partition(".")[0] in ("nonet", "ray", "pyarrow", "numpy", "torch")]))
    raise SystemExit
driver._start_controller = stop
driver._end_earlier_controller = stop
jobs.run_submitted("bench", Path.cwd())
"""


class _Head(NamedTuple):
    """A head of a cluster.

    Attributes:
        address: The URL of its dashboard.
        environment: The environment of its processes.
    """

    address: str
    environment: dict[str, str]


def bench_submit() -> dict[str, Any]:
    """Measure the seconds from the start of `nonet submit`, and of a bare `ray job submit`, to the first line of the job.

    Returns:
        The medians of both and of the bare job measured a second time, and their ratios.
    """
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as temp, _start_head(Path(temp)) as head:
        folder = _write_bare(Path(temp), head)
        ours = [*_NONET, "submit", "quickstart", "--address", head.address]
        ray = str(Path(sys.executable).parent / "ray")
        bare = [
            ray,
            "job",
            "submit",
            "--address",
            head.address,
            "--working-dir",
            str(folder),
            "--",
            "python",
            "bare.py",
        ]
        sides = {
            "nonet submit": (ours, _OUR_LINE),
            "bare": (bare, _BARE_LINE),
            "bare again": (bare, _BARE_LINE),
        }
        times = {name: LapTimer() for name in sides}
        for turn in range(_ROUNDS + 1):  # the first round uploads and unpacks the packages
            for name in list(sides)[turn % 3 :] + list(sides)[: turn % 3]:
                _measure(head, times[name], *sides[name])
    medians = {name: timer.drop_laps_before(1).compute_median_s() for name, timer in times.items()}
    return {
        "rows": [{"side": name, "median_s": value} for name, value in medians.items()],
        "ratio": {
            "submit to running, second time, over a bare job": medians["nonet submit"] / medians["bare"],
            "the bare job over itself": medians["bare again"] / medians["bare"],
        },
    }


def _measure(head: _Head, timer: LapTimer, command: list[str], line: str) -> None:
    """Time a command until it prints a line, then stop its job and wait for the job's end."""
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(head.address)
    before = {job.submission_id for job in client.list_jobs()}
    with timer:
        process = subprocess.Popen(
            command, env=head.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout
        output: list[str] = []
        for text in process.stdout:
            output.append(text)
            if re.match(rf"(\x1b\[\S*m)*{line}", text):
                break
        else:
            raise RuntimeError(f"{command} ended without {line!r}:\n{''.join(output)[-4000:]}")
    process.kill()
    process.wait()
    process.stdout.close()
    for job in client.list_jobs():
        if job.submission_id and job.submission_id not in before:
            client.stop_job(job.submission_id)
            while not client.get_job_status(job.submission_id).is_terminal():
                time.sleep(0.2)


def _write_bare(temp: Path, head: _Head) -> Path:
    """Write the working directory of the bare job: the files of our package, the script, and the names of the modules."""
    import nonet
    from nonet.controller.scenario import find_scenario, load_scenario
    from nonet.deploy.run.jobs import write_package

    path, folder = find_scenario("quickstart"), temp / "bare"
    write_package(temp / "package.zip", load_scenario(path)[0], path, [], [], nonet.__version__)
    with zipfile.ZipFile(temp / "package.zip") as archive:
        archive.extractall(folder)
    listed = subprocess.run(
        [sys.executable, "-c", _LIST_MODULES],
        cwd=folder,
        env=head.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (folder / "modules.json").write_text(listed.stdout.splitlines()[-1])
    (folder / "bare.py").write_text(_BARE)
    return folder


@contextmanager
def _start_head(temp: Path):
    """Start a head with a dashboard in a session of its own processes, and end them all afterwards."""
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    names += ("runtime-env-agent-port", "metrics-export-port", "ray-client-server-port")
    sockets = [socket.socket() for _ in names]
    for one in sockets:
        one.bind(("", 0))
    ports = {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    for one in sockets:
        one.close()
    binaries = Path(sys.executable).parent
    removed = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "NONET_RUNS")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {
        "HOME": str(temp),
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "RAY_JOB_STOP_WAIT_TIME_S": "120",
    }
    command = [
        str(binaries / "ray"),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        f"--temp-dir={temp}/r",
    ]
    command += [
        "--include-dashboard=true",
        "--num-cpus=4",
        *(f"--{name}={port}" for name, port in ports.items()),
    ]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        address = f"http://127.0.0.1:{ports['dashboard-port']}"
        _wait_for_dashboard(address)
        yield _Head(address, environment)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(temp / "r", ignore_errors=True)


def _wait_for_dashboard(address: str) -> None:
    """Wait until the dashboard answers and an agent starts jobs."""
    from ray.job_submission import JobSubmissionClient

    deadline = time.monotonic() + _START_S
    while True:
        try:
            client = JobSubmissionClient(address)
            job = client.submit_job(entrypoint="true")
            while not client.get_job_status(job).is_terminal():
                time.sleep(0.2)
            return
        except (ConnectionError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)

"""The ports on which the processes of a run listen, compared with the table of docs/how-to/clusters.md (`-s` lists them)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

NONET = [sys.executable, "-c", "from nonet.deploy.cli import main; main()"]
PAGE = Path(__file__).parents[3] / "docs/how-to/clusters.md"
MARK = "NONET_TEST_OF_PORTS"  # in the environment of all processes of the run, and of no other
SHORT = (
    "stages.pretrain.epochs=1",
    "stages.finetune.epochs=1",
    "stages.rl.steps=2",
    "stages.rl.control=false",
    "roles={trainer: {workers: 2}, embedding: {workers: 2}, rollout: {workers: 1}}",
)
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
WORKERS, COLLECTIVES = "Ray: GCS, raylets, workers, object manager", "gloo, NCCL, HCCL: data of collectives"
# The row of the table for what listens beyond loopback, by a pattern of the process's command line.
ROWS = {
    r"^ray::(?!\w*Agent)|gcs_server|raylet/raylet|main\(\) run": WORKERS,  # the driver is a worker for Ray
    r"dashboard|DashboardAgent": "Ray: dashboard and its agents",
    r"runtime_env|RuntimeEnvAgent": "Ray: environment agent",
    r"monitor\.py": "Ray: metrics",
}


def list_listening(mark: str) -> Iterator[tuple[int, str, str, int]]:
    """Yield (process id, command line, address, port) of the listening sockets of the processes with a mark."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                command = re.sub(r"^(ray::)\S.*", r"\1worker", " ".join(process.cmdline()))
                for connection in process.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        yield process.pid, command, connection.laddr.ip, connection.laddr.port
        except (psutil.Error, OSError):  # it has ended, or belongs to another user
            continue


def read_rows() -> set[str]:
    """Read what listens: the first column of the table of ports."""
    section = (
        PAGE.read_text(encoding="utf-8").partition("## Ports and who may connect")[2].partition("\n## ")[0]
    )
    return {line.strip("| ").partition(" | ")[0] for line in section.splitlines() if line.startswith("| ")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_listens_only_where_the_table_of_ports_says(tmp_path):
    mark, output = uuid.uuid4().hex, tmp_path / "output"
    changes = [word for change in SHORT for word in ("--set", change)]
    with output.open("w") as file:
        run = subprocess.Popen(
            [*NONET, "run", "quickstart", "--run-dir", str(tmp_path / "run"), *changes],
            env=os.environ | {MARK: mark},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        seen: set[tuple[int, str, str, int]] = set()
        while run.poll() is None:
            seen.update(list_listening(mark))
            time.sleep(0.3)
    assert run.returncode == 0, output.read_text(encoding="utf-8")[-4000:]
    ports = defaultdict[tuple[int, str, str], set[int]](set)  # beyond loopback, by process and row
    rows = set[str]()
    for pid, command, address, port in sorted(seen):
        beyond = next((row for pattern, row in ROWS.items() if re.search(pattern, command)), command)
        row = COLLECTIVES if address in LOOPBACK and beyond == WORKERS else beyond
        print(f"{command[:110]:<112}{address:<16}{port:<7}{row}")
        rows.add(row)
        if address not in LOOPBACK and command == "ray::worker":
            ports[pid, command, row].add(port)
    assert {WORKERS, COLLECTIVES} <= rows <= read_rows()
    # A worker has the port of Ray's calls, and none of Nonet's.
    assert {process: found for process, found in ports.items() if len(found) > 1} == {}

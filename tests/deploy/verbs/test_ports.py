"""The ports on which the processes of a run listen, compared with the table of docs/how-to/clusters.md (`-s` lists them)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
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
# The row of the table for what listens, by a pattern of the process.
ROWS = {
    r"gcs_server|raylet|ray::|default_worker|plasma": "Ray: GCS, raylets, workers, object manager",
    r"dashboard|DashboardAgent": "Ray: dashboard and its agents",
    r"runtime_env|RuntimeEnvAgent": "Ray: environment agent",
    r"main\(\)": "Ray: GCS, raylets, workers, object manager",  # the driver is a worker for Ray
}


def list_listening(mark: str) -> Iterator[tuple[str, str]]:
    """Yield the command line and the interface of what the processes with a mark listen on."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                for connection in process.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        yield " ".join(process.cmdline()), connection.laddr.ip
        except (psutil.Error, OSError):  # it has ended, or belongs to another user
            continue


def read_rows() -> dict[str, list[str]]:
    """Read the table of ports: the other cells of a row by its first one."""
    section = (
        PAGE.read_text(encoding="utf-8").partition("## Ports and who may connect")[2].partition("\n## ")[0]
    )
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in lines}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_listens_only_where_the_table_of_ports_says(tmp_path):
    mark = uuid.uuid4().hex
    changes = [word for change in SHORT for word in ("--set", change)]
    run = subprocess.Popen(
        [*NONET, "run", "quickstart", "--run-dir", str(tmp_path / "run"), *changes],
        env=os.environ | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen: set[tuple[str, str]] = set()
    while run.poll() is None:
        seen.update(list_listening(mark))
        time.sleep(0.3)
    assert run.returncode == 0, run.communicate()[0][-4000:]
    table, rows = read_rows(), {}
    for command, interface in sorted(seen):
        row = next((row for pattern, row in ROWS.items() if re.search(pattern, command)), None)
        print(f"{command[:100]:<102}{interface:<16}{row}")
        assert row in table, f"{command} listens on {interface}, which no row of {PAGE.name} says"
        rows.setdefault(row, set()).add(interface)
    loopback = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert set(rows) >= {"Ray: GCS, raylets, workers, object manager", "Ray: dashboard and its agents"}
    for row, interfaces in rows.items():
        if "all" not in table[row][1]:
            assert interfaces <= loopback | {psutil_address()}, (row, interfaces)
    assert not {name for name in table if name.startswith(("meeting", "rows through"))} & set(rows)


def psutil_address() -> str:
    """Return Ray's address of this node."""
    import ray

    return ray.util.get_node_ip_address()

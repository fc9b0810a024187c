"""Runs on a cluster that outlives them: SIGKILL the driver, the controller, both, or a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests_ring import make_ring

from nonet.controller.groups.lifetimes import list_remains
from nonet.controller.record.run_folder import RunFolder, lock_run
from nonet.errors import ConfigError

TIMEOUT_S = 24.0  # of leases: a busy machine may hold a process up for some seconds


@pytest.fixture(scope="module")
def cluster(no_ray) -> Iterator[str]:
    """Start a separate Ray, which this process joins to look at it; return its address."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": 200_000_000})
    ray.init(address=made.address, namespace="nonet", log_to_driver=False)
    yield made.address
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def ring(tmp_path_factory) -> Path:
    return make_ring(tmp_path_factory.mktemp("ring"))


class Driver:
    """`nonet run` in a process of its own on the cluster."""

    def __init__(self, cluster: str, folder: Path, run: Path, *options: str):
        env = os.environ | {"RAY_ADDRESS": cluster, "NONET_ORPHAN_TIMEOUT_S": str(TIMEOUT_S)}
        self.run = run
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from nonet.deploy.cli import main; main()",
                "run",
                "ring.yaml",
                "--run-dir",
                str(run),
                *options,
            ],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self, timeout_s: float = 300.0) -> str:
        """Wait for the process to end well, and return what it printed."""
        out, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, out
        return out

    def steps(self) -> int:
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0


def until(what: Callable[[], Any], timeout_s: float = 300.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s:g} s")


def actor_pids(run: str) -> dict[str, int]:
    """Process ids of a run's living actors by name, from the cluster this process joined."""
    import ray

    return {
        actor["Name"].split("/", 1)[1]: actor["Pid"]
        for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and actor["Name"].startswith(f"{run}/")
    }


def nothing_left(run: str) -> bool:
    return not any(list_remains(run)) and not actor_pids(run)


def metrics(run: Path) -> dict[str, Any]:
    return json.loads((run / "report.json").read_text())["stages"]


LONG = ("--set", "stages.pretrain.epochs=4000", "--set", "checkpoint.every=50")
SHORT = ("--set", "stages.pretrain.epochs=15", "--set", "checkpoint.every=10")


def test_killed_driver_leaves_a_commit_and_nothing_else(cluster, ring, tmp_path):
    driver = Driver(cluster, ring, tmp_path / "orphan", *LONG)
    until(lambda: driver.steps() > 20)
    driver.kill()
    until(lambda: nothing_left("orphan"))
    assert list((tmp_path / "orphan" / "checkpoints").glob("step-*/manifest.json"))


@pytest.mark.slow
def test_killed_driver_and_controller_leave_nothing(cluster, ring, tmp_path):
    driver = Driver(cluster, ring, tmp_path / "both", *LONG)
    until(lambda: driver.steps() > 20)
    controller = actor_pids("both")["controller"]
    driver.kill()
    os.kill(controller, signal.SIGKILL)
    until(lambda: nothing_left("both"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_controller_and_workers_are_replaced_and_the_run_ends_the_same(cluster, ring, tmp_path):
    Driver(cluster, ring, tmp_path / "calm", *SHORT).ended()
    driver = Driver(cluster, ring, tmp_path / "rough", *SHORT)
    until(lambda: list((tmp_path / "rough" / "checkpoints").glob("step-*/manifest.json")))
    os.kill(actor_pids("rough")["controller"], signal.SIGKILL)
    seen = driver.steps()
    until(lambda: driver.steps() > seen + 20)
    trainer = next(name for name in actor_pids("rough") if name.startswith("trainer"))
    os.kill(actor_pids("rough")[trainer], signal.SIGKILL)
    said = driver.ended()
    assert "the controller was restarted" in said
    assert "continuing from its newest checkpoint" in said
    assert metrics(tmp_path / "rough") == metrics(tmp_path / "calm")
    until(lambda: nothing_left("rough"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stop_ends_a_detached_run_after_a_commit(cluster, ring, tmp_path):
    driver = Driver(cluster, ring, tmp_path / "left", "--detach", *LONG)
    assert "left is running; stop it with: nonet stop left" in driver.ended()
    until(lambda: driver.steps() > 20)
    time.sleep(1.5 * TIMEOUT_S)  # nobody holds a lease, and nobody needs to
    assert "controller" in actor_pids("left")
    left = RunFolder(tmp_path / "left")
    with pytest.raises(ConfigError, match="is being run by another process"):
        lock_run(left)
    env = os.environ | {"RAY_ADDRESS": cluster, "NONET_ORPHAN_TIMEOUT_S": str(TIMEOUT_S)}
    command = [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "stop", "left"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert ended.stdout.strip() == "stopped left", ended.stderr
    until(lambda: nothing_left("left"))
    assert list((tmp_path / "left" / "checkpoints").glob("step-*/manifest.json"))
    lock_run(left).close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_joins_one_leaves_and_the_run_ends_the_same(no_ray, ring, tmp_path):
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    leaves = made.add_node(num_cpus=3)
    ray.init(address=made.address, namespace="nonet", log_to_driver=False)
    try:
        Driver(made.address, ring, tmp_path / "calm", *SHORT).ended()
        driver = Driver(made.address, ring, tmp_path / "moved", *SHORT)
        until(lambda: list((tmp_path / "moved" / "checkpoints").glob("step-*/manifest.json")))
        made.add_node(num_cpus=3)
        made.remove_node(leaves)
        said = driver.ended()
    finally:
        ray.shutdown()
        made.shutdown()
    assert "continuing from its newest checkpoint" in said or "the controller was restarted" in said
    assert metrics(tmp_path / "moved") == metrics(tmp_path / "calm")

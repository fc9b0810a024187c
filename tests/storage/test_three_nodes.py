"""Three Ray nodes whose disks are private: a run in object storage completes, also when a node is killed and another is added."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests_ring import make_ring

from nonet.storage import RunCopy, open_storage
from nonet.storage.local_copy import MountedRun
from tests.s3 import BUCKET, serve_s3

pytestmark = pytest.mark.slow
POOLS = "pools={b: {device: cpu, labels: {zone: b}}, c: {device: cpu, labels: {zone: c}}}"
ROLES = "roles={trainer: {pool: b}, embedding: {fuse: trainer}, rollout: {pool: c}, evaluator: {pool: c}}"


def wait_until(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.1)


class Nodes:
    """Ray nodes on loopback, each in a mount namespace in which the cache is a disk of its own."""

    def __init__(self, folder: Path, variables: dict[str, str]):
        self.folder, self.cache = folder, folder / "cache"
        self.cache.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.env = os.environ | variables
        self.env |= {"NONET_CACHE": str(self.cache), "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": self.address}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, zone: str) -> None:
        """Start a node and wait until it has joined; the first one is the head."""
        port = self.address.rpartition(":")[2]
        place = (
            ["--address", self.address]
            if self.processes
            else ["--head", "--port", port, "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        )
        ray = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--disable-usage-stats",
            "--num-cpus=3",
        ]
        ray += [
            "--object-store-memory=200000000",
            "--labels",
            f"zone={zone}",
            *place,
        ]
        env = {key: value for key, value in self.env.items() if key != "RAY_ADDRESS"}
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            self.processes[name] = subprocess.Popen(
                [
                    "unshare",
                    "-m",
                    "bash",
                    "-c",
                    f'mount -t tmpfs none "$NONET_CACHE" && exec {" ".join(ray)}',
                ],
                env=env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        wait_until(
            lambda: b"Ray runtime started" in log.read_bytes() or self.processes[name].poll() is not None
        )
        assert self.processes[name].poll() is None, log.read_text()

    def read_journals(self, place: str) -> list[str]:
        """Return the journals of the only run at a place, as the nodes have them; one node has that of the controller."""
        names = open_storage(place).list_names()
        disks = [Path(f"/proc/{process.pid}/root{self.cache}") for process in self.processes.values()]
        return [
            file.read_text()
            for disk in disks
            for name in names
            for file in disk.glob(f"*/{name}/journal.jsonl")
        ]

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)

    def run(self, ring: Path, place: str, name: str = "a") -> subprocess.Popen[str]:
        """Start `nonet run` on a node."""
        code = "from nonet.deploy.cli import main; main()"
        changes = [f"storage={place}", POOLS, ROLES, "checkpoint.every=10", "stages.rl.steps=40"]
        command = [sys.executable, "-c", code, "run", "ring.yaml", *(f"--set={change}" for change in changes)]
        enter = ["nsenter", "-t", str(self.processes[name].pid), "-m", f"--wd={ring}"]
        return subprocess.Popen(
            [*enter, *command], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with serve_s3() as variables:
        made = Nodes(tmp_path, variables)
        try:
            for name in ("a", "b", "c"):
                made.start(name, name)
            yield made
        finally:
            for name in list(made.processes):
                made.kill(name)


def read_stored(place: str, folder: Path) -> tuple[RunCopy, dict[int, dict[str, str]]]:
    """Return a copy of the only run at a place, and the hashes of the files of its checkpoints by step."""
    (name,) = open_storage(place).list_names()
    copy = RunCopy(MountedRun(f"{place}/{name}", str(folder / name)), open_storage(f"{place}/{name}"))
    copy.fetch_small_files()
    manifests = [json.loads(path.read_text()) for path in copy.path.glob("checkpoints/*/manifest.json")]
    return copy, {manifest["step"]: manifest["files"] for manifest in manifests}


def test_a_run_without_a_shared_folder_survives_a_killed_node_with_the_same_bits(
    nodes: Nodes, tmp_path: Path
):
    (tmp_path / "ring").mkdir()
    ring = make_ring(tmp_path / "ring")
    calm = nodes.run(ring, f"{BUCKET}/calm")
    out, _ = calm.communicate(timeout=600)
    assert calm.returncode == 0, out
    disturbed = nodes.run(ring, f"{BUCKET}/disturbed")

    def has_begun_rl() -> bool:
        return any('"stage":"rl"' in journal for journal in nodes.read_journals(f"{BUCKET}/disturbed"))

    wait_until(has_begun_rl)
    nodes.kill("c")
    nodes.start("d", "c")
    out, _ = disturbed.communicate(timeout=600)
    assert disturbed.returncode == 0, out
    assert "continuing from" in out
    calm_copy, expected = read_stored(f"{BUCKET}/calm", tmp_path / "calm")
    disturbed_copy, actual = read_stored(f"{BUCKET}/disturbed", tmp_path / "disturbed")
    assert actual == expected
    assert len(expected) > 2
    ranks = [(copy.path / "results/rl.npz").read_bytes() for copy in (calm_copy, disturbed_copy)]
    assert ranks[0] == ranks[1]

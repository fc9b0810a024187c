"""Three Ray nodes whose disks are private: a run in object storage completes, also when a node is killed and another is added."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests_ring import make_ring

from nonet.controller.record import read_journal
from nonet.storage import MountedRun, RunView, open_storage
from tests.s3 import BUCKET, serve_s3
from tests.samples.redis_server import free_port

pytestmark = pytest.mark.slow
POOLS = "pools={b: {device: cpu, labels: {zone: b}}, c: {device: cpu, labels: {zone: c}}}"
ROLES = "roles={trainer: {pool: b}, embedding: {fuse: trainer}, rollout: {pool: c}, evaluator: {pool: c}}"


def wait_until(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.1)


def find_mount_namespace(pid: int) -> str:
    """Return the mount namespace of a process, "" if the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


class Nodes:
    """Ray nodes on loopback, each in a mount namespace in which the cache and Ray's folder are disks of their own."""

    def __init__(self, folder: Path, variables: dict[str, str]):
        self.folder, self.cache = folder, folder / "cache"
        self.cache.mkdir()
        Path("/tmp/ray").mkdir(exist_ok=True)
        self.address = f"127.0.0.1:{free_port()}"
        self.dashboard = f"http://127.0.0.1:{free_port()}"
        self.env = os.environ | variables
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env |= {"NONET_CACHE": str(self.cache), "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": self.address}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, zone: str) -> None:
        """Start a node and wait until it has joined; the first one is the head."""
        port, dashboard_port = (url.rpartition(":")[2] for url in (self.address, self.dashboard))
        place = (
            ["--address", self.address]
            if self.processes
            else ["--head", "--port", port, "--node-ip-address=127.0.0.1", "--dashboard-port", dashboard_port]
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
            f"--dashboard-agent-listen-port={free_port()}",
            f"--dashboard-agent-grpc-port={free_port()}",
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
                    f'mount -t tmpfs none "$NONET_CACHE" && mount -t tmpfs none /tmp/ray && exec {" ".join(ray)}',
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
        """End all processes of a node at once; workers would answer for seconds after the death of their raylet."""
        process = self.processes.pop(name)
        space = find_mount_namespace(process.pid)
        for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]:
            if find_mount_namespace(pid) == space:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()

    def run(self, ring: Path, place: str, name: str = "a") -> subprocess.Popen[str]:
        """Start `nonet run` on a node."""
        code = "from nonet.deploy.cli import main; main()"
        changes = [f"storage={place}", POOLS, ROLES, "checkpoint.every=40", "stages.rl.steps=240"]
        command = [sys.executable, "-c", code, "run", "ring.yaml", *(f"--set={change}" for change in changes)]
        enter = ["nsenter", "-t", str(self.processes[name].pid), "-m", f"--wd={ring}"]
        return subprocess.Popen(
            [*enter, *command], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def ask(self, *words: object) -> str:
        """Run a command on a machine that is no node, with a cache of its own, and return what it prints."""
        code = "from nonet.deploy.cli import main; main()"
        env = self.env | {
            "NONET_CACHE": str(self.folder / "laptop"),
            "RAY_API_SERVER_ADDRESS": self.dashboard,
        }
        del env["RAY_ADDRESS"]
        command = [sys.executable, "-c", code, *map(str, words)]
        ended = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


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


def read_stored(place: str, folder: Path) -> tuple[RunView, dict[int, dict[str, str]]]:
    """Return a view of the only run at a place, and the hashes of the files of its checkpoints by step."""
    (name,) = open_storage(place).list_names()
    mounted = MountedRun(f"{place}/{name}", str(folder / "view" / name))
    copy = RunView(mounted, open_storage(f"{place}/{name}"), root=folder)
    copy.fetch(copy.path)
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
    # Ray places the controller on any node: on the killed one, it is started again elsewhere.
    assert "continuing from" in out or "the controller was restarted" in out, out
    calm_copy, expected = read_stored(f"{BUCKET}/calm", tmp_path / "calm")
    disturbed_copy, actual = read_stored(f"{BUCKET}/disturbed", tmp_path / "disturbed")
    assert actual == expected
    assert len(expected) > 2
    ranks = [(copy.path / "results/rl.npz").read_bytes() for copy in (calm_copy, disturbed_copy)]
    assert ranks[0] == ranks[1]


def test_a_submitted_run_is_steered_from_elsewhere_and_continues_on_a_new_cluster_when_the_head_is_lost(
    nodes: Nodes, tmp_path: Path
):
    (tmp_path / "ring").mkdir()
    ring, run = make_ring(tmp_path / "ring"), f"{BUCKET}/feed/feed-1"
    changes = [f"storage={BUCKET}/feed", POOLS, ROLES, "checkpoint.every=10", "stages.rl.steps=500"]
    options = [f"--set={change}" for change in changes]
    submit = ["submit", ring / "ring.yaml", "--name", "feed-1", "--detach", *options]
    assert "feed-1" in nodes.ask(*submit)

    def has_begun_rl() -> bool:
        return "rl" in nodes.ask("status", "feed-1").partition("stage")[2].split()[:1]

    wait_until(has_begun_rl)
    assert "attached reward 'fresh'" in nodes.ask(
        "attach", run, "--reward", "novelty", "--name", "fresh", "--weight", "0.2", "--wait", "120"
    )
    assert "scaled rollout to 2" in nodes.ask("scale", run, "rollout=2", "--wait", "120")
    assert "rollout x2" in nodes.ask("status", "feed-1")
    for name in ("a", "b", "c"):
        nodes.kill(name)
    for name in ("d", "e", "f"):
        nodes.start(name, {"d": "a", "e": "b", "f": "c"}[name])
    nodes.ask(*submit)
    wait_until(lambda: "done" in nodes.ask("status", "feed-1").splitlines()[0])
    copy, _ = read_stored(f"{BUCKET}/feed", tmp_path / "copy")
    report = json.loads((copy.path / "report.json").read_text())
    assert [command["verb"] for command in report["commands"]] == ["attach", "scale"]
    assert [part["why"] for part in report["interruptions"]] == ["resumed"]
    steps = [record["applied"] for record in read_journal(copy.path / "journal.jsonl") if "applied" in record]
    assert steps == list(range(len(steps)))
    assert (
        copy.path / "results/rl.npz"
    ).exists()  # by an evaluator that began before the resume cut the results

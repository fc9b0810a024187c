"""Runs in object storage: no folder is shared, and another machine goes on with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests_ring import make_ring

from nonet.storage import RunHead, open_storage
from tests.s3 import BUCKET, serve_s3


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with serve_s3() as variables:
        yield variables


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ring(tmp_path_factory.mktemp("ring"))


class Machine:
    """A machine with a disk of its own, on which `nonet` runs."""

    def __init__(self, ring: Path, disk: Path, variables: dict[str, str]):
        self.ring, self.disk = ring, disk
        self.env = os.environ | variables | {"NONET_CACHE": str(disk)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        code = "from nonet.deploy.cli import main; main()"
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=self.ring,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def call(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Run `nonet` with these arguments and return what it printed."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=500)
        assert process.returncode == code, err
        return out, err

    def read_manifests(self) -> dict[int, dict[str, str]]:
        """Return the hashes of the files of each checkpoint, by step."""
        manifests = [
            json.loads(path.read_text()) for path in self.disk.glob("*/*/checkpoints/*/manifest.json")
        ]
        return {manifest["step"]: manifest["files"] for manifest in manifests}


def find_address(place: str) -> str:
    (name,) = open_storage(place).list_names()
    return f"{place}/{name}"


def test_a_stored_run_is_reported_and_asked_on_a_machine_that_never_saw_it(
    s3: dict[str, str], ring: Path, tmp_path: Path
):
    place = f"{BUCKET}/asked"
    first, second = Machine(ring, tmp_path / "a", s3), Machine(ring, tmp_path / "b", s3)
    changes = [
        f"storage={place}",
        "stages.pretrain.epochs=1",
        "stages.finetune.epochs=1",
        "stages.rl.steps=2",
    ]
    out, _ = first.call("run", "ring.yaml", *(f"--set={change}" for change in changes))
    address = find_address(place)
    assert f"stored     {address}" in out
    assert address in second.call("report", address)[0]
    (known,) = second.disk.glob("known/*/*")
    assert json.loads((known / "status.json").read_text())["state"] == "done"
    assert RunHead.decode(open_storage(address).get("head.json").content).epoch == 3  # type: ignore[union-attr]
    user = json.loads((known / "report.json").read_text())["users"][0]["user_id"]
    assert (known / "report.html").exists()
    assert not [file for file in second.disk.rglob("*") if file.is_file() and file.stat().st_size > 500_000]
    answer = second.call("recommend", address.rpartition("/")[2], f"--user={user}", "--json")[0]
    assert json.loads(answer)
    secret = s3["AWS_SECRET_ACCESS_KEY"].encode()
    assert not list(second.disk.glob("views/*"))  # they end with their process
    stored = [file for disk in (first.disk, second.disk) for file in disk.rglob("*") if file.is_file()]
    assert len(stored) > 20
    assert not [file for file in stored if secret in file.read_bytes()]


@pytest.mark.slow
def test_a_killed_machine_loses_no_bit_and_the_killed_run_goes_on_elsewhere(
    s3: dict[str, str], ring: Path, tmp_path: Path
):
    changes = ["--set", "checkpoint.every=2"]
    calm, killed = Machine(ring, tmp_path / "calm", s3), Machine(ring, tmp_path / "killed", s3)
    calm.call("run", "ring.yaml", "--set", f"storage={BUCKET}/calm", *changes)
    process = killed.start("run", "ring.yaml", "--set", f"storage={BUCKET}/killed", *changes)
    deadline = time.monotonic() + 300
    while not list(killed.disk.glob("*/*/checkpoints/step-*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # Ray ends with the driver
    process.communicate()
    other = Machine(ring, tmp_path / "other", s3)
    other.call("resume", find_address(f"{BUCKET}/killed"))
    assert other.read_manifests() == calm.read_manifests()
    assert len(calm.read_manifests()) > 2


@pytest.mark.slow
def test_a_run_that_is_opened_elsewhere_stops_where_it_was(s3: dict[str, str], ring: Path, tmp_path: Path):
    place = f"{BUCKET}/taken"
    first = Machine(ring, tmp_path / "a", s3)
    changes = [
        "--set",
        f"storage={place}",
        "--set",
        "checkpoint.every=1",
        "--set",
        "stages.pretrain.epochs=500",
    ]
    process = first.start("run", "ring.yaml", *changes)
    deadline = time.monotonic() + 300
    while not list(first.disk.glob("*/*/checkpoints/step-*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    storage = open_storage(find_address(place))
    stored = storage.get("head.json")
    assert stored is not None
    head = RunHead.decode(stored.content)
    newer = RunHead(head.run, head.epoch + 1, head.tree, "process 1 of another host", time.time(), "c")
    storage.put("head.json", newer.encode())
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "process 1 of another host opened it" in err.splitlines()[-1]
    assert storage.get("head.json").content == newer.encode()  # type: ignore[union-attr]


@pytest.mark.slow
def test_another_machine_steers_a_stored_run_and_cannot_stop_it(
    s3: dict[str, str], ring: Path, tmp_path: Path
):
    place = f"{BUCKET}/steered"
    first, second = Machine(ring, tmp_path / "a", s3), Machine(ring, tmp_path / "b", s3)
    process = first.start("run", "ring.yaml", "--set", f"storage={place}", "--set", "stages.rl.steps=2000")
    try:
        deadline = time.monotonic() + 300
        while not list(first.disk.glob("*/*/results/rl.rewards.before.npz")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(6)  # until the next commit in the background
        address = find_address(place)
        out, _ = second.call("set", address, "rewards.own.weight=0.5")
        assert "own" in out
        (commands,) = first.disk.glob("*/*/commands.jsonl")
        assert '"value":0.5' in commands.read_text()
        attach = ["attach", address, "--reward", "rewards/own.py", "--name", "again", "--set", "ceiling=1"]
        _, err = second.call(*attach, code=2)
        assert "is a file of this machine, and another one runs" in err
        _, err = second.call("stop", address, code=2)
        assert "is not run by a process of this machine; stop it on its cluster" in err
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "ring.yaml", "--set", "storage=s3://no-such-bucket/x"], "there is no such bucket"),
        (["run", "ring.yaml", "--set", "storage=gs://feed"], "it must be s3://bucket or s3://bucket/folder"),
        (
            ["run", "ring.yaml", "--set", f"storage={BUCKET}/x", "--run-dir", "d"],
            "name two places for one run",
        ),
        (["report", f"{BUCKET}/x/none"], f"there is no run at {BUCKET}/x/none; the runs in {BUCKET}/x: none"),
    ],
)
def test_a_wrong_place_is_one_line_and_leaves_nothing(
    s3: dict[str, str], ring: Path, tmp_path: Path, arguments: list[str], message: str
):
    machine = Machine(ring, tmp_path / "a", s3)
    out, err = machine.call(*arguments, code=2)
    assert not out
    assert len(err.splitlines()) == 1
    assert message in err
    assert not list(tmp_path.glob("a/*/*"))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("run --seeds", ["run", "ring.yaml", "--seeds", "1,2"]),
        ("tune", ["tune", "ring.yaml", "--trials", "2"]),
    ],
)
def test_a_command_that_keeps_runs_in_a_folder_refuses_a_storage_and_leaves_nothing(
    s3: dict[str, str], ring: Path, tmp_path: Path, command: str, arguments: list[str]
):
    machine = Machine(ring, tmp_path / "a", s3 | {"NONET_RUNS": str(tmp_path / "runs")})
    space = tmp_path / "space.yaml"
    space.write_text("stages.pretrain.lr: [1e-3, 1e-2]\n")
    arguments += ["--space", str(space)] if command == "tune" else []
    _, err = machine.call(*arguments, "--set", f"storage={BUCKET}/x", code=2)
    assert (
        err
        == f"nonet: storage is {BUCKET}/x, but {command} keeps its runs in a folder; add --set storage=null\n"
    )
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("a/*/*"))


class Deny(BaseHTTPRequestHandler):
    """Answers every request as an object storage does to credentials without permission."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b"<Error><Code>AccessDenied</Code></Error>" if self.command != "HEAD" else b""
        self.send_response(403)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_HEAD = do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize(
    "words",
    [
        ["run", "ring.yaml", "--set", f"storage={BUCKET}/x"],
        ["runs", f"{BUCKET}/x"],
        *(
            [verb, f"{BUCKET}/x/a"]
            for verb in ("status", "resume", "report", "evaluate", "versions", "serve")
        ),
    ],
    ids=lambda words: words[0],
)
def test_a_storage_without_permission_is_one_line_and_leaves_nothing(
    command: Callable[..., tuple[int, str, str]],
    ring: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Deny)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.chdir(ring)
    for name, value in {
        "ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "x")
    monkeypatch.setenv("NONET_CACHE", str(tmp_path / "cache"))
    try:
        code, out, err = command(*words)
    finally:
        server.shutdown()
        server.server_close()
    assert (code, out) == (2, "")
    assert err.startswith("nonet: storage: s3://feed-runs/x")
    assert "access is denied; check the credentials in the environment" in err
    assert len(err.splitlines()) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]

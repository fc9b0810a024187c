"""A head of a Ray cluster with a dashboard, in a session of its own processes, as `ray start --head` starts it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

BIN = Path(sys.executable).parent
CPUS = 4
_START_S = 120.0
# The options that name a port which Ray would otherwise share with another cluster on this machine.
_PORTS = (
    *("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"),
    *("runtime-env-agent-port", "metrics-export-port", "ray-client-server-port"),
)


class RayHead:
    """A running head; leaving the context ends all of its processes.

    Args:
        folder: The folder of its log, and the home directory of its jobs.
        variables: Environment variables of the cluster.
    """

    def __init__(self, folder: Path, **variables: str):
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        self._temp = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # sockets need a short path
        self.ports = dict(zip(_PORTS, _find_free_ports(len(_PORTS)), strict=True))
        self.address = f"http://127.0.0.1:{self.ports['dashboard-port']}"
        removed = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "NONET_RUNS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
        self.environment = {name: value for name, value in os.environ.items() if name not in removed}
        self.environment |= {"HOME": str(self.home), "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
        self._token = variables.get("RAY_AUTH_TOKEN", "")
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RayHead:
        options = [f"--{name}={port}" for name, port in self.ports.items()]
        command = [
            BIN / "ray",
            "start",
            "--head",
            "--block",
            "--disable-usage-stats",
            f"--temp-dir={self._temp}",
        ]
        command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--num-cpus={CPUS}"]
        with (self.folder / "head.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--object-store-memory=200000000", *options],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "head.log").read_text()
            assert time.monotonic() < deadline, (self.folder / "head.log").read_text()
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process
        os.killpg(self.process.pid, signal.SIGKILL)  # workers end when their raylet is gone
        self.process.wait()
        mark = f"HOME={self.home}".encode()
        for folder in Path("/proc").glob("[0-9]*"):  # jobs of a test that failed have groups of their own
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
        shutil.rmtree(self._temp, ignore_errors=True)

    def start(self, *words: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
        """Start the command line as a user of the cluster does."""
        code = "import sys; sys.argv[0] = 'nonet'; from nonet.deploy.cli import main; main()"
        environment = self.environment | {"RAY_API_SERVER_ADDRESS": self.address, **variables}
        return subprocess.Popen(
            [sys.executable, "-c", code, *words],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, cwd: Path, **variables: str) -> tuple[int, str, str]:
        """Run the command line as a user of the cluster does: (exit code, stdout, stderr)."""
        process = self.start(*words, cwd=cwd, **variables)
        out, err = process.communicate(timeout=400)
        return process.returncode, out, err

    def _answers(self) -> bool:
        """Return whether the dashboard answers and knows a node."""
        request = urllib.request.Request(f"{self.address}/api/v0/nodes")
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        with suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
            return b'"ALIVE"' in answer.read()
        return False


class CuttingProxy:
    """A proxy before a dashboard that cuts every open connection each second, once somebody follows a log through it.

    Attributes:
        cuts: The number of connections that were cut.
    """

    def __init__(self, port: int):
        self._port, self._open, self._follows, self.cuts = port, [], threading.Event(), 0
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        for target in (self._accept, self._cut):
            threading.Thread(target=target, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                pair = (client, server)
                self._open.append(pair)
                for source, target in (pair, pair[::-1]):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if b"/logs/stream" in data:
                    self._follows.set()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _cut(self) -> None:
        self._follows.wait()
        while not self._ended.wait(1.0):
            pairs, self._open = self._open, []
            for one in (one for pair in pairs for one in pair):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                    self.cuts += 1
                one.close()


def _find_free_ports(count: int) -> list[int]:
    """Return free ports of this machine, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()

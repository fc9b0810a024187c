"""A real redis-server for tests, on a free port, without files of its own."""

import shutil
import socket
import subprocess
import time

REDIS = shutil.which("redis-server")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class RedisServer:
    """Started at once. `kill` as SIGKILL does; `start` again on the same port."""

    def __init__(self, folder):
        self.port, self._folder = free_port(), folder
        self.start()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/features"

    def start(self) -> None:
        """Until it answers; what it saved in its append-only file is there again."""
        self._process = subprocess.Popen(
            [REDIS, "--port", str(self.port), "--save", "", "--appendonly", "yes", "--appendfsync", "always"],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as wire:
                    wire.sendall(b"PING\r\n")
                    if wire.recv(5) == b"+PONG":
                        return
            except OSError:
                pass
            time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

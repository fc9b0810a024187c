"""What a fault agent does to the processes of its node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nonet.deploy.after.chaos.agent import FaultAgent, cut_connections, is_alive, list_descendants

ECHO = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    while data := connection.recv(100):
        connection.sendall(data)
"""


@pytest.fixture
def echo() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a process that sends back what it receives, and yield it and its port."""
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


def test_the_connections_of_a_process_are_closed_and_it_accepts_new_ones(echo):
    process, port = echo
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"1")
        assert connection.recv(1) == b"1"
        assert cut_connections(process.pid) == 1
        assert connection.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"2")
        assert connection.recv(1) == b"2"


def test_a_suspended_process_goes_on_afterwards(echo):
    process, port = echo
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        began = time.monotonic()
        FaultAgent().suspend(process.pid, 0.5)
        assert time.monotonic() - began >= 0.5
        connection.sendall(b"1")
        assert connection.recv(1) == b"1"


def test_a_killed_process_is_not_alive_and_further_faults_ignore_it(echo):
    process, _ = echo
    assert is_alive(process.pid)
    assert process.pid in list_descendants(os.getpid())
    FaultAgent().kill(process.pid)
    process.wait()
    assert not is_alive(process.pid)
    FaultAgent().suspend(process.pid, 60.0)
    assert FaultAgent().cut_connections(process.pid) == 0

"""Whole runs as a user starts them: `nonet ...` in a process of its own, and ports for servers beside them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_nonet(*words: str, environment: Mapping[str, str] | None = None) -> None:
    """Run `nonet WORDS` to its end.

    Args:
        words: The words of the command.
        environment: The variables of the environment, by default those of this process.

    Raises:
        RuntimeError: It failed; the message has the end of its output.
    """
    command = [sys.executable, "-c", "from nonet.deploy.cli import main; main()", *words]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(f"nonet {words[0]} failed:\n{(result.stdout + result.stderr)[-4000:]}")


def run_scenario(scenario: Path, run: Path) -> Path:
    """Run a scenario file to its end, and return the folder of the run. Raises RuntimeError as `run_nonet`."""
    run_nonet("run", str(scenario), "--run-dir", str(run))
    return run


def find_free_port() -> int:
    """Return a port of loopback on which nothing listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

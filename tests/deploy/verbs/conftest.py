"""The stand-ins for the services of the scenario nightly-feed-laptop, as a fixture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def feed(tmp_path_factory):
    """Start the stand-ins, and yield the folder of the scenario and the environment of its commands."""
    folder = tmp_path_factory.mktemp("feed")
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(REPOSITORY / "src")
    log = (folder / "log.txt").open("w")
    server = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "examples" / "nightly_feed" / "prepare.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
    )
    assert server.stdout is not None
    ready = any(line == "ready\n" for line in server.stdout)
    assert ready, (folder / "log.txt").read_text()[-3000:]
    exports = (folder / "environment.sh").read_text().splitlines()
    variables = dict(line.removeprefix("export ").split("=", 1) for line in exports)
    yield folder, environment | variables | {"NONET_RUNS": str(folder / "runs")}
    server.communicate("", timeout=120)

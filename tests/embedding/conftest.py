"""Starts ranks of sparse worlds for the tests of this folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """Provide `forked(scenarios, world)`: the results of each rank of a scenarios file beside the tests, in rank order.

    `ended`: the number of last ranks that end without a result.
    """

    def run(scenarios, world, ended=0):
        here, folder = Path(__file__).parent, tmp_path_factory.mktemp("ranks")
        command = [sys.executable, here / "forked_ranks.py", here / scenarios, str(world), folder]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=800)
        assert done.returncode == 0, done.stderr
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world - ended)]

    return run


@pytest.fixture(scope="session")
def thread_worlds():
    """Provide the module of worlds whose ranks are threads."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("thread_world", Path(__file__).with_name("thread_world.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

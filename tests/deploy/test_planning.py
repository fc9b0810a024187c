from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nonet.deploy.planning import view
from nonet.errors import ConfigError

NONET = [sys.executable, "-c", "from nonet.deploy.cli import main; main()"]


def test_a_plan_on_a_live_ray_knows_what_is_free_and_what_labels_the_nodes_have(ray_local):
    address = ray_local.get_runtime_context().gcs_address
    done = subprocess.run(
        [*NONET, "plan", "quickstart", "--address", address, "--json"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    made = json.loads(done.stdout)
    node = ray_local.nodes()[0]["NodeID"]
    assert {name for group in made["groups"] for name in group["nodes"]} == {node}
    assert made["cluster"].startswith("1 node, 4 CPU")


def test_where_no_ray_answers_the_error_says_how_to_plan_without_one():
    done = subprocess.run(
        [*NONET, "plan", "quickstart", "--address", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "no Ray answers at 127.0.0.1:1" in done.stderr
    assert "--cluster" in done.stderr


def test_a_file_and_an_address_together_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="not both"):
        view(tmp_path / "x.yaml", "auto")

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nonet.deploy.run import planning
from nonet.deploy.run.planning import choose_view as view_of
from nonet.errors import ConfigError

NONET = [sys.executable, "-c", "from nonet.deploy.cli import main; main()"]


def test_a_plan_on_a_live_ray_knows_what_is_free_and_what_labels_the_nodes_have(ray_local):
    address = ray_local.get_runtime_context().gcs_address
    done = subprocess.run(
        [*NONET, "plan", "quickstart", "--address", address, "--json"],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    made = json.loads(done.stdout)
    node = ray_local.nodes()[0]["NodeID"]
    assert {name for group in made["groups"] for name in group["nodes"]} == {node}
    assert made["cluster"].startswith("1 node, 4 CPU")


def test_a_ray_that_refuses_the_connection_is_wrong_input_and_the_error_names_the_token(monkeypatch):
    def refuse(*_):
        raise ConnectionError("Authentication token is missing")

    monkeypatch.setattr(planning, "check_address", lambda *_: None)
    monkeypatch.setattr(planning, "start_ray", refuse)
    with pytest.raises(
        ConfigError, match=r"no Ray answers at a:1, .*RAY_AUTH_TOKEN\): Authentication token is missing; "
    ):
        view_of(None, "a:1")


def test_where_no_ray_answers_the_error_says_how_to_plan_without_one():
    done = subprocess.run(
        [*NONET, "plan", "quickstart", "--address", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 2
    assert "--address is 127.0.0.1:1, where no Ray cluster answers" in done.stderr
    assert "--cluster" in done.stderr


def test_a_file_and_an_address_together_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="not both"):
        view_of(tmp_path / "x.yaml", "auto")


def test_a_search_says_what_to_set():
    found = subprocess.run(
        [*NONET, "plan", "quickstart", "--search"], capture_output=True, text=True, timeout=800
    )
    assert found.returncode == 0, found.stderr[-1500:]
    assert "<- the choice" in found.stdout
    assert "take the first: " in found.stdout


def test_a_report_of_an_earlier_version_with_a_receipt_is_still_summed_up():
    from nonet.deploy.report.summaries import format_summary

    report = {
        "receipt": {"source": "measured <today>", "stages": {"pretrain": {}}},
        "stages": {"pretrain": {}},
    }
    assert "predicted" not in format_summary(report)

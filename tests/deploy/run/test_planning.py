from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nonet.deploy.run.planning import view as view_of
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


def test_a_plan_says_how_fast_it_should_be_and_the_search_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = subprocess.run(
        [*NONET, "plan", "quickstart", "--predict", "--json"], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-1500:]
    stages = json.loads(done.stdout)["prediction"]["stages"]
    assert stages["pretrain"]["rows"] == 10 * 82691
    assert all(stage["rows_per_s"] > 0 and stage["memory_bytes"] > 0 for stage in stages.values())
    found = subprocess.run(
        [*NONET, "plan", "quickstart", "--search"], capture_output=True, text=True, timeout=800
    )
    assert "costs: nominal" in found.stdout
    assert "take the best: " in found.stdout


def test_what_cannot_be_predicted_is_said_before_any_data_is_read():
    view = str(Path(__file__).parents[3] / "examples" / "clusters" / "64x8.yaml")
    for flag in ("--predict", "--search"):
        done = subprocess.run(
            [*NONET, "plan", "nightly-feed", "--cluster", view, flag],
            capture_output=True,
            text=True,
            timeout=800,
        )
        assert done.returncode == 2
        assert "no prediction for model hf" in done.stderr


def test_a_report_with_a_receipt_shows_predicted_beside_measured():
    from nonet.deploy.report.summaries import summary
    from nonet.deploy.report.tables import receipt_table

    stage = {
        "predicted_rows_per_s": 9000.0,
        "measured_rows_per_s": 10000.0,
        "error": -0.1,
        "parts_ms": {"compute": 90.0},
    }
    report = {
        "receipt": {"source": "measured <today>", "stages": {"pretrain": stage}},
        "stages": {"pretrain": {}},
    }
    assert list(receipt_table(report).rows) == [["pretrain", "9,000", "10,000", "-10%", "compute 90 ms"]]
    assert "predicted     9,000 rows/s  measured    10,000  (-10%)" in summary(report)
    assert not receipt_table({})

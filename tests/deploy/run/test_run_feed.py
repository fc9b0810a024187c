"""A whole run on a feed where people come back, with coverage as its only metric."""

import io

import pytest

from nonet.bench.runs.feed import ITEMS, write_feed
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel


@pytest.mark.slow
def test_a_run_whose_only_metric_is_coverage_ends_in_a_report(ray_local, tmp_path):
    write_feed(tmp_path)
    stream = io.StringIO()
    made = api.scenario(
        tmp_path / "feed.yaml", ["evaluate.metrics=[coverage@10]", "stages.pretrain.epochs=2"]
    )
    finished = api.run(made, run_dir=tmp_path / "run", panel=Panel(stream, live=False))
    assert finished.state == "done"
    report = finished.report
    assert report["data"]["repeats"]["policy"] == "allow"
    assert report["baselines"]["popularity"] == {"coverage@10": 10 / ITEMS}
    assert 0 < report["detail"]["rl"]["test"]["beam"]["all"]["coverage@10"] <= 1
    assert "Seen items may be recommended again" in stream.getvalue()
    assert "coverage@10" in (finished.folder.path / "report.html").read_text()

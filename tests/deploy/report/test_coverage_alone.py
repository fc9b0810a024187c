"""A run whose only metric is coverage, from the evaluator's answers to everything people read, without Ray."""

import io

import pytest

from nonet.bench.runs.feed import FeedWorld
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.report import make_report, select_headline
from nonet.deploy.report.page import render_page
from nonet.deploy.report.summaries import format_summary
from nonet.deploy.run.panel import EventView, Panel


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """(feed, what the evaluator says of each subject, its comparisons)."""
    feed = FeedWorld(tmp_path_factory.mktemp("alone"), ["evaluate.metrics=[coverage@10]"])
    said = {name: feed.evaluator.evaluate_baseline(name) for name in ("popularity", "transition_counter")}
    said["pretrain"] = feed.evaluate("pretrain")
    return feed, said, feed.evaluator.compare([("pretrain", "popularity")])


def test_the_panel_shows_coverage_and_nothing_breaks_over_it(answers):
    _, said, _ = answers
    stream = io.StringIO()
    view = EventView(Panel(stream))
    users = [{"user_id": n, "target": []} for n in range(8)]
    for name, found in said.items():
        view.show(
            [
                {
                    "kind": "result",
                    "name": name,
                    "metrics": select_headline(found),
                    "shown": found["shown"],
                    "users": users,
                }
            ]
        )
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["popularity (test, full ranking)", "  coverage@10", "  0.2500"]


def test_the_report_holds_coverage_by_beam_and_exhaustively_and_compares_nobody(answers):
    feed, said, paired = answers
    run = RunFolder(feed.folder)
    for name, found in said.items():
        run.write_json(f"results/{name}.json", found)
    run.write_json("results/tokenise.json", feed.facts)
    run.write_json("results/comparison.json", {"paired": paired, "shown": []})
    run.metrics.touch()
    report = make_report(run, feed.scenario, {}, {}, {})
    assert report["baselines"]["popularity"] == {"coverage@10": 0.25}
    assert 0 < report["stages"]["pretrain"]["coverage@10"] <= 1
    assert set(report["detail"]["pretrain"]["test"]["beam"]["all"]) == {"coverage@10"}
    assert report["paired"] == {"pretrain-popularity": {}}
    for text in (render_page(report), format_summary(report)):
        assert " coverage@10" in text or ">coverage@10" in text
        assert "0.2500" in text

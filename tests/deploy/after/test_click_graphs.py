"""Neighbours in graphs as features of a click model: a checkpoint, a server and a reward see what training saw, without Ray."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from likes_world import (
    HOUR,
    change_scenario,
    load_scorer,
    make_click_run,
    make_likes,
    make_requests,
    make_rollouts,
    open_click_data,
)
from starlette.testclient import TestClient

from nonet.deploy.after import evaluate_run
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app
from nonet.models.clicks.model import ClickModel
from nonet.rl.rewards.api import load_reward
from nonet.samples.batches.graphs import list_graph_features
from nonet.samples.sequences.sequences import TEST

GRAPHS = {
    "near": {"edges": "item-item", "window": 3, "half_life": "5h", "k": 4},
    "fans": {"edges": "item-user", "k": 3},
    "mine": {"edges": "user-item", "newest": 6, "k": 3},
    "pairs": {"edges": "item-item", "table": "pairs.parquet", "k": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_likes(tmp_path_factory.mktemp("graphs"))
    items = np.arange(1000, 1040)
    edges = {"source": items, "target": np.roll(items, 2), "time": np.arange(40) % 20 * HOUR}
    pq.write_table(pa.table(edges), folder / "pairs.parquet")
    tables = {
        "user": {"features": ["user", "fans"]},
        "item": {"features": ["item", "liked", "near", "mine", "pairs"]},
        "counts": {
            "features": [name for name in list_graph_features(GRAPHS) if name.endswith("hop")] + ["hour"]
        },
    }
    scenario = change_scenario(folder, data={"graph": GRAPHS}, sparse={"tables": tables})
    return make_click_run(folder, steps=20, scenario=scenario)


def get_checkpoint(run):
    return sorted(run.checkpoints.glob("step-*"))[-1]


def test_a_scorer_of_a_checkpoint_sees_the_neighbours_that_the_evaluator_saw(run):
    clicks = open_click_data(run).label_events("train")
    scorer = load_scorer(get_checkpoint(run))
    index = clicks.find_rows(TEST)
    answers = scorer.score(make_requests(scorer, clicks, index))
    expected = np.load(run.results / "train.npz")["test"]
    np.testing.assert_allclose([each[0] for each in answers], expected, atol=1e-6)
    scorer.model.graphs = None
    bare = scorer.score(make_requests(scorer, clicks, index))
    assert np.abs(np.array([each[0] for each in bare]) - expected).max() > 0.01


def test_a_reward_sees_neighbours_as_of_the_time_of_the_prompt(run):
    clicks = open_click_data(run).label_events("train")
    reward = load_reward("ctr", ".", {"model": str(run.path)}, name="click")
    reward.setup()
    first = clicks.find_rows(TEST)[::4] - 2  # the first validation row: all its history was trained on
    expected = reward.click_model.predict(clicks.batch(first, without_moment=np.ones(len(first), bool)))[:, 0]
    rollouts = make_rollouts(clicks, reward.click_model.known.item_id, first)
    np.testing.assert_allclose(reward.score(rollouts)[:, 0], expected, rtol=1e-5, atol=1e-6)
    rollouts.time[:] -= 5 * HOUR
    assert np.abs(reward.score(rollouts)[:, 0] - expected).max() > 1e-3


def test_a_checkpoint_has_the_edges_of_the_run(run):
    graphs, seq = ClickModel(get_checkpoint(run)).graphs, open_click_data(run).seq
    expected = seq.graphs.to_arrays()
    assert graphs.options == seq.graphs.options
    found = graphs.to_arrays()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert graphs.until.tolist() == [29 * HOUR] * 80


def test_new_events_of_a_request_are_edges_for_it_alone(run):
    """Events without a label of a user whom the model does not know change the answer through graphs alone."""
    new = [{"item": 1001, "time": 40 * HOUR}, {"item": 1003, "time": 41 * HOUR}]
    app = build_single_process_app(str(run.path), ServeConfig(deadline_s=20.0), True)
    try:
        with TestClient(app, base_url="http://localhost") as client:

            def ask(user, **body):
                answer = client.post("/score", json={"user": user, "items": [1001, 1002, 1003], **body})
                assert answer.status_code == 200, answer.text
                return [row["score"] for row in answer.json()["items"]]

            without, known = ask(777), ask(100)
            with_events = ask(777, history=new)
            assert all(a != pytest.approx(b, abs=1e-6) for a, b in zip(without, with_events, strict=True))
            assert (ask(777), ask(100)) == (without, known)
            earlier = {"time": 40 * HOUR}  # not after the events
            assert ask(777, history=new, **earlier) == ask(777, history=[], **earlier)
            post = client.post("/events", json={"user": 777, "events": new})
            assert post.status_code == 200, post.text
            assert ask(777) == pytest.approx(with_events, abs=1e-6)
            assert ask(100) == known
    finally:
        app.state.service.engines.close()


def test_other_data_are_evaluated_with_graphs_of_their_own(run, tmp_path):
    """The same events under other names of users give the same metrics, as no feature of them is trained."""
    table = pq.read_table(run.path.parent / "interactions.parquet")
    pq.write_table(table, tmp_path / "same.parquet")
    same = evaluate_run(str(run.path), data=tmp_path / "same.parquet")["subjects"]
    report = run.read_json("report.json")
    assert same["train"]["auc"] == pytest.approx(report["stages"]["train"]["auc"], abs=1e-6)
    assert 0.4 < same["neighbours"]["auc"] < 0.8
    half = table.filter(pa.array(table["user_id"].to_numpy() % 4 < 2))
    pq.write_table(half, tmp_path / "half.parquet")
    other = evaluate_run(str(run.path), data=tmp_path / "half.parquet")["subjects"]
    assert other["train"]["auc"] != same["train"]["auc"]


def test_the_artifact_says_what_it_is(run):
    folder = run.find_artifacts()["graphs"]
    config = json.loads((run.path / folder / "graphs.json").read_text())
    assert config["format"] == 1
    assert list(config["graphs"]) == list(GRAPHS)
    counts = run.read_json("results/tokenise.json")["data"]["graphs"]
    assert counts == {"near": counts["near"], "fans": 2400, "mine": 2400, "pairs": 40}
    assert counts["near"] == 2 * 80 * (29 + 28 + 27)  # no user has an item twice

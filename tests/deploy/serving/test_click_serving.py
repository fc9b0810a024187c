"""A click model behind HTTP, in files and in exports: the evaluator's probabilities, from published versions."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from likes_world import HOUR, add_columns, change_scenario, make_click_run, make_likes, open_click_data
from starlette.testclient import TestClient

from nonet.deploy.opened.items import Refused
from nonet.deploy.serving import describe_versions, promote_version, publish_checkpoint, rollback_version
from nonet.deploy.serving.apart.deployments import EngineService, FeaturesService
from nonet.deploy.serving.offline import Exported, ExportedClicks, export_run, score_rows
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app
from nonet.errors import ConfigError, DataError
from nonet.samples.sequences.sequences import TEST


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_likes(tmp_path_factory.mktemp("clicks"))
    add_columns(folder)
    log = pq.read_table(folder / "interactions.parquet")
    device = pa.array(["tv" if age % 2 else "phone" for age in log["age"].to_pylist()])
    pq.write_table(log.append_column("device", device), folder / "interactions.parquet")
    scenario = change_scenario(
        folder,
        data={"join": {"item": {"use": str(folder / "deals"), "columns": ["deal", "discount"]}}},
        sparse={
            "tables": {
                "user": {},
                "item": {"features": ["item", "liked"]},
                "disliked": {},
                "facts": {"features": ["brand", "price", "deal", "discount", "age", "device"]},
                "moment": {"features": ["hour", "recency", "activity", "taste"]},
            }
        },
    )
    return make_click_run(folder, steps=20, scenario=scenario)


@pytest.fixture(scope="module")
def client(run):
    app = build_single_process_app(str(run.path), ServeConfig(deadline_s=20.0), True)
    try:
        with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
            yield client
    finally:
        app.state.service.engines.close()


def ask(client, path, status=200, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_server_gives_the_evaluator_s_probability_of_each_test_event(run, client):
    clicks = open_click_data(run).label_events("train")
    expected = np.load(run.results / "train.npz")["test"]
    seq, index = clicks.seq, clicks.find_rows(TEST)
    for place in range(40):
        at = index[place]
        answer = ask(
            client,
            "/score",
            user=int(seq.user_id[seq.user[at]]),
            items=[1000 + int(seq.item[at]), 77],
            time=int(seq.time[at]),
        )
        assert (answer["version"], answer["unknown"], answer["cold_start"]) == (1, [77], False)
        assert answer["items"][0]["score"] == pytest.approx(float(expected[place]), abs=1e-6)


def test_lists_are_refused_in_one_line_that_names_scores(client):
    error = ask(client, "/recommend", 422, user=100, k=3)["error"]
    assert error["message"] == "this run has a click model, which recommends no lists; ask /score with items"


def test_posted_events_count_as_history_and_as_labels_when_they_have_them(client):
    def score(user):
        return ask(client, "/score", user=user, items=[1002, 1004])

    assert score(7001)["cold_start"]
    assert score(7001)["items"] == score(7002)["items"] == score(7003)["items"]
    ask(client, "/events", user=7001, events=[{"item": 1006}])
    ask(client, "/events", user=7002, events=[{"item": 1006, "values": {"rating": 5}}])
    ask(client, "/events", user=7003, events=[{"item": 1006, "values": {"rating": 1}}])
    scores = [[row["score"] for row in score(user)["items"]] for user in (7001, 7002, 7003)]
    assert not score(7001)["cold_start"]
    assert len({tuple(row) for row in scores}) == 3
    given = ask(client, "/score", history=[{"item": 1006, "values": {"rating": 5}}], items=[1002, 1004])
    assert [row["score"] for row in given["items"]] != scores[0]


@pytest.mark.parametrize("age", [1e308, 10**39, 10**400, "nan", "inf", True, -1e39])
def test_a_value_of_a_request_is_a_finite_number_that_its_column_can_hold(client, age):
    refused = ask(client, "/score", 422, user=100, items=[1002], values={"age": age})["error"]
    assert refused["kind"] == "bad_value"
    assert len(refused["message"]) < 200


def test_values_of_a_request_are_columns_of_its_row(client):
    old, young = (ask(client, "/score", user=100, items=[1002], values={"age": age}) for age in (7, 0))
    assert old["items"] != young["items"]
    assert (
        "no column 'agee'; columns: age"
        in ask(client, "/score", 422, user=100, items=[1002], values={"agee": 1})["error"]["message"]
    )
    assert (
        "'old' is not a number"
        in ask(client, "/score", 422, user=100, items=[1002], values={"age": "old"})["error"]["message"]
    )


def test_versions_of_a_click_model_are_published_promoted_and_rolled_back(run, client):
    step = int(sorted(run.checkpoints.glob("step-*"))[-1].name.rpartition("-")[2])
    row = publish_checkpoint(str(run.path), step)
    assert [version["version"] for version in describe_versions(str(run.path))] == [1, row["version"]][
        : row["version"]
    ]
    assert promote_version(f"{run.path}@1", None)["default"] == 1
    with pytest.raises(ConfigError, match="no ancestor"):
        rollback_version(str(run.path), None)
    with pytest.raises(ConfigError, match="there is no version 9"):
        rollback_version(f"{run.path}@9", None)


def test_an_export_scores_as_the_server_does_and_its_example_runs(run, client, tmp_path):
    export_run(str(run.path), tmp_path / "export")
    with pytest.raises(DataError, match=r"has a click model; open it with .*ExportedClicks$"):
        Exported(tmp_path / "export")
    exported = ExportedClicks(tmp_path / "export")
    history = [{"item": 1006, "time": 30 * HOUR, "values": {"rating": 5}}, {"item": 1009, "time": 31 * HOUR}]
    given = {"user": 101, "history": history, "time": 36 * HOUR, "values": {"age": 3}}
    answer = ask(client, "/score", items=[1002, 1004], **given)
    scores = exported.score([1002, 77, 1004], **given)
    assert scores[1] is None
    assert [scores[0], scores[2]] == pytest.approx([row["score"] for row in answer["items"]], abs=1e-6)
    words = [sys.executable, str(tmp_path / "export" / "example.py"), "1006", "1009"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == "after item 6, item 9"
    assert len(lines) == 11


def test_an_export_of_a_click_model_refuses_the_events_that_the_run_leaves_out(run, tmp_path):
    export_run(str(run.path), tmp_path / "export")
    file = tmp_path / "export" / "export.json"
    description = json.loads(file.read_text())
    file.write_text(json.dumps(description | {"where": "device == 'tv' and rating >= 4"}))
    exported = ExportedClicks(tmp_path / "export")
    assert exported.score([1002], history=[{"item": 1006, "values": {"rating": 4}}])
    with pytest.raises(Refused, match=r"data.where: .* leaves this event out"):
        exported.score([1002], history=[{"item": 1006, "values": {"rating": 3}}])


def test_a_file_is_scored_with_the_evaluator_s_probability_of_each_test_event(run, tmp_path):
    log = pq.read_table(run.path.parent / "interactions.parquet")
    pq.write_table(log, tmp_path / "log.parquet")
    counts = score_rows(str(run.path), tmp_path / "log.parquet", tmp_path / "scores.parquet")
    assert (counts["rows"], counts["unknown_items"]) == (len(log), 0)
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table["user_id"].equals(log["user_id"])
    seq = open_click_data(run).seq
    place = {
        pair: row
        for row, pair in enumerate(
            zip(*(log[name].to_pylist() for name in ("user_id", "item_id")), strict=True)
        )
    }
    index = seq.find_split_events(TEST)
    rows = [place[int(seq.user_id[seq.user[at]]), 1000 + int(seq.item[at])] for at in index]
    expected = np.load(run.results / "train.npz")["test"]
    np.testing.assert_allclose(table["score"].to_numpy()[rows], expected, atol=1e-6)


def test_a_file_without_a_column_that_the_model_reads_is_refused(run, tmp_path):
    log = pq.read_table(run.path.parent / "interactions.parquet")
    pq.write_table(log.drop_columns("device"), tmp_path / "log.parquet")
    with pytest.raises(DataError, match="no column device, which the model reads; add it, empty where"):
        score_rows(str(run.path), tmp_path / "log.parquet", tmp_path / "scores.parquet")
    assert not (tmp_path / "scores.parquet").exists()


def test_an_empty_cell_of_a_scored_file_is_a_missing_value_and_not_that_of_the_newest_event(
    run, client, tmp_path
):
    log = pq.read_table(run.path.parent / "interactions.parquet")
    rows = log.filter(pc.equal(log["user_id"], 110)).slice(12, 1)
    tables = {
        "given": rows,
        "empty": rows.set_column(
            rows.schema.get_field_index("device"), "device", pa.array([None], pa.string())
        ),
    }
    scores = {}
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
        score_rows(str(run.path), tmp_path / f"{name}.parquet", tmp_path / "scores.parquet")
        scores[name] = pq.read_table(tmp_path / "scores.parquet")["score"][0].as_py()
    asked = {"user": 110, "items": rows["item_id"].to_pylist(), "time": rows["timestamp"][0].as_py()}
    age = rows["age"][0].as_py()
    answers = {
        "empty": ask(client, "/score", values={"device": None, "age": age}, **asked),
        "given": ask(client, "/score", values={"age": age}, **asked),  # the user has one device
    }
    for name, answer in answers.items():
        assert answer["items"][0]["score"] == pytest.approx(scores[name], abs=1e-6)
    assert scores["given"] != scores["empty"]


def test_events_take_text_in_columns_that_had_text(run, client):
    scores = {}
    for device in ("tv", "phone"):
        event = {"item": 1006, "values": {"rating": 5, "device": device}}
        given = ask(client, "/score", history=[event], items=[1002], time="1970-01-03T00:00:00")
        scores[device] = given["items"][0]["score"]
        asked = ask(
            client,
            "/score",
            history=[1006],
            values={"device": device},
            items=[1002],
            time="1970-01-03T00:00:00",
        )
        assert asked["items"][0]["score"] != scores[device]  # the other event has no rating
        posted = ask(client, "/events", user=8000, events=[event], id=f"of {device}")
        assert posted["accepted"] == 1
    assert scores["tv"] != scores["phone"]
    wrong = ask(client, "/events", 422, user=8000, events=[{"item": 1006, "values": {"rating": "good"}}])
    assert "rating: 'good' is not a number" in wrong["error"]["message"]


def test_separate_services_score_as_one_process_does(run, client):
    settings = ServeConfig(services={})  # type: ignore[arg-type]  pydantic converts it

    async def score():
        features, engine = FeaturesService(str(run.path), settings), EngineService(str(run.path), settings)
        prepared = await features.make_score_question("100", None, [1002, 1004], time=9 * HOUR)
        return await engine.answer(pickle.loads(pickle.dumps(prepared.question)), 5.0)

    answer, version = asyncio.run(score())
    expected = ask(client, "/score", user=100, items=[1002, 1004], time=9 * HOUR)
    assert version == expected["version"]
    assert answer.score.tolist() == pytest.approx([row["score"] for row in expected["items"]], abs=1e-6)

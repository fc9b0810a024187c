"""A model that reads joined columns gives the same lists to everybody who asks with the same events."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import time
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from served_run import TrainedRun, ask
from starlette.testclient import TestClient

from nonet.controller.record import Checkpoints
from nonet.deploy.after import recommend_for
from nonet.deploy.opened import RequestFeatures
from nonet.deploy.opened.joins import HistoryJoins, HistoryToJoin
from nonet.deploy.serving.offline import Exported, export_run, exported_stores, recommend_all
from nonet.deploy.serving.offline.exported_stores import write_joins
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app
from nonet.errors import ConfigError, DataError, StoreError
from nonet.models.inference import EventHistory, InferenceEngine
from nonet.samples.sequences import TEST
from nonet.samples.stores import Join, StoreJoin, create_store, open_store
from nonet.workers.roles.evaluation import load_recommender

USERS, TOP = 100, 10
TOLERANCE = 1e-5  # the rounding of batches of other sizes; items whose scores are closer may change places


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a run whose model reads a column of the item and one of the user, which changed in the middle of the log."""
    folder = tmp_path_factory.mktemp("joined")
    items, users = np.arange(1000, 1041), np.arange(100, 100 + USERS)  # one item more than the catalogue
    discounts = create_store(
        f"lmdb:{folder}/discounts", pa.schema([("discount", pa.int64())]), key=pa.int64(), versions=True
    )
    segments = create_store(
        f"{folder}/segments", pa.schema([("segment", pa.string())]), key=pa.int64(), versions=True
    )
    for when, change in ((-1, 0), (5 * 3600 + 1, 3)):
        discounts.put(items, pa.table({"discount": (items + change) % 5}), np.full(len(items), when))
        segments.put(
            users, pa.table({"segment": [f"s{(u + change) % 4}" for u in users]}), np.full(len(users), when)
        )
    margins = create_store(f"{folder}/margins", pa.schema([("margin", pa.float64())]), key=pa.int64())
    margins.put(items, pa.table({"margin": items / 2}))
    margins.close()
    discounts.close()
    segments.close()

    def change(scenario):
        body = yaml.safe_load(scenario.read_text())
        body["data"]["join"] = {
            "item": {"use": f"lmdb:{folder}/discounts", "columns": ["discount"]},
            "member": {"use": f"{folder}/segments", "columns": ["segment"], "on": "user"},
            "reward": {"use": f"{folder}/margins", "columns": ["margin"], "on": "item"},
        }
        body["sparse"]["tables"] |= {"discount": {"dim": 8}, "segment": {"dim": 8}}
        scenario.write_text(yaml.safe_dump(body))

    served = TrainedRun(folder, memory=True, edit=change, users=USERS)
    served.commit(18)
    return served


@pytest.fixture(scope="module")
def client(run):
    app = build_single_process_app(str(run.folder.path), ServeConfig(deadline_s=20.0), True)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client
    app.state.service.engines.close()


def _make_histories(run):
    """Return the events before the test event of a few users, as a request gives them."""
    corpus = run.open().corpus
    seq, ids = corpus.seq, corpus.item_id
    histories = {}
    for row in range(USERS):
        index = np.arange(seq.offsets[row], seq.offsets[row + 1])
        index = index[: int(np.flatnonzero(seq.split[index] == TEST)[0])]
        histories[row] = [
            {
                "item": int(ids[seq.item[i]]),
                "time": int(seq.time[i]),
                "values": {name: float(values[i]) for name, values in seq.columns.items()},
            }
            for i in index
        ]
    return histories


def _check_same(ours, theirs):
    """Check that two lists of (item, score) have the same scores, and the same items where scores differ."""
    assert len(ours) == len(theirs)
    for (item, score), (other, other_score) in zip(ours, theirs, strict=True):
        assert score == pytest.approx(other_score, abs=TOLERANCE)
        close = [value for _, value in ours if abs(value - score) <= TOLERANCE]
        assert item == other or len(close) > 1


@pytest.mark.parametrize(
    ("address", "options"),
    [("redis://other:6379/margins", {"timeout_s": 2.0}), ("hbase://other:9090/margins", {})],
)
def test_a_store_of_another_kind_gets_no_options_of_the_one_that_it_replaces(
    monkeypatch, tmp_path, address, options
):
    opened = {}
    monkeypatch.setattr(
        exported_stores, "HistoryJoins", lambda joins, *_, **__: opened.update(joins) or Mock()
    )
    stored = {"use": "redis://host:6379/margins", "options": {"timeout_s": 2.0}, "columns": ["margin"]}
    exported_stores.open_joins(tmp_path, {"user": stored}, (), {"user": address}, ["margin"])
    assert (opened["user"].use, opened["user"].options) == (address, options)


def test_the_evaluators_beams_of_the_test_event_are_the_lists_of_the_server(run, client):
    opened = run.open()
    corpus = opened.setup.open_corpus(opened.folders)
    checkpoint = Checkpoints(run.folder.checkpoints).find_stage_end("pretrain")
    recommender = load_recommender(opened.setup, corpus, checkpoint)
    seq, users = corpus.seq, np.arange(USERS)
    positions = np.array([len(events) for events in _make_histories(run).values()])
    beams = recommender.generate_beams(
        recommender.batch(users, positions), opened.scenario.evaluate.width, users, positions
    )
    scores = beams.logp.sum(-1)
    for row, history in _make_histories(run).items():
        body = {"history": history, "user": int(seq.user_id[row]), "k": TOP}
        listed = [(each["item"], each["score"]) for each in ask(client, **body)["items"]]
        of_evaluator = [
            (int(corpus.item_id[item]), score)
            for item, score in zip(beams.item[row, :TOP].tolist(), scores[row, :TOP].tolist(), strict=True)
        ]
        _check_same(listed, of_evaluator)


def test_server_table_of_users_and_one_user_get_the_same_lists(run, client, tmp_path):
    user_ids = run.open().corpus.seq.user_id[:USERS].tolist()
    pq.write_table(pa.table({"user_id": user_ids}), tmp_path / "users.parquet")
    recommend_all(str(run.folder.path), tmp_path / "users.parquet", tmp_path / "out.parquet", TOP, 1)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for user, row in zip(user_ids, rows, strict=True):
        of_server = [(each["item"], each["score"]) for each in ask(client, user=user, k=TOP)["items"]]
        _check_same(of_server, list(zip(row["item_id"], row["score"], strict=True)))
    for user in user_ids[:3]:
        of_server = [(each["item"], each["score"]) for each in ask(client, user=user, k=TOP)["items"]]
        shown = recommend_for(str(run.folder.path), [], str(user), TOP)["items"]["pretrain"]
        _check_same(of_server, [(each["item"], each["score"]) for each in shown])


@pytest.fixture(scope="module")
def export(run, tmp_path_factory):
    """Export the run, and return the folder."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    export_run(str(run.folder.path), folder)
    return folder


def test_an_export_gives_the_lists_of_the_server(run, client, export):
    exported = Exported(export)
    now = int(time.time())
    for history in ([1001, 1002, 1003], [1017]):
        listed = ask(client, history=history, time=now, k=TOP)["items"]
        _check_same(
            [(each["item"], each["score"]) for each in listed],
            [(item, score) for item, _, score in exported.recommend(history, k=TOP)],
        )
    user_ids = run.open().corpus.seq.user_id
    for row, history in _make_histories(run).items():
        user = int(user_ids[row])
        listed = ask(client, history=history, user=user, time=now, k=TOP)["items"]
        _check_same(
            [(each["item"], each["score"]) for each in listed],
            [(item, score) for item, _, score in exported.recommend(history, TOP, user=user, time=now)],
        )
    assert not exported.missing


def test_an_export_has_the_rows_of_its_items_and_names_the_stores_of_users(run, export, tmp_path):
    description = json.loads((export / "export.json").read_text())
    joins = description["joins"]
    assert (joins["item"]["use"], description["copied_stores"]) == ("stores/item", ["item"])
    assert joins["member"]["use"].endswith("segments")
    assert set(joins) == {"item", "member"}  # margins are only read by rewards
    ids = run.open().corpus.item_id
    source = open_store(run.open().scenario.data.join["item"].use)
    copy = open_store(str(export / "stores" / "item"))
    assert copy.collect_stats()["rows"] == 2 * len(ids)
    for at in (0, 5 * 3600 + 1, 5 * 3600 + 2):
        ours, theirs = (each.multi_get(ids, ["discount"], [at] * len(ids)) for each in (copy, source))
        assert ours.values["discount"].to_pylist() == theirs.values["discount"].to_pylist()
        assert len(ours.values) == len(ids)


def test_a_column_with_the_name_of_a_key_or_a_time_is_not_copied(tmp_path):
    store = create_store(f"{tmp_path}/moments", pa.schema([("time", pa.int64())]), key=pa.int64())
    store.put(np.array([1]), pa.table({"time": [5]}))
    join = Join(use=f"{tmp_path}/moments", columns={"moment": "time"}, on="item")
    with pytest.raises(ConfigError, match="its column 'time' cannot be copied into an export"):
        write_joins({"moments": join}, np.array([1]), tmp_path / "out")


def test_an_export_counts_a_store_that_is_absent_and_takes_another(
    run, export, tmp_path, capsys, monkeypatch
):
    there = Exported(export)
    moved = shutil.copytree(export, tmp_path / "out")
    description = json.loads((moved / "export.json").read_text())
    segments = description["joins"]["member"]["use"]
    description["joins"]["member"]["use"] = f"{tmp_path}/nowhere"
    (moved / "export.json").write_text(json.dumps(description))
    history = [{"item": 1001, "time": 6 * 3600}, {"item": 1002, "time": 7 * 3600}]
    expected = there.recommend(history, TOP, user=101, time=8 * 3600)
    absent, replaced = Exported(moved), Exported(moved, {"member": segments})
    assert replaced.recommend(history, TOP, user=101, time=8 * 3600) == expected
    assert not replaced.missing
    assert absent.recommend(history, TOP, user=101, time=8 * 3600) != expected
    assert absent.missing == {"member": 1}
    for address, problem in (
        (f"{tmp_path}/wrong", "there is no store"),
        ("ftp://host/name", "there are a folder"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Exported(moved, {"member": address})
    monkeypatch.setattr(sys, "argv", ["example.py", "1001", "--user", "101"])
    runpy.run_path(str(moved / "example.py"))
    assert "join member: columns missing in 1 of 1 answers" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["example.py", "1001", "--user", "101", "--store", f"member={segments}"])
    runpy.run_path(str(moved / "example.py"))
    assert "missing" not in capsys.readouterr().out


def test_an_export_without_the_store_of_its_items_is_refused_and_none_is_made_of_a_run_without_it(
    run, export, tmp_path, monkeypatch
):
    moved = shutil.copytree(export, tmp_path / "out")
    shutil.rmtree(moved / "stores")
    with pytest.raises(DataError, match=r"it has no stores/item/.*; copy the whole folder"):
        Exported(moved)

    def fail(*arguments, **options):
        raise StoreError("the store is away")

    monkeypatch.setattr(StoreJoin, "open", fail)
    with pytest.raises(StoreError, match="the store is away"):
        export_run(str(run.folder.path), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_columns_are_those_of_each_events_own_time(run, monkeypatch):
    """The event of hour 5 has the first version, and those after the change the second one."""
    features = RequestFeatures.from_run(run.open(), posts=False)
    history = [{"item": 1001, "time": 5 * 3600}, {"item": 1001, "time": 6 * 3600}, {"item": 1002}]
    columns = features.make_list_question("101", history, 3).question.events.columns
    assert columns["discount"].tolist() == [1, 4, 0]
    assert columns["segment"][0] != columns["segment"][1] == columns["segment"][2]
    assert "margin" not in columns  # a column that only rewards read is not looked up


def test_a_store_that_does_not_answer_is_missing_online_and_an_error_offline(
    run, client, monkeypatch, tmp_path
):
    read = StoreJoin.read

    def fail(join, keys, times):
        if "segment" in join.columns:
            raise StoreError("the store is away")
        return read(join, keys, times)

    monkeypatch.setattr(StoreJoin, "read", fail)
    answer = ask(client, user=105)
    assert answer["missing"] == ["member"]
    assert answer["fallback"] is None
    assert 'nonet_joins_total{join="member",outcome="missing"}' in client.get("/metrics").text
    for _ in range(60):
        ask(client, user=105, k=1)
    ready = client.get("/readyz")
    assert ready.status_code == 503
    assert "data.join.member was missing" in ready.json()["reason"]
    pq.write_table(pa.table({"user_id": [101]}), tmp_path / "users.parquet")
    with pytest.raises(StoreError, match="the store is away"):
        recommend_all(str(run.folder.path), tmp_path / "users.parquet", tmp_path / "out.parquet", 3, 1)
    assert not (tmp_path / "out.parquet").exists()
    monkeypatch.undo()
    for _ in range(60):
        assert ask(client, user=105, k=1)["missing"] == []
    assert client.get("/readyz").status_code == 200


def test_a_late_store_does_not_delay_the_answer(run, monkeypatch):
    app = build_single_process_app(str(run.folder.path), ServeConfig(deadline_s=2.0), True)
    read = StoreJoin.read

    def wait(join, keys, times):
        time.sleep(1.5)
        return read(join, keys, times)

    with TestClient(app, base_url="http://localhost") as client:
        monkeypatch.setattr(StoreJoin, "read", wait)
        answer = ask(client, user=105)
    app.state.service.engines.close()
    assert answer["missing"] == ["item", "member"]
    assert answer["fallback"] is None


def test_a_server_names_its_own_store_and_a_store_without_the_column_stops_it(run, tmp_path):
    other = create_store(
        f"{tmp_path}/other", pa.schema([("price", pa.int64())]), key=pa.int64(), versions=True
    )
    other.close()
    config = ServeConfig(join={"item": {"use": f"{tmp_path}/other"}})
    with pytest.raises(ConfigError, match=r"data\.join\.item.*no column 'discount'") as error:
        build_single_process_app(str(run.folder.path), config, True)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="has no join 'items'; its joins: item, member, reward"):
        build_single_process_app(str(run.folder.path), ServeConfig(join={"items": {}}), True)


def test_an_engine_answers_a_question_whose_joined_columns_are_unknown(run):
    opened = run.open()
    version = opened.registry.read_version(opened.registry.serving.default or opened.publish_newest().number)
    InferenceEngine(opened.load_recommender(version)).warm()


@pytest.mark.parametrize("optional", [(), ("user",)])
def test_a_store_that_does_not_answer_at_the_start_is_read_once_it_answers(optional, monkeypatch):
    use = "redis://127.0.0.1:1/users"
    options = {"timeout_s": 0.2, "attempts": 1}
    join = Join(use=use, columns={"age": "age"}, on="user", as_of="newest", options=options)
    joins = HistoryJoins({"user": join}, ["age"], optional=optional)
    joins.check()
    events = EventHistory(np.array([1], np.int32), np.array([100]), np.array([0], np.int32))
    history = HistoryToJoin(events, np.array(["a"], object), "u1")
    assert joins.add_available_columns([history])[0][1] == ("user",)
    monkeypatch.setattr(joins._stores, "read_join_columns", lambda *_: {"age": np.array([7])})
    joined, missing = joins.add_available_columns([history])[0]
    assert (joined.columns["age"].tolist(), missing) == ([7], ())

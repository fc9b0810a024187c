"""The HTTP face over a small run, in this process: answers, typed errors, versions that swap under load."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from served_run import ask, items
from starlette.testclient import TestClient

from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app


def error(client, status, path="/recommend", **body):
    return ask(client, path, status, **body)["error"]


def test_a_user_gets_items_with_scores_of_a_version(client, served):
    answer = ask(client, user=103, k=7)
    assert len(set(items(answer))) == 7
    assert all(1000 <= item < 1040 for item in items(answer))
    assert answer["version"] == 1
    assert answer["fallback"] is None
    assert [row["score"] for row in answer["items"]] == sorted(
        (row["score"] for row in answer["items"]), reverse=True
    )
    seq = served.ring.corpus().seq
    seen = {int(item) + 1000 for item in seq.item[seq.offsets[3] : seq.offsets[4]]}
    if seq.repeats == "mask":
        assert not seen & set(items(answer))


def test_a_history_in_place_of_a_user_and_what_it_excludes(client):
    answer = ask(client, history=[1001, 1002, 555], k=5, exclude=[1003])
    assert answer["unknown"] == [555]
    assert 1003 not in items(answer)
    only = ask(client, history=[1001], k=5, where="title == 'item d3'")
    assert items(only) == [1003]
    of_a_kind = ask(client, history=[1001], k=5, where="'kind2' in categories and 'kind3' not in categories")
    assert [(item - 1000) % 5 for item in items(of_a_kind)] == [2] * 5


def test_a_user_nobody_knows_is_answered_and_marked(client):
    answer = ask(client, user=999, k=3)
    assert answer["cold_start"]
    assert len(answer["items"]) == 3
    assert not ask(client, user=103, k=3)["cold_start"]


def test_why_is_told_where_it_is_asked(client):
    answer = ask(client, user=104, k=3, explain=True)
    assert answer["history"][-1].startswith("item ")
    for row in answer["items"]:
        assert row["title"].startswith("item ")
        assert row["own"] <= 0 <= row["vote"] <= 1


def test_excluded_and_filtered_items_keep_their_probability(client):
    def list_scores(**body):
        return {row["item"]: row["own"] for row in ask(client, user=104, k=15, explain=True, **body)["items"]}

    best = ask(client, user=104, k=1, explain=True)["items"][0]
    every = list_scores()
    for body in ({"exclude": [best["item"]]}, {"where": f"title != '{best['title']}'"}):
        listed = list_scores(**body)
        assert best["item"] not in listed
        common = listed.keys() & every.keys()
        assert len(common) > 10
        assert all(abs(listed[item] - every[item]) < 1e-5 for item in common)


def test_scores_of_named_items_are_those_of_lists(client):
    listed = ask(client, user=105, k=4)
    scored = ask(client, "/score", user=105, items=[*items(listed), 9])
    assert scored["unknown"] == [9]
    for row, other in zip(scored["items"], listed["items"], strict=True):
        assert row["item"] == other["item"]
        assert abs(row["score"] - other["score"]) < 1e-5


def test_a_request_of_an_earlier_time_sees_only_what_was_before(served, client):
    seq, ids = served.ring.corpus().seq, served.ring.corpus().item_id
    cut = slice(int(seq.offsets[5]), int(seq.offsets[5]) + 6)
    history = [
        {"item": int(ids[item]), "time": int(time), "values": {"rating": float(rating)}}
        for item, time, rating in zip(seq.item[cut], seq.time[cut], seq.columns["rating"][cut], strict=True)
    ]
    user = int(seq.user_id[5])
    earlier = ask(client, user=user, time=int(seq.time[cut.stop]), k=5)
    assert items(earlier) == items(ask(client, user=user, history=history, k=5))
    assert items(earlier) != items(ask(client, user=user, k=5))


def test_titles_are_a_history_and_an_ambiguous_one_lists_its_ids(client):
    listed = ask(client, user=101, like=["Item B1", "item c2"], k=5, time=1000)
    by_id = ask(client, user=101, history=[1001, 1002], k=5, time=1000)
    assert items(listed) == items(by_id)
    error = ask(client, like=["item"], status=422)["error"]
    assert error["kind"] == "ambiguous_title"
    assert "40 items are called 'item': 10" in error["message"]
    assert "no item is called 'zebra'" in ask(client, like=["zebra"], status=422)["error"]["message"]
    assert "not both" in ask(client, like=["item b1"], history=[1001], status=400)["error"]["message"]


def test_posted_events_are_in_the_next_answer_and_a_post_with_an_id_counts_once(client):
    before = ask(client, user=998, k=5, explain=True)
    assert before["cold_start"]
    post = {"user": 998, "events": [{"item": 1005}, {"item": 1006, "values": {"rating": 5}}], "id": "a"}
    assert ask(client, "/events", **post) == {"accepted": 2, "unknown": [], "again": False}
    assert ask(client, "/events", **post)["again"]
    assert ask(client, "/events", user=996, events=[1005, {"item": 1007}])["accepted"] == 2
    after = ask(client, user=998, k=5, explain=True)
    assert len(after["history"]) == 2
    assert not after["cold_start"]
    assert {1005, 1006}.isdisjoint(items(after))


@pytest.mark.parametrize(
    ("status", "kind", "path", "body"),
    [
        (422, "bad_k", "/recommend", {"user": 103, "k": 0}),
        (422, "bad_k", "/recommend", {"user": 103, "k": 41}),
        (400, "bad_request", "/recommend", {}),
        (422, "bad_request", "/recommend", {"user": 1.5}),
        (422, "bad_request", "/recommend", {"user": 103, "kk": 1}),
        (422, "bad_request", "/recommend", {"user": "x" * 600}),
        (422, "bad_history", "/recommend", {"history": [1001] * 10_001}),
        (422, "bad_filter", "/recommend", {"user": 103, "where": "colour == 1"}),
        (422, "bad_filter", "/recommend", {"user": 103, "where": "__import__('os')"}),
        (422, "bad_filter", "/recommend", {"user": 103, "where": "(" * 900}),
        (422, "bad_filter", "/recommend", {"user": 103, "where": "1 in categories"}),
        (422, "bad_items", "/score", {"user": 103, "items": []}),
        (422, "bad_events", "/events", {"user": 103, "events": []}),
        (422, "bad_event", "/events", {"user": 103, "events": [{"item": 1001, "event": "buy"}]}),
        (422, "bad_column", "/events", {"user": 103, "events": [{"item": 1001, "values": {"colour": 1}}]}),
        (422, "bad_value", "/events", {"user": 103, "events": [{"item": 1001, "values": {"rating": "5"}}]}),
        (422, "bad_time", "/events", {"user": 103, "events": [{"item": 1001, "time": -5}]}),
        (
            422,
            "bad_time",
            "/events",
            {"user": 103, "events": [{"item": 1001, "time": "2096-01-01T00:00:00Z"}]},
        ),
        (422, "bad_request", "/events", {"user": 103, "events": [1001], "id": ""}),
        (422, "bad_request", "/events", {"user": 103, "events": [1001, None]}),
        (422, "bad_scene", "/recommend", {"user": 103, "scene": "home"}),
        (422, "bad_scene", "/score", {"user": 103, "items": [1001], "scene": "home"}),
    ],
)
def test_mistakes_are_typed_errors(client, status, kind, path, body):
    assert error(client, status, path, **body)["kind"] == kind


def test_not_a_number_large_bodies_and_other_bodies_are_refused(client):
    header = {"content-type": "application/json"}
    nan = b'{"user": 103, "events": [{"item": 1001, "values": {"rating": NaN}}]}'
    answer = client.post("/events", content=nan, headers=header)
    assert answer.status_code == 422
    assert "error" in client.post("/recommend", content=b"[" * 200_000, headers=header).json()
    assert client.post("/recommend", content=b"[]", headers=header).status_code == 422
    assert client.post("/recommend", content=b"x" * (10 << 20), headers=header).status_code == 413
    assert client.get("/nowhere").json()["error"]["kind"] == "no_such_page"


def test_too_little_time_gives_a_fall_back_that_says_so(client):
    answer = ask(client, user=103, k=5, deadline_ms=0.001)
    assert (answer["reason"], answer["version"]) == ("deadline", None)
    assert answer["fallback"] == "transition_counter"
    assert ask(client, user="997", k=5, deadline_ms=0.001)["fallback"] == "popularity"
    assert all(row["score"] is None for row in answer["items"])
    assert len(set(items(answer))) == 5


def test_metrics_and_the_page_of_the_api_are_there(client):
    ask(client, user=103)
    text = client.get("/metrics").text
    for name in ("nonet_requests_total", "nonet_request_seconds_bucket", "nonet_queue", "nonet_batch_size"):
        assert name in text
    assert {"/recommend", "/score", "/events", "/versions"} <= set(
        client.get("/openapi.json").json()["paths"]
    )
    assert client.get("/healthz").json() == {"ok": True}
    assert client.get("/readyz").json()["ready"]


def test_an_id_of_another_post_is_a_409_and_stores_nothing(client):
    ask(client, "/events", user=103, events=[1001], id="same")
    assert ask(client, "/events", user=103, events=[1001], id="same")["again"]
    ask(client, "/events", 409, user=103, events=[{"item": 1001, "time": 5}], id="same")
    refused = ask(client, "/events", 409, user=104, events=[1002, 1003], id="same")
    assert refused["error"]["kind"] == "id_conflict"


def test_messages_and_lengths_are_bounded(client):
    body = {"user": 103, "events": [{"item": 1001, "values": {"x" * 10**6: 1}}]}
    assert len(ask(client, "/events", 422, **body)["error"]["message"]) <= 500
    answer = client.post("/events", content=b"{}", headers={"content-length": "9" * 5000})
    assert answer.json()["error"]["kind"] == "too_large"


def test_a_body_in_chunks_is_refused_whatever_its_length_says(client):
    for headers in (
        {"content-length": "5", "transfer-encoding": "chunked"},
        {"transfer-encoding": "chunked"},
    ):
        answer = client.post("/recommend", content=b'{"user": 103}', headers=headers)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (411, "no_length")


def test_what_changes_things_wants_the_token(served, monkeypatch, tmp_path):
    monkeypatch.setenv("NONET_TOKEN", "secret")
    app = build_single_process_app(str(served.folder.path), ServeConfig(follow=False), True)
    body = {"user": 1, "events": [{"item": 1001}]}
    with TestClient(app, base_url="http://localhost") as client:
        assert client.post("/events", json=body).json()["error"]["kind"] == "no_token"
        right = {"authorization": "Bearer secret"}
        assert client.post("/events", json=body, headers=right).status_code == 200
        assert client.post("/recommend", json={"user": 1}).status_code == 200
    app.state.service.engines.close()
    monkeypatch.delenv("NONET_TOKEN")
    open_app = build_single_process_app(str(served.folder.path), ServeConfig(follow=False), False)
    with TestClient(
        open_app, base_url="http://localhost"
    ) as client:  # bound beyond this machine, no token: nothing can be changed
        assert client.post("/events", json=body).status_code == 401
    open_app.state.service.engines.close()


def test_versions_swap_and_roll_back_under_load_without_a_failed_or_mixed_answer(served, app, client):
    """Every answer's scores are those of the version that it names, bit for bit."""
    users, stop = list(range(100, 116)), threading.Event()
    answers, failed = [], []

    def load(part):
        while not stop.is_set():
            for user in users[part::2]:
                answer = client.post("/recommend", json={"user": user, "k": 5})
                if answer.status_code != 200 or answer.json()["fallback"]:
                    failed.append(answer.text)
                else:
                    answers.append((user, answer.json()))

    threads = [threading.Thread(target=load, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    registry = served.open().registry
    engines = app.state.service.engines

    def until(version):
        deadline = threading.Event()
        for _ in range(400):
            if engines.serving.default == version:
                return
            deadline.wait(0.02)
        raise AssertionError(f"{version} was not served: {engines.problems}")

    for _ in range(3):
        served.commit(1)
        until(
            registry.list_versions()[-1]
            if registry.list_versions()[-1] > engines.serving.default
            else engines.serving.default + 1
        )
    newest = engines.serving.default
    registry.rollback(newest - 1)
    until(newest - 1)
    refused = served.commit(1)
    for _ in range(100):
        if "commit" in engines.problems:
            break
        threading.Event().wait(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert "was rolled back" in engines.problems["commit"], refused
    assert engines.serving.default == newest - 1
    assert not failed
    run = served.open()
    from nonet.models.inference import InferenceEngine

    seen = {answer["version"] for _, answer in answers}
    assert len(seen) >= 2
    for version in seen:
        engine = InferenceEngine(run.load_recommender(registry.read_version(version)), version)
        for user, answer in [pair for pair in answers if pair[1]["version"] == version][:40]:
            asked = app.state.service.features.make_list_question(str(user), None, 5)
            alone = engine.answer([asked.question])[0]
            np.testing.assert_allclose([row["score"] for row in answer["items"]], alone.score, atol=1e-5)


def test_withdrawn_items_vanish_at_once(served, app, client):
    best = items(ask(client, user=110, k=3))
    registry = served.open().registry
    registry.withdraw({str(best[0])})
    for _ in range(200):
        if app.state.service.engines.serving.withdrawn:
            break
        threading.Event().wait(0.02)
    assert best[0] not in items(ask(client, user=110, k=20))
    assert ask(client, "/score", user=110, items=best)["unknown"] == [best[0]]
    assert best[0] not in items(ask(client, user=110, k=20, deadline_ms=0.001))
    registry.withdraw(set())

"""What the page opens with: example users, a search by title; and mistakes of field names, which name the fields there are."""

from __future__ import annotations

import pytest
from served_run import ask
from starlette.testclient import TestClient

from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app


def test_example_users_are_of_the_data_and_can_be_asked_about(client, served):
    users = client.get("/examples").json()["users"]
    assert len(users) == len(set(users)) == 6
    assert set(users) <= set(served.ring.corpus().seq.user_id.tolist())
    assert not ask(client, user=users[0], k=3)["cold_start"]


def test_items_are_found_by_words_of_their_title_the_popular_first(client, served):
    found = client.get("/items", params={"title": "ITEM D", "k": 50}).json()["items"]
    assert found
    assert all(row["title"].lower().startswith("item d") for row in found)
    corpus = served.ring.corpus()
    events = dict(zip(corpus.item_id.tolist(), corpus.items["events"].to_pylist(), strict=True))
    counts = [events[row["item"]] for row in found]
    assert counts == sorted(counts, reverse=True)
    assert client.get("/items", params={"title": "nothing of the kind"}).json() == {"items": []}
    assert client.get("/items", params={"title": "(", "k": 1}).json() == {"items": []}
    for params in ({"title": ""}, {"title": "x" * 300}, {"title": "x", "k": 0}):
        assert client.get("/items", params=params).status_code == 422


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/recommend", {"user": 103, "top": 3}, "top: there is no such field; fields: user, history"),
        ("/recommend", {"user": 103, "exlude": [1]}, "Did you mean 'exclude'"),
        ("/score", {"user": 103, "items": [1001], "k": 1}, "fields: user, history"),
        ("/events", {"user": 103, "event": []}, "Did you mean 'events'"),
        (
            "/events",
            {"user": 103, "events": [{"item": 1001, "when": 5}]},
            "events.0.when: there is no such field; fields: item, time",
        ),
    ],
)
def test_an_unknown_field_names_the_known_ones(client, path, body, said):
    answer = client.post(path, json=body)
    assert answer.status_code == 422
    assert said in answer.json()["error"]["message"]


def test_a_body_that_is_no_json_object_says_what_to_send(client):
    answer = client.post("/recommend", content=b'{"user": 103}', headers={"content-type": "text/plain"})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "send a JSON object, with Content-Type: application/json"


def test_where_users_are_no_callers_business_there_are_no_examples(served, monkeypatch):
    monkeypatch.setenv("NONET_READ_TOKEN", "read")
    app = build_single_process_app(str(served.folder.path), ServeConfig(follow=False), True)
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/examples").status_code == 401
        assert client.get("/items", params={"title": "a"}).status_code == 401
        right = {"authorization": "Bearer read"}
        assert client.get("/examples", headers=right).json()["users"]
    app.state.service.engines.close()
    monkeypatch.delenv("NONET_READ_TOKEN")
    beyond = build_single_process_app(str(served.folder.path), ServeConfig(follow=False), False)
    with TestClient(beyond, base_url="http://localhost") as client:
        assert client.get("/examples").json() == {"users": []}
    beyond.state.service.engines.close()

"""Who may ask, who may see what a user did, and by what a caller's limit is counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from served_run import TrainedRun
from starlette.testclient import TestClient

from nonet.deploy.serving.access import AccessPolicy, CallerResolver, limits
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app
from nonet.errors import ConfigError

WRITE, READ = {"authorization": "Bearer write"}, {"authorization": "Bearer read"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = TrainedRun(tmp_path_factory.mktemp("served"), memory=False)
    made.commit(2)
    return made


@pytest.fixture
def opened(served, monkeypatch):
    """Builds clients of servers whose limits are counted by a clock that stands still."""
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 100.0))
    apps = []

    def make(local=True, write="", read="", peer="127.0.0.1", **settings):
        monkeypatch.setenv("NONET_TOKEN", write)
        monkeypatch.setenv("NONET_READ_TOKEN", read)
        app = build_single_process_app(
            str(served.folder.path), ServeConfig(deadline_s=20.0, follow=False, **settings), local
        )
        apps.append(app)
        return TestClient(app, base_url="http://localhost", client=(peer, 1), raise_server_exceptions=False)

    yield make
    for app in apps:
        app.state.service.engines.close()


def test_a_read_token_is_wanted_by_questions_where_it_is_set(opened):
    client = opened(write="write", read="read")
    for path, body in (("/recommend", {"user": 103, "k": 2}), ("/score", {"user": 103, "items": [1001]})):
        refused = client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["kind"]) == (401, "no_token")
        for token in (READ, WRITE):
            assert client.post(path, json=body, headers=token).status_code == 200
    assert client.get("/versions").status_code == 401
    assert client.get("/versions", headers=READ).status_code == 200
    post = {"user": 103, "events": [{"item": 1001}]}
    assert client.post("/events", json=post, headers=READ).status_code == 401, "reading is no writing"
    assert client.post("/events", json=post, headers=WRITE).status_code == 200
    for path in ("/readyz", "/healthz", "/metrics", "/docs", "/"):
        assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("options", "headers", "told"),
    [
        ({}, {}, True),  # this machine alone, no tokens
        ({"local": False}, {}, False),
        ({"write": "write"}, {}, False),
        ({"write": "write"}, {"authorization": "Bearer wrong"}, False),
        ({"write": "write"}, WRITE, True),
        ({"local": False, "read": "read"}, READ, True),
        ({"read": "read"}, READ, True),
        ({"write": "write", "read": ""}, {}, False),
    ],
)
def test_what_a_user_did_is_told_to_nobody_without_a_token(opened, options, headers, told):
    client = opened(**options)
    for path, more in (("/recommend", {"k": 2}), ("/score", {"items": [1001]})):
        answer = client.post(path, json={"user": 103, "explain": True, **more}, headers=headers).json()
        assert bool(answer["history"]) == told
        assert answer["items"][0]["title"]
        own = client.post(path, json={"history": [1002], "explain": True, **more}, headers=headers).json()
        assert len(own["history"]) == 1, "a history that came with the request is the caller's"


def test_a_limit_is_not_evaded_by_other_names(opened):
    client = opened(rate=1.0, burst=2.0)
    codes = [
        client.post("/recommend", json={"user": 103, "k": 1}, headers={"X-Caller": f"c{number}"}).status_code
        for number in range(5)
    ]
    assert codes == [200, 200, 429, 429, 429]
    forged = {"X-Forwarded-For": "9.9.9.9"}
    assert client.post("/recommend", json={"user": 103, "k": 1}, headers=forged).status_code == 429


def test_who_reaches_a_limit_is_told_when_to_ask_again(opened, monkeypatch):
    slow, queued = opened(rate=0.5, burst=1.0), opened(waiting=3)
    assert slow.post("/recommend", json={"user": 103, "k": 1}).status_code == 200
    monkeypatch.setattr(queued.app.state.service.engines, "count_waiting", lambda: 3)
    event = {"user": 103, "events": [{"item": 1001}]}
    for client, wait_s in ((slow, "2"), (queued, "1")):
        for path, body in (("/recommend", {"user": 103, "k": 1}), ("/events", event)):
            answer = client.post(path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, wait_s)
            assert answer.json()["error"]["kind"] == "too_many"
    monkeypatch.setattr(queued.app.state.service.engines, "count_waiting", lambda: 2)
    assert queued.post("/recommend", json={"user": 103, "k": 1}).status_code == 200


def test_names_count_for_limits_beside_a_token(opened):
    client = opened(write="write", rate=1.0, burst=2.0)
    codes = [
        client.post("/recommend", json={"user": 103, "k": 1}, headers={"X-Caller": name, **WRITE}).status_code
        for name in ("a", "a", "a", "b")
    ]
    assert codes == [200, 200, 429, 200]


def test_behind_a_trusted_proxy_each_address_has_its_own_limit(opened):
    client = opened(peer="10.1.2.3", rate=1.0, burst=1.0, proxies=("10.0.0.0/8",))

    def code(forwarded):
        return client.post(
            "/recommend", json={"user": 103, "k": 1}, headers={"X-Forwarded-For": forwarded}
        ).status_code

    assert [code("1.1.1.1"), code("2.2.2.2"), code("1.1.1.1")] == [200, 200, 429]
    assert code("8.8.8.8, 1.1.1.1") == 429, (
        "what a caller writes in front of its own address counts for nothing"
    )
    assert code("8.8.8.8, 3.3.3.3, 10.9.9.9") == 200


def test_addresses_are_taken_from_the_last_untrusted_one():
    callers = CallerResolver(["10.0.0.0/8", "::1"])
    assert callers.resolve_address("5.5.5.5", "1.1.1.1") == "5.5.5.5"
    assert callers.resolve_address("10.0.0.1", "") == "10.0.0.1"
    assert callers.resolve_address("10.0.0.1", "1.1.1.1, 2.2.2.2, 10.0.0.7") == "2.2.2.2"
    assert callers.resolve_address("::1", "10.0.0.7") == "10.0.0.7"
    assert callers.resolve_address("10.0.0.1", "not an address, 10.0.0.2") == "not an address"
    with pytest.raises(ConfigError, match="proxies"):
        CallerResolver(["somewhere"])
    with pytest.raises(Exception, match="proxies"):
        ServeConfig(proxies=["10.0.0.0/99"])


def test_an_empty_token_allows_nothing():
    access = AccessPolicy("", "read", local=False)
    assert not access.may_change("")
    assert not access.may_read("")
    assert not access.may_see_histories("")


@pytest.mark.parametrize(
    ("options", "answered"),
    [
        ({}, False),
        ({"write": "write"}, False),  # questions need no token
        ({"read": "read"}, False),  # posts need no token
        ({"write": "write", "read": "read"}, True),
        ({"proxies": ["127.0.0.1"]}, True),
        ({"proxies": ["::/64"]}, True),
        ({"proxies": ["10.0.0.0/8"]}, False),  # no proxy there reaches this server
        ({"proxies": ["10.0.0.0/8"], "peer": "10.1.2.3"}, False),  # an address that a page has made up
        ({"local": False}, True),
    ],
)
def test_a_local_server_without_tokens_answers_to_no_name_of_the_web(opened, options, answered):
    client = opened(**options)
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[::2]:80", ""):
        answer = client.get("/healthz", headers={"host": host})
        assert (answer.status_code == 200) == answered, host
        if not answered:
            assert answer.json()["error"]["kind"] == "foreign_host"
    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200


def test_a_token_may_end_with_a_line_break(opened):
    client = opened(write="write\n", read="read\n")
    assert client.get("/versions", headers=READ).status_code == 200
    assert client.post("/events", json={"user": 103, "events": [1001]}, headers=WRITE).status_code == 200


@pytest.mark.parametrize(
    ("status", "path", "body", "headers"),
    [
        (422, "/recommend", {"user": 1.5}, {}),
        (422, "/events", {"user": 103, "events": []}, {}),
        (401, "/score", {"user": 103, "items": [1001]}, {"authorization": "Bearer guess"}),
        (404, "/nowhere", {}, {}),
        (403, "/recommend", {"user": 103}, {"host": "evil.example"}),
        (411, "/recommend", {"user": 103}, {"content-length": "-"}),
    ],
)
def test_a_request_that_is_refused_counts_against_the_limit_of_its_caller(
    opened, status, path, body, headers
):
    client = opened(rate=0.001, burst=1, read="read" if status == 401 else "")
    answers = [client.post(path, json=body, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status, 429]
    assert answers[1].json()["error"]["kind"] == "too_many"


def test_every_query_counts_against_the_limit_of_its_caller(opened):
    client = opened(rate=0.001, burst=1)
    for path in ("/items?title=item", "/examples", "/versions"):
        client = opened(rate=0.001, burst=1)
        assert [client.get(path).status_code for _ in range(2)] == [200, 429], path
    assert client.get("/metrics").status_code == 200

"""Posted events on disk: whole lines or none, sealed segments, a bounded memory, and events that cannot be read."""

from __future__ import annotations

import json
import logging
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from served_run import TrainedRun, ask, items
from starlette.testclient import TestClient

from nonet import journal as line_journal
from nonet.deploy.opened import RequestFeatures, UserHistories
from nonet.deploy.opened import histories as module
from nonet.deploy.opened.items import Refused
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app
from nonet.journal import JournalOptions, LineJournal, StorageFull


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = TrainedRun(tmp_path_factory.mktemp("served"))
    made.commit(2)
    return made


def event(item, time=0, **values):
    return {"item": item, "time": time, "event": None, "values": values}


def fill_disk(monkeypatch, room):
    """Let the disk take `room` more bytes, as a full one does: a short write, then an error."""
    left, write = [room], os.write

    def limited(file, content):
        if not left[0]:
            raise OSError(28, "No space left on device")
        written = write(file, bytes(content)[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("room", [0, 20])
def test_a_post_on_a_full_disk_is_refused_and_leaves_no_half_a_line(served, tmp_path, monkeypatch, room):
    journal = tmp_path / "events.jsonl"
    histories = UserHistories(served.ring.corpus(), journal)
    histories.post("first", [event(1)], "a")
    before = journal.read_bytes()
    with monkeypatch.context() as full:
        fill_disk(full, room)
        with pytest.raises(StorageFull, match="is full"):
            histories.post("second", [event(2)], "b")
    assert journal.read_bytes() == before
    assert not len(histories.get_events("second"))
    assert histories.post("second", [event(2)], "b"), "the id of a refused post may be sent again"
    assert histories.post("third", [event(3)], "c")
    again = UserHistories(served.ring.corpus(), journal)
    assert [again.get_events(user).item.tolist() for user in ("first", "second", "third")] == [[1], [2], [3]]


def test_an_acknowledged_event_is_on_a_disk_that_loses_what_was_not_synced(served, tmp_path, monkeypatch):
    journal, kept = tmp_path / "events.jsonl", {}
    sync = os.fdatasync

    def fdatasync(handle):
        sync(handle)
        kept["content"] = journal.read_bytes()

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    histories = UserHistories(served.ring.corpus(), journal)
    for number in range(3):
        histories.post("new", [event(number)])
        assert kept["content"] == journal.read_bytes()
        assert kept["content"].count(b"\n") == number + 1


def test_a_short_write_is_continued_until_all_of_the_line_is_on_disk(served, tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, bytes(content)[:7]))
    histories = UserHistories(served.ring.corpus(), tmp_path / "events.jsonl")
    histories.post("new", [event(1), event(2)])
    assert UserHistories(served.ring.corpus(), tmp_path / "events.jsonl").get_events("new").item.tolist() == [
        1,
        2,
    ]


def test_a_torn_line_is_cut_and_reported_and_a_reader_changes_nothing(served, tmp_path, caplog):
    journal = tmp_path / "events.jsonl"
    UserHistories(served.ring.corpus(), journal).post("new", [event(1)])
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"user": "ne')
    reader = UserHistories(served.ring.corpus(), journal, read_only=True)
    assert reader.get_events("new").item.tolist() == [1]
    assert journal.read_bytes() != whole, "another process may be writing that line"
    with caplog.at_level(logging.WARNING):
        writer = UserHistories(served.ring.corpus(), journal)
    assert writer.get_facts()["cut_bytes"] == 12
    assert "removed an incomplete line of 12 bytes" in caplog.text
    assert journal.read_bytes() == whole


def test_what_reads_a_journal_leaves_it_as_it_is(served):
    """A table of users is answered while a server writes half a line."""
    run = served.open()
    run.beside.mkdir(exist_ok=True)
    journal = run.beside / "events.jsonl"
    before = journal.read_bytes() if journal.exists() else b""
    journal.write_bytes(before + b'{"user": "103", "id"')
    RequestFeatures.from_run(run, posts=False)
    assert journal.read_bytes() == before + b'{"user": "103", "id"'
    journal.write_bytes(before)


def test_segments_are_sealed_numbered_and_never_rewritten(served, tmp_path):
    journal, options = tmp_path / "events.jsonl", JournalOptions(segment_bytes=200)
    histories = UserHistories(served.ring.corpus(), journal, options=options)
    for number in range(9):
        histories.post("new", [event(number)], f"post {number}")
    sealed = {path.name: path.read_bytes() for path in sorted((tmp_path / "events").iterdir())}
    assert list(sealed) == [f"{number:06d}.jsonl" for number in range(1, len(sealed) + 1)]
    assert len(sealed) >= 3
    assert histories.get_facts()["segments"] == len(sealed) + 1
    again = UserHistories(served.ring.corpus(), journal, options=options)
    assert again.get_events("new").item.tolist() == list(range(9))
    for number in range(9, 20):
        again.post("new", [event(number)], f"post {number}")
    histories.post(
        "new", [event(20)], "post 20"
    )  # a process that has the sealed file open appends to the new one
    for name, content in sealed.items():
        assert (tmp_path / "events" / name).read_bytes() == content
    assert UserHistories(served.ring.corpus(), journal, read_only=True).get_events(
        "new"
    ).item.tolist() == list(range(21))


def test_sealed_segments_beyond_the_retention_are_dropped_and_reported(served, tmp_path):
    journal = tmp_path / "events.jsonl"
    histories = UserHistories(served.ring.corpus(), journal, options=JournalOptions(segment_bytes=1))
    for number in range(4):
        histories.post("new", [event(number)])
    old = time.time() - 3 * 86_400
    os.utime(tmp_path / "events" / "000001.jsonl", (old, old))
    assert UserHistories(served.ring.corpus(), journal).get_facts()["segments"] == 4, (
        "without a retention all are kept"
    )
    kept = UserHistories(served.ring.corpus(), journal, options=JournalOptions(1, retention_days=2))
    assert kept.get_facts() | {"bytes": 0} == {
        "segments": 3,
        "bytes": 0,
        "retention_days": 2,
        "cut_bytes": 0,
        "dropped_segments": 1,
        "quarantined": 0,
    }
    assert kept.get_events("new").item.tolist() == [1, 2, 3]


def test_memory_keeps_the_newest_events_and_the_items_of_all(served, tmp_path):
    """A bounded history reads and hides what one that keeps everything does, whatever the order of arrival."""
    corpus = served.ring.corpus()
    every = UserHistories(corpus, tmp_path / "all" / "events.jsonl")
    bounded = UserHistories(corpus, tmp_path / "bounded" / "events.jsonl", window=20)
    times = np.random.default_rng(0).permutation(200)
    base = int(every.get_events("100").time[-2])
    for number, place in enumerate(times.tolist()):
        for histories in (every, bounded):
            for user, start in (("100", base), ("999", 0)):
                histories.post(user, [event(number % 30, start + place)], None)
    for histories in (bounded, UserHistories(corpus, tmp_path / "bounded" / "events.jsonl", window=20)):
        for user in ("100", "999"):
            assert len(histories.get_events(user)) <= 20 + len(UserHistories(corpus, None).get_events(user))
            for block in (1, 8):
                asked = [
                    RequestFeatures(corpus, each, 20, 20, block).make_list_question(user, None, 3)
                    for each in (every, histories)
                ]
                read = [
                    (q.events.item.tolist(), q.events.time.tolist(), q.events.start)
                    for q in (a.question for a in asked)
                ]
                assert read[0] == read[1]
                assert asked[0].question.hidden.tolist() == asked[1].question.hidden.tolist()


@pytest.mark.parametrize(("block", "starts"), [(1, [0, 1, 2, 3, 4, 5]), (4, [0, 4, 4, 4, 4, 8])])
def test_the_window_of_a_user_moves_by_blocks_of_events(served, tmp_path, block, starts):
    histories = UserHistories(served.ring.corpus(), tmp_path / "events.jsonl")
    features = RequestFeatures(served.ring.corpus(), histories, 8, 20, block)
    histories.post("7777", [event(number % 30, number) for number in range(8)])
    found = []
    for number in range(8, 14):
        read = features.make_list_question("7777", None, 3).question.events
        assert read.time.tolist() == list(range(read.start, number))
        found.append(read.start)
        histories.post("7777", [event(number % 30, number)])
    assert found == starts


UNREADABLE = [
    json.dumps({"user": "103", "id": None, "events": [event(1, 5, rating=10**400)]}),
    json.dumps({"user": "103", "id": None, "events": [event(1, 5, rating="five"), event(2, 6, rating=4.0)]}),
    json.dumps({"user": "103", "id": None, "events": [event(10**9, 5)]}),
    json.dumps({"user": "103", "id": None, "events": [event(1, 2**70)]}),
    json.dumps({"user": "103", "id": None, "events": [event(1, 5, colour=1)]}),
    json.dumps({"user": "103", "id": None, "events": [{"item": 1}, 7]}),
    json.dumps({"user": "103", "id": None, "events": [event(1, 5) | {"values": [1]}]}),
    '{"user": "103", "id": null, "ev{"user": "104", "id": null, "events": []}',
    '{"user": 103, "id": null, "events": []}',
    '{"user": "\\ud800", "id": null, "events": []}',
    "[" * 100_000,
]


def test_events_already_written_that_cannot_be_read_are_quarantined_and_lock_nobody_out(served):
    """A journal of an older server holds what no type can: its users are answered, before and after a restart."""
    home = served.open().beside
    home.mkdir(exist_ok=True)
    (home / "events.jsonl").write_text("".join(f"{line}\n" for line in UNREADABLE))
    for _ in range(2):
        app = build_single_process_app(
            str(served.folder.path), ServeConfig(deadline_s=20.0, follow=False), True
        )
        with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
            assert ask(client, user=103, k=5, explain=True)["fallback"] is None
            assert ask(client, user=104, k=5)["fallback"] is None
            journal = client.get("/versions").json()["journal"]
        app.state.service.engines.close()
        assert journal["quarantined"] == 12
        kept = [json.loads(line) for line in (home / "events.quarantined.jsonl").read_text().splitlines()]
        assert len(kept) == 12
        assert kept[0]["place"] == "events.jsonl:1"
        assert "does not fit in 32 bits" in kept[0]["reason"]
    history = RequestFeatures.from_run(served.open(), posts=False).histories
    own = UserHistories(served.ring.corpus(), None).get_events("103")
    assert len(history.get_events("103")) == len(own) + 1, "the readable event of a post is read"


def test_a_full_disk_is_507_over_http_and_the_event_is_in_no_answer(served, monkeypatch):
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0, follow=False), True)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        with monkeypatch.context() as full:
            fill_disk(full, 10)
            error = ask(client, "/events", 507, user=998, events=[{"item": 1001}])["error"]
        assert error["kind"] == "storage_full"
        assert ask(client, user=998, k=3)["cold_start"]
        ask(client, "/events", user=998, events=[{"item": 1001}])
        assert 1001 not in items(ask(client, user=998, k=10))
    app.state.service.engines.close()


BAD_POSTS = [
    ("bad_value", '{"rating": 1e400}'),
    ("bad_value", '{"rating": -1e400}'),
    ("bad_value", '{"rating": NaN}'),
    ("bad_value", f'{{"rating": {10**400}}}'),
    ("bad_value", '{"rating": 3.5e38}'),
    ("bad_value", '{"rating": true}'),
    ("bad_value", '{"rating": null}'),
    ("bad_value", '{"rating": [1]}'),
]


def test_numbers_and_text_that_no_type_holds_are_422_and_nothing_is_written(served):
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0, follow=False), True)
    journal = served.open().beside / "events.jsonl"
    before = journal.read_bytes()
    header = {"content-type": "application/json"}
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:

        def refused(path, body):
            answer = client.post(path, content=body.encode(), headers=header)
            assert answer.status_code == 422, (body[:80], answer.text)
            return answer.json()["error"]["kind"]

        for kind, values in BAD_POSTS:
            assert (
                refused("/events", f'{{"user": 990, "events": [{{"item": 1001, "values": {values}}}]}}')
                == kind
            )
        for moment in ("-1", str(2**70), "1.5", "1e400", "NaN", '"now"'):
            kind = refused("/events", f'{{"user": 990, "events": [{{"item": 1001, "time": {moment}}}]}}')
            assert kind in ("bad_time", "bad_request")
        lone = '"\\ud800"'
        for user in (str(2**70), str(-(2**63) - 1), "1e400", "NaN", "true", lone, "[1]"):
            refused("/events", f'{{"user": {user}, "events": [{{"item": 1001}}]}}')
            refused("/recommend", f'{{"user": {user}, "k": 2}}')
            refused("/recommend", f'{{"history": [{user}], "k": 2}}')
            refused("/recommend", f'{{"user": 103, "k": 2, "exclude": [{user}]}}')
            refused("/score", f'{{"user": 103, "items": [{user}]}}')
        for field, value in (("id", lone), ("events", f'[{{"item": 1001, "event": {lone}}}]')):
            body = {"user": "990", "events": '[{"item": 1001}]'} | {field: value}
            text = ", ".join(f'"{name}": {value}' for name, value in body.items())
            refused("/events", f"{{{text}}}")
        for field, value in (
            ("where", lone),
            ("scene", lone),
            ("k", str(2**70)),
            ("k", "1.5"),
            ("deadline_ms", "NaN"),
            ("deadline_ms", str(10**400)),
        ):
            refused("/recommend", f'{{"user": 103, "{field}": {value}}}')
        for user in (str(2**63 - 1), str(-(2**63)), '"103"'):
            answer = client.post("/recommend", content=f'{{"user": {user}, "k": 2}}'.encode(), headers=header)
            assert answer.status_code == 200, (user, answer.text)
            assert answer.json()["fallback"] is None
        ask(client, "/events", user=997, events=[{"item": 1001, "values": {"rating": 3e38}}])
        answer = ask(client, user=997, k=3)
        assert answer["fallback"] is None
        assert all(row["score"] is not None for row in answer["items"])
    app.state.service.engines.close()
    assert journal.read_bytes().count(b"\n") == before.count(b"\n") + 1


def test_posts_older_than_the_retention_are_deleted_while_nothing_is_posted(served, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_EXPIRE_EVERY_S", 0.01)
    journal = tmp_path / "events.jsonl"
    options = JournalOptions(retention_days=30)
    histories = UserHistories(served.ring.corpus(), journal, options=options)
    reader = LineJournal(journal, options, read_only=True)
    histories.post("new", [event(1)])
    old = time.time() - 31 * 86_400
    os.utime(journal, (old, old))
    deadline = time.monotonic() + 30
    while list(reader.iterate_lines()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list(reader.iterate_lines())
    histories.close()


def test_quarantined_posts_are_deleted_with_the_others_while_a_server_runs_and_when_it_starts(
    served, tmp_path, monkeypatch
):
    journal, options = tmp_path / "events.jsonl", JournalOptions(retention_days=30)
    quarantine = tmp_path / "events.quarantined.jsonl"
    for is_running in (True, False):
        journal.write_text('{"user": "secret"}\n')
        monkeypatch.setattr(module, "_EXPIRE_EVERY_S", 0.01 if is_running else 3600.0)
        histories = UserHistories(served.ring.corpus(), journal, options=options)
        assert "secret" in quarantine.read_text()
        old = time.time() - 31 * 86_400
        for path in [journal, *(tmp_path / "events").glob("*")]:
            os.utime(path, (old, old))
        if not is_running:
            histories.close()
            histories = UserHistories(served.ring.corpus(), journal, options=options)
        deadline = time.monotonic() + 30
        while quarantine.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        histories.close()
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and "secret" in path.read_text()]


def test_posts_of_items_that_were_added_meanwhile_are_not_listed_as_unreadable(served, tmp_path):
    corpus, journal = served.ring.corpus(), tmp_path / "events.jsonl"
    journal.write_text("garbage\n")
    histories = UserHistories(corpus, journal)
    features = RequestFeatures(corpus, histories, 8, 20)
    count = len(corpus.item_id) + 1
    trie = SimpleNamespace(version="c2", leaf_of_item=np.arange(count))
    features.renew(SimpleNamespace(items=corpus.items, item_id=np.arange(count), trie=trie))
    histories.post("new", [event(count - 1)])
    histories._renew_quarantined()
    assert histories.quarantined == 1


def test_a_post_beside_a_server_that_is_suspended_is_503_and_may_be_sent_again(served, monkeypatch):
    monkeypatch.setattr(line_journal, "_LOCK_PATIENCE_S", 0.02)
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0, follow=False), True)
    suspended = LineJournal(served.open().beside / "events.jsonl", JournalOptions())
    post = {"user": 996, "events": [{"item": 1001}], "id": "beside"}
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        with suspended._hold_lock():
            error = ask(client, "/events", 503, **post)["error"]
        assert "nothing was stored; it may be suspended" in error["message"]
        assert ask(client, user=996, k=3)["cold_start"]
        assert not ask(client, "/events", **post)["again"]
    app.state.service.engines.close()


def test_a_posted_event_that_where_leaves_out_is_refused_as_far_as_its_values_say_so(served, tmp_path):
    corpus = served.ring.corpus()
    name = "clicked"
    histories = UserHistories(corpus, tmp_path / "events.jsonl", {name: np.int8(1)})
    features = RequestFeatures(corpus, histories, 8, 20, where=f"{name} >= 2")
    item, kind = int(corpus.item_id[0]), next(iter(histories.kinds), None)
    for values in ({name: 3}, {}):
        features.post(9001, [{"item": item, "values": values, "event": kind}], None)
    with pytest.raises(Refused, match=r"data.where: .* leaves this event out"):
        features.post(9001, [{"item": item, "values": {name: 1}, "event": kind}], None)
    with pytest.raises(Refused, match=r"leaves this event out"):
        features.read_events(None, [{"item": item, "values": {name: 1}, "event": kind}])
    assert len(histories.get_events("9001")) == 2
    with pytest.raises(Refused, match=rf"{name}: 'yes' is not a"):
        features.post(9001, [{"item": item, "values": {name: "yes"}}], None)


@pytest.mark.parametrize(
    ("where", "event", "is_refused"),
    [
        ("rating >= 4 and clicked == true", {"values": {"rating": 3, "clicked": 1}}, True),
        ("rating >= 4 and clicked == true", {"values": {"rating": 5}}, False),
        ("rating >= 4 and clicked == true", {"values": {"rating": 3}}, True),
        ("clicked == false", {"values": {"clicked": 0}}, False),
        ("clicked == true", {"values": {"clicked": 0}}, True),
        ("KIND == 'other' and rating >= 4", {}, True),
        ("KIND == 'other' or rating >= 4", {}, False),
        ("gone == 'x'", {}, False),
        ("gone == 'x' and lost >= 1 and 'a' in tags and rating >= 4", {"values": {"rating": 3}}, True),
        ("genre == 'x' and rating >= 4", {"values": {"rating": 3}}, True),
        ("genre in ('x', 'y') or rating >= 4", {"values": {"rating": 3}}, False),
        ("genre == 'x'", {"values": {"genre": "x"}}, False),
        ("genre == 'x'", {"values": {"genre": "y"}}, True),
        ("genre == 'x'", {"values": {"genre": 5}}, False),
        ("genre == brand", {"values": {"genre": "x", "brand": "y"}}, True),
        ("genre == brand", {"values": {"genre": "x"}}, False),
        ("clicked >= 9007199254740993", {"values": {"genre": "x"}}, False),
        ("genre >= 9007199254740993", {"values": {"genre": 9007199254740993}}, False),
        ("genre >= 9007199254740994", {"values": {"genre": 9007199254740993}}, True),
        ("clicked", {"values": {"clicked": 0}}, True),
        ("clicked", {"values": {"clicked": 1}}, False),
        ("not clicked or rating >= 4", {"values": {"clicked": 1, "rating": 3}}, True),
        ("clicked == True", {"values": {"clicked": 0}}, True),
        ("clicked in (TRUE,)", {"values": {"clicked": 0}}, True),
        ("clicked == 1 and rating >= 4", {"values": {"clicked": 0}}, True),
        ("timestamp >= 2000000000", {"time": 1700000000}, True),
        ("timestamp < 2000000000", {"time": 1700000000}, False),
        ("timestamp < 1000000000", {}, True),
        ("item_id != ITEM", {}, True),
        ("item_id == ITEM", {}, False),
        ("user_id != 9001", {}, True),
        ("user_id == 9001", {}, False),
        ("not " * 62 + "clicked", {"values": {"clicked": 1}}, False),
        ("not " * 63 + "clicked", {"values": {"clicked": 1}}, False),
        ("rating >= 4", {"values": {"rating": 1 << 70}}, False),
    ],
)
def test_a_condition_is_decided_by_what_an_event_has(served, tmp_path, where, event, is_refused):
    corpus = served.ring.corpus()
    defaults = {"rating": np.float32(0), "clicked": np.int8(0), "genre": np.int64(0), "brand": np.int64(0)}
    histories = UserHistories(corpus, tmp_path / "events.jsonl", defaults)
    kind = next(iter(histories.kinds), None)
    where = where.replace("KIND", "event").replace("ITEM", str(corpus.item_id[0]))
    features = RequestFeatures(corpus, histories, 8, 20, where=where)
    posted = [{"item": int(corpus.item_id[0]), "event": kind} | event]
    if is_refused and not ("event" in where and kind is None):
        with pytest.raises(Refused, match=r"leaves this event out"):
            features.post(9001, posted, None)
    else:
        features.post(9001, posted, None)


def test_an_event_is_refused_by_a_condition_alone_and_beside_others(served, tmp_path):
    corpus = served.ring.corpus()
    item = int(corpus.item_id[0])
    histories = UserHistories(
        corpus, tmp_path / "events.jsonl", {"rating": np.float32(0), "genre": np.int64(0)}
    )
    features = RequestFeatures(corpus, histories, 8, 20, where="genre == 'x' and rating >= 4")
    bad = {"item": item, "values": {"rating": 1}}
    good = [{"item": item, "values": values} for values in ({"rating": 5, "genre": "x"}, {"genre": 7}, {})]
    for events in ([bad], [*good, bad], [bad, *good]):
        with pytest.raises(Refused, match=r"leaves this event out"):
            features.post(9001, events, None)
    features.post(9001, good, None)


def test_times_that_a_history_does_not_have_do_not_leave_its_events_out(served, tmp_path):
    corpus = served.ring.corpus()
    histories = UserHistories(corpus, tmp_path / "events.jsonl")
    features = RequestFeatures(corpus, histories, 8, 20, where="timestamp < 2000")
    item = int(corpus.item_id[0])
    assert len(features.read_events(None, [item, {"item": item, "time": 1999}])[0]) == 2
    with pytest.raises(Refused, match=r"leaves this event out"):
        features.read_events(None, [item, {"item": item, "time": 2000}])
    users = RequestFeatures(corpus, histories, 8, 20, where="user_id != 7")
    assert len(users.read_events(None, [item])[0]) == 1
    with pytest.raises(Refused, match=r"leaves this event out"):
        users.read_events(7, [item])


@pytest.mark.parametrize("where", [None, "rating >= 4"])
@pytest.mark.parametrize("value", [1 << 140, [1, "a"], "\ud800", {"a": [1, {}]}, True])
def test_a_malformed_value_is_refused_with_a_condition_as_without(served, tmp_path, where, value):
    corpus = served.ring.corpus()
    histories = UserHistories(
        corpus, tmp_path / "events.jsonl", {"rating": np.float32(0), "amount": np.int64(0)}
    )
    features = RequestFeatures(corpus, histories, 8, 20, where=where)
    for name in ("rating", "amount"):
        with pytest.raises(Refused, match=name):
            features.post(9001, [{"item": int(corpus.item_id[0]), "values": {name: value}}], None)

"""Events of users: on disk before they are acknowledged, there after a kill, in order of time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served_run import TrainedRun

from nonet.deploy.after import append_events
from nonet.deploy.opened import Refused, UserHistories
from nonet.deploy.opened import events as events_module
from nonet.deploy.opened import histories as histories_module
from nonet.deploy.opened.events import EventReader
from nonet.deploy.opened.vocabulary import Vocabulary
from nonet.errors import ConfigError
from nonet.samples.tables import IdKind
from nonet.samples.tokenised import StoredSequences

KILLED = """
import os, sys
from pathlib import Path
from nonet.deploy.opened import UserHistories
from nonet.models.generation import Corpus
import json
corpus = Corpus.load(json.loads(sys.argv[2]))
histories = UserHistories(corpus, Path(sys.argv[1]))
for number in range(10_000):
    histories.post("killed", [{"item": number % 40, "time": number}], f"post {number}")
    os.write(1, f"{number}\\n".encode())
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return TrainedRun(tmp_path_factory.mktemp("served"), memory=False)


def event(item, time):
    return {"item": item, "time": time, "event": None, "values": {}}


def test_posted_events_come_after_those_of_the_data_in_order_of_time(served, tmp_path):
    histories = UserHistories(served.ring.corpus(), tmp_path / "events.jsonl")
    before = histories.get_events("100")
    last = int(before.time[-1])
    histories.post("100", [event(3, last + 10)])
    histories.post("100", [event(4, last + 5), event(5, 0)])
    after = histories.get_events("100")
    assert after.item.tolist() == [
        int(before.item[0]),
        5,
        *before.item[1:].tolist(),
        4,
        3,
    ]  # events of one moment in order of arrival
    assert all(len(values) == len(after) for values in after.columns.values())
    assert histories.get_events("101").item.tolist() == before_of(served, 1)
    assert not len(histories.get_events("nobody"))
    histories.close()


def before_of(served, row):
    seq = served.ring.corpus().seq
    return seq.item[seq.offsets[row] : seq.offsets[row + 1]].tolist()


def test_what_was_posted_is_there_after_a_restart_and_half_a_line_is_not(served, tmp_path):
    journal = tmp_path / "events.jsonl"
    histories = UserHistories(served.ring.corpus(), journal)
    histories.post("new", [event(1, 1), event(2, 2)], "first")
    histories.close()
    with journal.open("ab") as file:
        file.write(b'{"user": "new", "id": null, "ev')
    again = UserHistories(served.ring.corpus(), journal)
    assert again.get_events("new").item.tolist() == [1, 2]
    assert not again.post("new", [event(1, 1), event(2, 2)], "first")
    assert again.post("new", [event(3, 3)], "second")
    again.close()
    assert UserHistories(served.ring.corpus(), journal).get_events("new").item.tolist() == [1, 2, 3]


def test_a_post_that_was_sent_to_two_servers_is_read_once(served, tmp_path):
    journal = tmp_path / "events.jsonl"
    first, second = (UserHistories(served.ring.corpus(), journal) for _ in range(2))
    for server in (first, second):  # the answer of the first one was lost
        server.post("new", [event(1, 1)], "twice")
        server.post("new", [event(2, 2)])  # without an id, each post counts
    again = UserHistories(served.ring.corpus(), journal)
    assert again.get_events("new").item.tolist() == [1, 2, 2]
    assert not again.post("new", [event(1, 1)], "twice")


def test_different_posts_of_one_id_on_two_servers_are_both_read(served, tmp_path):
    journal = tmp_path / "events.jsonl"
    first, second = (UserHistories(served.ring.corpus(), journal) for _ in range(2))
    assert first.post("a", [event(1, 1)], "same")
    assert second.post("b", [event(2, 2)], "same")
    again = UserHistories(served.ring.corpus(), journal)
    assert [again.get_events(user).item.tolist() for user in "ab"] == [[1], [2]]


def test_a_post_is_recognized_by_what_was_sent_whatever_is_known_when_it_is_sent_again(
    served, tmp_path, monkeypatch
):
    corpus, journal = served.ring.corpus(), tmp_path / "events.jsonl"
    histories = UserHistories(corpus, journal)
    reader = EventReader(corpus, histories)
    post = [{"item": 1001}, {"item": 99_999, "event": None}]
    assert reader.post("7", post, "a") == (1, [99_999], True)
    monkeypatch.setattr(EventReader, "find_items", lambda self, ids: (np.arange(len(ids)), []))
    monkeypatch.setattr(events_module, "get_present", lambda: 1_900_000_000)
    assert reader.post("7", post, "a") == (2, [], False)
    again = UserHistories(corpus, journal)
    assert EventReader(corpus, again).post("7", post, "a")[2] is False
    assert len(again.get_events("7")) == 1
    for other in (post[:1], [{"item": 1001, "time": 5}, post[1]], [*post, post[0]]):
        with pytest.raises(Refused, match="'a' and other events"):
            reader.post("7", other, "a")


def test_lines_of_an_older_version_are_read_and_their_posts_are_recognized(served, tmp_path):
    journal = tmp_path / "events.jsonl"
    line = {"user": "new", "id": "old", "events": [event(1, 1)]}
    journal.write_text(f"{json.dumps(line)}\n" * 2)
    histories = UserHistories(served.ring.corpus(), journal)
    assert histories.get_events("new").item.tolist() == [1]
    sent = [{"item": 1001}]
    assert not histories.post("new", [event(1, 9)], "old", sent), "the same events, sent again"
    with pytest.raises(Refused, match="'old' and other events"):
        histories.post("new", [event(2, 9)], "old", sent)


def test_an_event_of_the_far_future_is_refused_and_one_of_tomorrow_is_not(served, tmp_path, monkeypatch):
    monkeypatch.setattr(events_module, "get_present", lambda: 1_764_000_000)
    corpus = served.ring.corpus()
    reader = EventReader(corpus, UserHistories(corpus, tmp_path / "events.jsonl"))
    with pytest.raises(
        Refused, match=r"the time 3976000000 in unix seconds, .*unit of the run's log \(s\)"
    ) as refused:
        reader.post("7", [{"item": 1001}, {"item": 1001, "time": 3_976_000_000}], None)
    assert refused.value.kind == "bad_time"
    assert reader.post("7", [{"item": 1001, "time": 1_764_000_000 + 86_400}], None)[2]
    assert len(reader.histories.get_events("7")) == 1


def test_an_id_of_another_post_is_refused_also_after_a_restart(served, tmp_path):
    journal = tmp_path / "events.jsonl"
    histories = UserHistories(served.ring.corpus(), journal)
    for _ in range(2):
        histories.post("new", [event(1, 1)], "same")
        assert not histories.post("new", [event(1, 1)], "same")
        for user, events in (
            ("other", [event(1, 1)]),
            ("new", [event(2, 1)]),
            ("new", [event(1, 7)]),
            ("new", [event(1, 1)] * 2),
        ):
            with pytest.raises(Refused, match="'same' and other events") as refused:
                histories.post(user, events, "same")
            assert refused.value.kind == "id_conflict"
        histories.close()
        histories = UserHistories(served.ring.corpus(), journal)
    assert histories.get_events("new").item.tolist() == [1]


def test_a_post_whose_events_are_quarantined_keeps_its_id(served, tmp_path):
    journal = tmp_path / "events.jsonl"
    lines = [
        {"user": "new", "id": "bad", "events": [event(1, 1) | {"event": kind}]} for kind in ([], {}, 1, "x")
    ]
    journal.write_text("".join(json.dumps(line | {"id": f"bad {n}"}) + "\n" for n, line in enumerate(lines)))
    histories = UserHistories(served.ring.corpus(), journal)
    assert histories.quarantined == 4
    assert not histories.post("new", lines[0]["events"], "bad 0")


def test_the_oldest_ids_are_forgotten_first(served, tmp_path, monkeypatch):
    monkeypatch.setattr(histories_module, "_MAX_POST_IDS", 2)
    histories = UserHistories(served.ring.corpus(), tmp_path / "events.jsonl")
    for name in ("first", "second", "third"):
        histories.post("new", [event(1, 1)], name)
    assert list(histories._post_ids) == ["second", "third"]


def test_a_question_about_the_past_reads_events_that_memory_no_longer_needs(served, tmp_path):
    corpus = served.ring.corpus()
    histories = UserHistories(corpus, tmp_path / "events.jsonl", window=4)
    begin = int(corpus.seq.time.max()) + 1
    for number in range(50):
        histories.post("9000", [event(number % 40, begin + number)])
    reader = EventReader(corpus, histories)
    now, _, _, _, _ = reader.read_events("9000", None)
    assert (len(now), now.start) == (20, 30)
    for count in (0, 5, 29, 30, 31, 50):
        past, seen, _, is_cold, _ = reader.read_events("9000", None, begin + count)
        assert past.item.tolist() == [number % 40 for number in range(count)]
        assert (past.start, is_cold) == (0, not count)
        assert seen.tolist() == sorted(set(past.item.tolist())), "items of later events are not seen yet"


def test_a_server_knows_the_ids_of_the_newest_posts(served, tmp_path, monkeypatch):
    monkeypatch.setattr(histories_module, "_MAX_POST_IDS", 2)
    histories = UserHistories(served.ring.corpus(), tmp_path / "events.jsonl")
    assert all(histories.post("new", [event(1, 1)], name) for name in "abc")
    assert [histories.post("new", [event(1, 1)], name) for name in "bca"] == [False, False, True]


@pytest.mark.parametrize(("unit", "factor"), [("s", 1), ("ms", 1000), ("ns", 10**9)])
def test_times_of_posts_and_requests_are_in_the_unit_of_the_log_or_iso_text(served, tmp_path, unit, factor):
    corpus = served.ring.corpus()
    histories = UserHistories(corpus, tmp_path / "events.jsonl")
    kinds = IdKind.from_ids(corpus.seq.user_id), IdKind.from_ids(corpus.item_id)
    reader = EventReader(corpus, histories, Vocabulary(*kinds, time_unit=unit))
    moment = 1_764_000_000  # 2025-11-24T16:00:00Z
    events = [{"item": 1001, "time": moment * factor}, {"item": 1002, "time": "2025-11-24T16:00:01Z"}]
    assert reader.post(7, events, None) == (2, [], True)
    assert histories.get_events("7").time.tolist() == [moment, moment + 1]
    assert reader.read_events(7, None, (moment + 1) * factor)[0].time.tolist() == [moment]
    assert reader.read_events(None, events, "2025-11-24T16:00:01Z")[0].time.tolist() == [moment]


def test_events_of_a_store_are_read_by_key_and_appended_ones_are_in_the_next_answer(served, tmp_path):
    corpus = served.ring.corpus()
    folders = {"sequences": "sequences-1", "sids": "sids-2"}
    stored = StoredSequences(use=f"lmdb:{tmp_path / 's'}")
    stored.write(corpus.seq, folders)
    events = stored.open_events(folders, corpus.seq)
    histories, plain = UserHistories(corpus, None, stored=events), UserHistories(corpus, None)
    before = plain.get_events("100")
    assert histories.get_events("100").item.tolist() == before.item.tolist()
    new = {"item": np.array([3]), "time": before.time[:1] - 1, "event": np.array([0])}
    new |= {f"column:{name}": values[:1] for name, values in corpus.seq.columns.items()}
    events.append(["100"], new)
    assert histories.get_events("100").item.tolist() == [3, *before.item.tolist()]
    assert not len(histories.get_events("nobody"))
    for user in (str(2**70), str(-(2**63) - 1), "é" * 512, "", "1.5", "\0"):
        assert not len(histories.get_events(user)), "no key of the store, and nobody it knows"
        assert isinstance(histories.get_key(user), int)


def test_events_are_appended_to_the_store_that_serving_reads_them_from(served, tmp_path):
    opened, address = served.open(), f"lmdb:{tmp_path / 's'}"
    before = len(
        UserHistories(opened.corpus, None, stored=opened.open_events(address)).get_events("100").item
    )
    table = pa.table({"user_id": ["100"], "item_id": [1001], "timestamp": [9_000_000_000], "event": ["view"]})
    pq.write_table(table, tmp_path / "new.parquet")
    with pytest.raises(ConfigError, match="or --store"):
        append_events(str(served.folder.path), str(tmp_path / "new.parquet"))
    done = append_events(str(served.folder.path), str(tmp_path / "new.parquet"), address)
    assert (done["events"], done["unknown_items"]) == (1, 0)
    after = UserHistories(opened.corpus, None, stored=opened.open_events(address)).get_events("100")
    assert len(after.item) == before + 1


def test_a_user_s_key_is_that_of_its_id_whoever_it_is(served, tmp_path):
    histories = UserHistories(served.ring.corpus(), tmp_path / "events.jsonl")
    seq = served.ring.corpus().seq
    assert histories.get_key("100") == int(seq.user_key[0])
    assert histories.get_key("999") not in set(seq.user_key.tolist())
    assert histories.get_key("999") == histories.get_key("999") != histories.get_key("998")
    assert "100" in histories
    assert "999" not in histories


def test_a_kill_loses_no_event_that_was_acknowledged(served, tmp_path):
    journal = tmp_path / "events.jsonl"
    command = [sys.executable, "-c", KILLED, str(journal), json.dumps(served.ring.folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        acknowledged = [process.stdout.readline() for _ in range(60)]
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += process.stdout.readlines()
    last = int([line for line in acknowledged if line.endswith(b"\n")][-1])
    there = UserHistories(served.ring.corpus(), journal).get_events("killed").time.tolist()
    assert there[: last + 1] == list(range(last + 1))

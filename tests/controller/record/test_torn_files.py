"""Files that a run appends to, after the process was killed within their last line: nothing later is lost or damaged."""

from __future__ import annotations

import json
import logging

import pytest
from losing_disk import MODES, LosingDisk

from nonet.controller.record.commands import CommandQueue
from nonet.controller.record.journal import Journal, read_journal
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.record.trace import open_trace
from nonet.controller.record.tracking import Recorder


def take(run: RunFolder, text: str) -> str:
    """Send a command to a run, whose loop takes it, and return its id."""
    queue = CommandQueue(run)
    command_id = queue.ask(verb="set", name="hit.weight")
    (command,) = [each for each in queue.list_waiting() if each["id"] == command_id]
    queue.take(command, "rl", 5, text)
    return command_id


def list_texts(run: RunFolder) -> list[str]:
    return [command["text"] for command in CommandQueue(run).list_taken()]


def test_commands_after_a_torn_line_are_taken_again_by_a_resume_wherever_it_is_torn(tmp_path):
    take(RunFolder(tmp_path / "whole"), "first")
    file = tmp_path / "whole" / "commands.jsonl"
    line = file.read_bytes()
    for size in range(1, len(line)):
        run = RunFolder(tmp_path / str(size))
        run.path.mkdir()
        (run.path / "commands.jsonl").write_bytes(line + line[:size])
        ids = [take(run, text) for text in ("second", "third")]
        assert all(CommandQueue(run).read_answer(command_id) for command_id in ids)
        assert list_texts(run) == ["first", "second", "third"]


def test_commands_that_an_earlier_version_appended_behind_a_torn_line_are_read(tmp_path, caplog):
    run = RunFolder(tmp_path)
    for text in ("first", "second", "third", "fourth"):
        take(run, text)
    file = tmp_path / "commands.jsonl"
    first, second, third, fourth = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b'{"crc":123,"r":{"id":"17' + second + third.replace(b"third", b"3rd") + fourth)
    with caplog.at_level(logging.WARNING):
        assert list_texts(run) == ["first", "second", "fourth"]
    assert "commands.jsonl:3" in caplog.text
    assert "is damaged and was skipped" in caplog.text
    take(run, "fifth")
    assert list_texts(run) == ["first", "second", "fourth", "fifth"]


@pytest.mark.parametrize("mode", MODES)
def test_a_command_that_was_answered_is_on_a_disk_that_loses_what_was_not_synced(tmp_path, monkeypatch, mode):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    disk = LosingDisk(run.path, monkeypatch)
    reply, texts = CommandQueue.reply, []

    def lose_power_and_reply(queue: CommandQueue, *answer: str) -> None:
        left = disk.left(mode, tmp_path / f"left{len(texts)}")
        texts.append(list_texts(RunFolder(left)))
        reply(queue, *answer)

    monkeypatch.setattr(CommandQueue, "reply", lose_power_and_reply)
    for text in ("first", "second"):
        take(run, text)
    assert texts == [["first"], ["first", "second"]]
    disk.close()


def test_what_follows_a_damaged_line_of_a_run_s_journal_is_removed_before_it_goes_on(tmp_path, caplog):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step in range(4):
        journal.write(applied=step)
    journal.close()
    path.write_bytes(path.read_bytes().replace(b'"applied":2', b'"applied":7') + b'{"crc":1')
    with caplog.at_level(logging.WARNING):
        journal = Journal(path)
    assert "removed 2 lines from a damaged one on" in caplog.text
    assert journal.records == 2
    journal.write(applied="again")
    assert [record["applied"] for record in read_journal(path)] == [0, 1, "again"]
    assert journal.records == 3


def test_metrics_and_events_after_a_torn_line_are_whole_wherever_it_is_torn(tmp_path):
    names = ("metrics.jsonl", "events.jsonl")
    recorder = Recorder(tmp_path, "run", {})
    recorder.begin("train", 2, 0)
    recorder.record_metrics("train", 1, {"loss": 0.5, "lr": 0.1})
    recorder.close()
    whole = {name: (tmp_path / name).read_bytes() for name in names}
    for size in (1, 40, len(whole["metrics.jsonl"].splitlines()[0])):
        for name in names:
            (tmp_path / name).write_bytes(whole[name] + whole[name][: min(size, whole[name].index(b"\n"))])
        recorder = Recorder(tmp_path, "run", {})
        recorder.record_metrics("train", 2, {"loss": 0.4})
        recorder.add_event("note", text="goes on")
        recorder.close()
        for name, count in zip(names, (3, 4), strict=True):
            lines = (tmp_path / name).read_bytes().splitlines()
            assert [json.loads(line)["run"] for line in lines] == ["run"] * count
            assert (tmp_path / name).read_bytes().startswith(whole[name])


def test_a_trace_is_valid_json_after_it_was_cut_anywhere_and_goes_on(tmp_path):
    path = tmp_path / "trace.json"
    trace = open_trace(path)
    trace.add("trainer 0", "update", 1.0, 2.0, shape=[1, 2])
    trace.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        trace = open_trace(path)
        trace.add("trainer 0", "again", 2.0, 3.0)
        trace.close()
        names = [event["name"] for event in json.loads(path.read_bytes())]
        assert names[-2:] == ["again", "end"]
    assert names[:4] == ["process_name", "thread_name", "update", "end"]


def test_a_trace_that_an_earlier_version_closed_is_continued(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('[\n{"name": "a", "args": [1]},\n{"name": "end"}\n]\n')
    open_trace(path).close()
    assert [event["name"] for event in json.loads(path.read_text())] == ["a", "end", "process_name", "end"]


def test_events_of_a_trace_are_written_before_they_need_much_memory(tmp_path):
    path = tmp_path / "trace.json"
    trace = open_trace(path)
    for step in range(1000):
        trace.add("trainer 0", f"step {step}", step, step + 1)
    assert path.read_bytes().count(b"\n") > 800
    trace.close()
    assert len(json.loads(path.read_bytes())) == 1003

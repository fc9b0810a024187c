"""What a board compares: data sets by a protocol that their events suggest, and scenarios as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from nonet import yaml
from nonet.controller.scenario.scenario import load_scenario
from nonet.deploy.after.board.entries import PROTOCOLS, parse_entries
from nonet.deploy.after.board.results import find_published
from nonet.errors import ConfigError


def write_sequences(folder: Path) -> Path:
    """Write sequences without times."""
    folder.mkdir()
    lines = [" ".join(map(str, [user, *(1 + (user + k) % 9 for k in range(6))])) for user in range(1, 12)]
    (folder / "sequences.txt").write_text("\n".join(lines) + "\n")
    return folder


def read_document(folder: Path, name: str) -> dict:
    return yaml.parse((folder / f"{name}.yaml").read_text())


def test_data_in_which_users_return_to_items_are_sessions_and_others_test_the_last_event(tmp_path, write_log):
    shop, films = write_log(tmp_path / "shop.csv", repeats=True), write_log(tmp_path / "films.csv")
    entries, _ = parse_entries([f"{shop},movies={films}"], [], tmp_path / "board", [])
    assert [entry.key for entry in entries] == ["shop-sessions", "movies-last"]
    for entry in entries:
        scenario = load_scenario(entry.get_scenario(tmp_path / "board"), [])[0]
        assert scenario.evaluate.users == "all"
        assert "mrr@20" in scenario.evaluate.metrics
        assert scenario.data.repeats == {"sessions": "allow", "last": "mask"}[entry.protocol]
        assert [baseline["use"] for baseline in entry.baselines] == [
            baseline.use for baseline in scenario.evaluate.baselines
        ]
        text = (tmp_path / "board" / f"{entry.key}.yaml").read_text()
        assert PROTOCOLS[entry.protocol] in text.splitlines()[0]


def test_the_protocol_of_times_tests_the_newest_tenth(tmp_path, write_log):
    log = write_log(tmp_path / "films.csv")
    parse_entries([str(log)], ["time"], tmp_path / "board", [])
    split = read_document(tmp_path / "board", "films-time")["data"]["split"]
    assert split == {"use": "time", "test": "2020-09-13T13:52:40+00:00", "valid": 600}  # of 96 events


def test_data_without_times_are_refused_for_the_protocol_of_times(tmp_path):
    sequences = write_sequences(tmp_path / "books")
    with pytest.raises(ConfigError, match="--protocol time: books has no times"):
        parse_entries([str(sequences)], ["time"], tmp_path / "board", [])
    assert not list((tmp_path / "board").glob("*.yaml"))


def test_a_board_keeps_its_entries_and_takes_new_ones(tmp_path, write_log):
    log, board = write_log(tmp_path / "films.csv"), tmp_path / "board"
    known, _ = parse_entries([str(log)], [], board, [])
    (board / "films-last.yaml").write_text("edited")
    entries, _ = parse_entries([str(log), "quickstart"], [], board, known)
    assert [entry.key for entry in entries] == ["films-last", "quickstart"]
    assert (board / "films-last.yaml").read_text() == "edited"
    assert read_document(board, "quickstart")["extends"] == "quickstart"
    assert parse_entries([str(log)], ["last"], board, entries)[0] == entries
    assert (board / "films-last.yaml").read_text() == "edited"


def test_another_protocol_of_a_set_reads_the_tables_that_its_runs_have_read(tmp_path, write_log):
    log, board = write_log(tmp_path / "films.csv"), tmp_path / "board"
    known, _ = parse_entries([str(log)], [], board, [])
    table = (board / "films-data" / "interactions.parquet").read_bytes()
    write_log(log, users=20)
    entries, _ = parse_entries([str(log)], ["last", "time"], board, known)
    assert [entry.key for entry in entries] == ["films-last", "films-time"]
    assert (board / "films-data" / "interactions.parquet").read_bytes() == table
    assert read_document(board, "films-time")["data"]["interactions"] == "films-data/interactions.parquet"


def test_the_protocol_of_times_is_refused_where_equal_times_would_test_most_events(tmp_path):
    lines = [
        f"{user},{event},{1_600_000_000 + min(event, 2) * 86400}" for user in range(12) for event in range(8)
    ]
    (tmp_path / "days.csv").write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n")
    with pytest.raises(ConfigError, match="--protocol time: 75% of the events of days are at or after"):
        parse_entries([str(tmp_path / "days.csv")], ["time"], tmp_path / "board", [])


def test_two_entries_never_have_the_same_files(tmp_path, write_log):
    log, board = write_log(tmp_path / "films.csv"), tmp_path / "board"
    known, _ = parse_entries([str(log)], [], board, [])
    with pytest.raises(
        ConfigError, match="films-last is the protocol last of films in this board; write OTHER="
    ):
        parse_entries(["films-last=quickstart"], [], board, known)
    with pytest.raises(ConfigError, match="another end than -data"):
        parse_entries(["films-data=quickstart"], [], board, known)


def test_every_board_shuffles_ties_and_a_scenario_runs_from_its_own_file(tmp_path, write_log):
    log = write_log(tmp_path / "shop.csv", repeats=True)
    (own := tmp_path / "own.yaml").write_text("extends: quickstart\n")
    entries, _ = parse_entries([str(log), str(own)], ["sessions", "time"], tmp_path / "board", [])
    for entry in entries:
        assert load_scenario(entry.get_scenario(tmp_path / "board"), [])[0].evaluate.shuffle_ties
        assert load_scenario(*entry.get_recipe(tmp_path / "board"))[0].evaluate.shuffle_ties
    assert entries[-1].get_recipe(tmp_path / "board")[0] == str(own)


def test_wrong_names_are_one_line_and_say_what_to_write(tmp_path, write_log):
    log, board = write_log(tmp_path / "films.csv"), tmp_path / "board"
    other = write_log(tmp_path / "other.csv")
    known, _ = parse_entries([str(log)], [], board, [])
    with pytest.raises(ConfigError, match=r"films is the name of .*films.csv in this board; write OTHER="):
        parse_entries([f"films={other}"], [], board, known)
    with pytest.raises(ConfigError, match=r"--protocol lsat: no such protocol.*Did you mean .last"):
        parse_entries([str(log)], ["lsat"], board, [])
    log.write_text("reader,book,when_read\n1,2,3\n")
    with pytest.raises(
        ConfigError, match=r"A board takes no --column.*nonet new FILE.yaml --data .*films.csv"
    ):
        parse_entries([f"books={log}"], [], board, [])
    with pytest.raises(ConfigError, match="no such file or folder"):
        parse_entries(["nowhere"], [], board, [])
    with pytest.raises(ConfigError, match="write NAME=PATH with letters"):
        parse_entries([f"a/b={other}"], [], board, [])


def test_published_results_stand_beside_data_of_the_same_size_and_protocol_alone():
    beauty = {"users": 22363, "items": 12101, "events": 198502}
    same, others = find_published(beauty, "last")
    assert {row["name"] for row in same} > {"eSASRec", "FADE-0.6B (draft)"}
    assert [row["name"] for row in others] == ["OpenOneRec"]
    assert {row["text"] for row in same} == {True, False}
    assert find_published(beauty, "time")[0] == []
    assert find_published({**beauty, "events": 198503}, "last") == ([], [])

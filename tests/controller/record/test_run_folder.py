from __future__ import annotations

import hashlib
from unittest.mock import ANY

import pytest

from nonet import yaml
from nonet.controller.record.run_folder import create_run, lock_run
from nonet.controller.record.run_names import find_run, list_runs, name_run
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.session.session import Session
from nonet.controller.setup.run_files import write_run
from nonet.errors import ConfigError


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("NONET_RUNS", str(tmp_path))
    for name in ("aa-1", "ab-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scenario.yaml").write_text("name: x")


def test_a_run_is_found_by_prefix_last_and_folder(two_runs, tmp_path):
    assert find_run("aa").id == "aa-1"
    assert find_run("last").id == list_runs()[-1].id
    assert find_run(tmp_path / "ab-2").id == "ab-2"


def test_unknown_and_ambiguous_runs_list_what_there_is(two_runs):
    with pytest.raises(ConfigError, match=r"there is no run 'zz' .* the newest runs: aa-1, ab-2"):
        find_run("zz")
    with pytest.raises(ConfigError, match="2 runs start with 'a'"):
        find_run("a")


def test_ids_carry_name_time_and_chance(two_runs):
    import re

    assert re.fullmatch(r"quickstart-\d{8}-\d{6}-[0-9a-f]{4}", create_run("quickstart").id)


def test_a_new_run_takes_no_folder_that_holds_something(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    (tmp_path / "file").touch()
    for name, said in (("photos", "is not empty and holds no run"), ("file", "is a file")):
        with pytest.raises(ConfigError, match=said):
            create_run("x", tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert create_run("x", tmp_path / "empty").id == "empty"


def test_a_run_that_has_commits_or_is_finished_is_not_begun_again(tmp_path):
    run = tmp_path / "aa-1"
    run.mkdir()
    (run / "scenario.yaml").write_text("name: x")
    assert create_run("x", run).id == "aa-1", "it never got to a commit"
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a run with checkpoints; continue it with `nonet resume"):
        create_run("x", run)
    (run / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a finished run"):
        create_run("x", run)


def test_a_folder_is_held_by_one_run_at_a_time(tmp_path):
    run = create_run("x", tmp_path / "aa-1")
    held = lock_run(run)
    with pytest.raises(ConfigError, match="is being run by another process"):
        lock_run(run)
    with pytest.raises(ConfigError, match="is being run by another process"), Session("quickstart", run=run):
        pass
    assert not run.scenario.exists(), "a loop of one's own waits for its turn too"
    held.close()
    lock_run(create_run("x", tmp_path / "aa-1")).close()


def test_a_run_without_a_commit_begins_with_an_empty_journal(tmp_path):
    run = create_run("x", tmp_path / "aa-1")
    run.path.mkdir()
    for path in (run.journal, run.metrics):
        path.write_text("{}")
    run.clear_records()
    assert not run.journal.exists()
    assert not run.metrics.exists()


def test_a_folder_that_another_scenario_began_is_refused(tmp_path):
    run = create_run("x", tmp_path / "aa-1")
    scenario, folder = load_scenario("quickstart")
    write_run(scenario, folder, run)
    assert write_run(scenario, folder, run)
    with pytest.raises(ConfigError, match="is a run of another scenario"):
        write_run(load_scenario("quickstart", ["seed=8"])[0], folder, run)


def test_a_run_goes_on_with_other_deadlines_and_its_document_stays(tmp_path):
    run = create_run("x", tmp_path / "aa-1")
    before = write_run(*load_scenario("quickstart"), run)
    longer, folder = load_scenario("quickstart", ["deadlines.step=10min"])
    assert write_run(longer, folder, run) == before
    assert load_scenario(run.scenario)[0].deadlines.step == 120.0
    with pytest.raises(ConfigError, match="another scenario"):
        write_run(load_scenario("quickstart", ["seed=8"])[0], folder, run)


def test_a_run_of_a_version_with_fewer_keys_is_gone_on_with(tmp_path):
    run = create_run("x", tmp_path / "aa-1")
    scenario, folder = load_scenario("quickstart")
    write_run(scenario, folder, run)
    old = {
        key: part for key, part in yaml.read(run.scenario).items() if key not in ("deadlines", "checkpoint")
    }
    run.scenario.write_text(yaml.dump(old))
    assert write_run(scenario, folder, run) == hashlib.sha256(run.scenario.read_bytes()).hexdigest()


def test_a_run_in_a_folder_of_several_is_named_by_both_and_is_not_the_last(two_runs, tmp_path):
    for name in ("many/seed-7", "many/seed-8", "search/trials/0/search-0-1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "scenario.yaml").write_text("name: x")
    assert find_run("many/seed-7").path == tmp_path / "many" / "seed-7"
    assert find_run("last").id == "ab-2"
    with pytest.raises(
        ConfigError, match="many is a folder of several runs; name one of them: many/seed-7, many/seed-8"
    ):
        find_run("many")
    with pytest.raises(ConfigError, match=r"2 runs start with 'many/s'"):
        find_run("many/s")
    assert name_run(find_run("search/t")) == "search/trials/0/search-0-1"


def test_a_copy_of_a_run_has_the_same_owner_and_a_later_run_of_the_same_data_has_another(tmp_path):
    def begin(name, first_metric):
        run = create_run(name, tmp_path / name)
        run.write_json("results/tokenise.json", {"artifacts": {"sids": {"path": "x", "sha256": "5c52"}}})
        run.metrics.write_bytes(first_metric)
        return run

    assert create_run("new", tmp_path / "new").describe_owner() is None
    first = begin("first", b'{"t": 1}\n{"t": 2}\n').describe_owner()
    assert first is not None
    copied = begin("copy", b'{"t": 1}\n').describe_owner()
    assert copied == {**first, "run": "copy"}
    later = begin("later", b'{"t": 3}\n').describe_owner()
    assert later == {**first, "run": "later", "start": ANY}
    assert later["start"] != first["start"]
    early = begin("early", b'{"t": ').describe_owner()
    assert early == {**first, "run": "early", "start": ""}, "the first metric is not complete yet"

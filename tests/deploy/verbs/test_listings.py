"""`nonet runs` and `nonet versions` are tables with headers; a folder of several runs is listed, reported and continued."""

from __future__ import annotations

import json
import os
import time

import pytest

from nonet.controller.record import RunFolder, lock_run
from nonet.deploy.after import seeds
from nonet.deploy.verbs import questions, running
from nonet.deploy.verbs.listing import describe_runs, format_runs, format_versions
from nonet.errors import ConfigError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A root of runs with a decoder, a click model, two seeds and a trial, in this order."""
    monkeypatch.setenv("NONET_RUNS", str(tmp_path))
    places = ("ring-1", "clicks-2", "many/seed-7", "many/seed-8", "search/trials/0/search-0-1")
    for age, place in enumerate(places):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "scenario.yaml").write_text("name: x")
        os.utime(folder / "scenario.yaml", (1_700_000_000 + age, 1_700_000_000 + age))
    for place, metrics in (("ring-1", {"recall@5": 0.25}), ("clicks-2", {"auc": 0.75, "logloss": 0.5})):
        report = {"stages": {"pretrain": metrics}, "wall_s": {"total": 21.4}}
        (tmp_path / place / "report.json").write_text(json.dumps(report))
    (tmp_path / "many" / "seed-7" / "checkpoints" / "step-000003").mkdir(parents=True)
    return tmp_path


def test_metrics_of_different_kinds_of_runs_stand_in_columns_of_their_own(runs):
    rows = [line.split() for line in format_runs(describe_runs()).splitlines()]
    assert rows[0] == ["run", "state", "started", "seconds", "stage", "recall@5", "auc", "logloss"]
    assert rows[1][-5:] == ["21", "pretrain", "0.2500", "-", "-"]
    assert rows[2][-5:] == ["21", "pretrain", "-", "0.7500", "0.5000"]


def test_runs_of_seeds_and_of_a_search_are_listed_by_names_that_commands_take(runs):
    found = describe_runs()
    assert [row["run"] for row in found][2:] == ["many/seed-7", "many/seed-8", "search/trials/0/search-0-1"]
    assert found[2]["state"] == "resumable at step-000003"
    assert {"run", "state", "recall@5"} <= set(found[0]), "these keys were there before"
    with lock_run(RunFolder(runs / "many" / "seed-7")):
        assert describe_runs()[2]["state"] == "running"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["report.json", "status.json"])
@pytest.mark.parametrize("content", [None, "[" * 200_000, "[1]", '{"stages": {"rl": 3}, "steps": 4}'])
def test_a_run_with_a_damaged_file_is_listed_as_such_and_hides_no_other(runs, name, content):
    folder = runs / "many" / "seed-8"
    os.mkfifo(folder / name) if content is None else (folder / name).write_text(content)
    rows = {row["run"]: row for row in describe_runs()}
    assert [run for run, row in rows.items() if row["state"] == "damaged"] == ["many/seed-8"]
    assert len(rows) == 5
    assert format_runs(list(rows.values()))


def test_a_torn_version_has_a_row_of_its_own():
    row = {"version": 1, "state": "served", "bytes": 2408759, "rows": 700}
    lines = format_versions([row, {"version": 2, "state": "torn", "problem": "no manifest"}]).splitlines()
    assert lines[0].split() == ["version", "state", "bytes", "rows", "problem"]
    assert lines[1].split() == ["1", "served", "2,408,759", "700", "-"]
    assert lines[2].split() == ["2", "torn", "-", "-", "no", "manifest"]


def test_a_folder_of_seeds_that_is_not_finished_is_named_with_the_next_step(runs):
    with pytest.raises(
        ConfigError, match=r"0 of its 2 runs are finished. Continue with: nonet resume .*many"
    ):
        questions.report("many")
    with pytest.raises(ConfigError, match="repeat the command that started them with --run-dir"):
        running.resume("search")


def test_a_finished_folder_of_seeds_is_reported_and_not_resumed(runs, capsys):
    pooled = {
        "seeds": [7, 8],
        "events": 5,
        "subjects": {"pretrain": {"recall@5": {"mean": 0.5, "sd": 0.1}}},
        "paired": {},
    }
    (runs / "many" / "seeds.json").write_text(json.dumps(pooled))
    questions.report("many")
    assert "2 seeds (7, 8), 5 test events each" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="many is finished: see"):
        running.resume("many")


def test_seeds_are_continued_with_their_scenario_and_changes_but_without_stored_secrets(
    tmp_path, monkeypatch
):
    (tmp_path / "mine.yaml").write_text("name: x")
    changes = ["model.width=8", "pools.cpu.env.vars.TOKEN=secret"]
    seeds._write_start(tmp_path / "many", str(tmp_path / "mine.yaml"), [7, 8], changes, "nonet run")
    assert "secret" not in (tmp_path / "many" / "start.json").read_text()
    called = []
    monkeypatch.setattr(seeds, "run_seeds", lambda *given: called.append(given) or (given[3], {}))
    seeds.resume_seeds(tmp_path / "many", changes[1:])
    assert called == [(str(tmp_path / "mine.yaml"), [7, 8], changes, tmp_path / "many", "nonet run")]


def test_runs_in_object_storage_are_listed_by_their_address(command, tmp_path, monkeypatch):
    from nonet.controller.record.run_folder import create_run
    from nonet.storage import change_run, mounts
    from nonet.storage.objects import read_clock
    from tests.s3 import BUCKET, serve_s3

    monkeypatch.setenv("NONET_CACHE", str(tmp_path / "writer"))
    with serve_s3():
        for index, run_id in enumerate(("z-done", "a-killed", "b-running")):
            run = create_run("ring", storage_address=f"{BUCKET}/listed", run_id=run_id)
            with change_run(run.path):
                run.scenario.write_text("name: ring\n")
                at = 1.0 if run_id == "b-running" else time.time()  # the clocks of machines decide nothing
                run.write_json(run.status.name, {"state": "running", "started": 1000.0 + index, "at": at})
                checkpoint = run.checkpoints / "step-000006"
                checkpoint.mkdir(parents=True)
                (checkpoint / "manifest.json").write_text("{}")
                if run_id == "z-done":
                    report = {"wall_s": {"total": 12.0}, "stages": {"rl": {"recall@10": 0.25}}}
                    run.write_json("report.json", report)
        mounts._copies.clear()
        monkeypatch.setenv("NONET_CACHE", str(tmp_path / "reader"))
        # The storage's clock says that the head of one run is old.
        monkeypatch.setattr(
            mounts, "read_clock", lambda used: read_clock(used) + 1000 * used.address.endswith("a-killed")
        )
        code, out, _ = command("runs", f"{BUCKET}/listed", "--json")
        assert code == 0
        rows = {row["run"]: row for row in json.loads(out)}
        assert list(rows) == ["z-done", "a-killed", "b-running"]
        assert [row["state"] for row in rows.values()] == ["done", "resumable at step-000006", "running"]
        assert (rows["z-done"]["seconds"], rows["z-done"]["recall@10"]) == (12.0, 0.25)
        assert "there is no run at" in command("runs", f"{BUCKET}/empty")[2]
        assert "runs takes the address" in command("runs", "last")[2]


@pytest.mark.parametrize("verb", ["run", "tune", "tradeoff", "chaos"])
def test_an_address_of_object_storage_as_run_dir_is_refused_and_makes_no_folder(
    verb, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    required = {
        "tune": ["--space", "space.yaml"],
        "tradeoff": ["a=1,2"],
        "chaos": ["--kill", "trainer"],
    }
    code, _, err = command(verb, "quickstart", "--run-dir", "s3://bucket/runs", *required.get(verb, []))
    assert code == 2
    assert "it must be a folder; runs are kept in object storage by --set storage=ADDRESS" in err
    assert not list(tmp_path.iterdir())

"""`nonet run --continue`: which run is continued, and what is resumed or refused first."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet import yaml
from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.controller.record.run_folder import RunFolder, lock_run
from nonet.controller.scenario.scenario import load_scenario, to_document
from nonet.deploy.run import api
from nonet.errors import ConfigError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("NONET_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def make_run(runs, number, *, finished=True, checkpoint=True, **changes):
    """Make the folder of a run of the quickstart."""
    run = RunFolder(runs / f"quickstart-{number}")
    run.path.mkdir(parents=True)
    if checkpoint:
        place = {"stage": "pretrain", "stage_step": 10, "last": False, "version": 0}
        manifest = Manifest(run.id, 10, **place, scenario="", artifacts={}, participants={}, journal=0)
        checkpoints = Checkpoints(run.checkpoints)
        checkpoints.complete(checkpoints.create_staging_dir(10), manifest, {})
    run.scenario.write_text(yaml.dump({**to_document(load_scenario("quickstart")[0]), **changes}))
    os.utime(run.scenario, (number, number))
    if finished:
        run.write_json("report.json", {})
    return run


def write_shop(folder, stages="{pretrain: {}}"):
    """Write a scenario whose settings follow from its log; return its path."""
    rows = [(user, item, item) for user in range(8) for item in range(user % 4, 9)]
    users, items, times = zip(*rows, strict=True)
    pq.write_table(pa.table({"user_id": users, "item_id": items, "timestamp": times}), folder / "log.parquet")
    path = folder / "shop.yaml"
    path.write_text(f"name: shop\nsettings: data\ndata: {{interactions: log.parquet}}\nstages: {stages}\n")
    return path


def get_init(scenario_file):
    init = scenario_file.scenario.init
    return init and (init.source, init.train)


def load(*arguments):
    """Return the scenario that continues a run."""
    with api.continue_scenario(*arguments) as scenario_file:
        return scenario_file


def test_the_first_run_trains_on_all_events_and_says_so(runs, capsys):
    assert get_init(load("quickstart", "last")) is None
    assert "no run of quickstart has finished yet: training on all events" in capsys.readouterr().err


def test_the_newest_finished_run_of_the_name_is_continued(runs):
    make_run(runs, 1)
    newest = make_run(runs, 2)
    make_run(runs, 3, name="other")
    assert get_init(load("quickstart", "last")) == (str(newest.path), "new")


def test_a_named_run_is_continued(runs):
    run = make_run(runs, 1)
    make_run(runs, 2)
    changes = ["init.replay=0.5"]
    continued = load("quickstart", run.id, changes)
    assert get_init(continued) == (str(run.path), "new")
    assert continued.scenario.init.replay == 0.5


def test_a_run_that_has_not_finished_is_not_continued_by_name(runs):
    run = make_run(runs, 1, finished=False)
    with pytest.raises(
        ConfigError, match=f"{run.id} has not finished; continue it with: nonet resume {run.id}"
    ):
        load("quickstart", run.id)


def test_a_second_run_at_the_same_time_is_refused(runs):
    make_run(runs, 1)
    run = make_run(runs, 2, finished=False)
    lock = lock_run(run)
    try:
        with pytest.raises(
            ConfigError, match=f"{run.id} is in progress; wait for it, or stop it: nonet stop"
        ):
            load("quickstart", "last")
    finally:
        lock.close()


def test_an_interrupted_run_is_resumed_first_and_then_continued(runs, monkeypatch):
    make_run(runs, 1)
    interrupted = make_run(runs, 2, finished=False)
    resumed = []

    def resume(run, *, panel=None):
        resumed.append(run)
        interrupted.write_json("report.json", {})
        return SimpleNamespace(state="done")

    monkeypatch.setattr(api, "resume", resume)
    assert get_init(load("quickstart", "last")) == (str(interrupted.path), "new")
    assert [Path(run) for run in resumed] == [interrupted.path]


def test_a_run_that_ended_before_its_first_checkpoint_is_passed_over(runs, monkeypatch):
    finished = make_run(runs, 1)
    make_run(runs, 2, finished=False, checkpoint=False)
    monkeypatch.setattr(api, "resume", lambda *_, **__: pytest.fail("there is nothing to resume"))
    assert get_init(load("quickstart", "last")) == (str(finished.path), "new")


def test_what_follows_from_the_data_is_that_of_the_run_before(runs, tmp_path):
    path = write_shop(tmp_path)
    first, _ = load_scenario(path)
    document = to_document(first)
    document["model"]["width"] = 4 * document["model"]["width"]
    run = make_run(runs, 1)
    run.scenario.write_text(yaml.dump(document))
    continued = load(path, "last").scenario
    assert continued.settings.keys() == first.settings.keys()
    changed = {"model.width"} & set(first.settings)
    assert changed
    assert to_document(continued)["model"]["width"] == document["model"]["width"]


@pytest.mark.parametrize("other", [("--resume",), ("--seeds", "1,2")])
def test_it_starts_one_new_run(runs, command, other):
    code, out, err = command("run", "quickstart", "--continue", "last", *other)
    assert (code, out, err) == (2, "", "nonet: --continue starts one new run; omit --resume and --seeds\n")


def test_a_resumed_run_that_is_stopped_starts_no_other(runs, monkeypatch):
    make_run(runs, 1)
    make_run(runs, 2, finished=False)
    monkeypatch.setattr(api, "resume", lambda *_, **__: SimpleNamespace(state="stopped"))
    with pytest.raises(KeyboardInterrupt):
        load("quickstart", "last")


def test_a_run_in_progress_is_found_behind_one_that_crashed(runs):
    make_run(runs, 1)
    working = make_run(runs, 2, finished=False)
    make_run(runs, 3, finished=False, checkpoint=False)
    with lock_run(working), pytest.raises(ConfigError, match=f"{working.id} is in progress"):
        load("quickstart", "last")


def test_two_processes_do_not_continue_one_name(runs):
    make_run(runs, 1)
    message = "another process continues quickstart; wait for its end"
    with api.continue_scenario("quickstart", "last"), pytest.raises(ConfigError, match=message):
        load("quickstart", "last")
    assert get_init(load("quickstart", "last")) is not None


def test_code_of_the_run_before_that_nobody_has_approved_is_not_run(runs, tmp_path):
    path, run = write_shop(tmp_path), make_run(runs, 1)
    (run.path / "evil.py").write_text("raise SystemExit('the code has run')\n")
    document = to_document(load_scenario(path)[0])
    document |= {"settings": {"tokenizer.use": "the data"}, "tokenizer": {"use": f"{run.path}/evil.py:T"}}
    run.scenario.write_text(yaml.dump(document))
    for parent in ("last", run.id):
        with pytest.raises(ConfigError, match="neither started nor approved"):
            load(path, parent)


def test_the_path_of_the_run_before_is_no_yaml(tmp_path, monkeypatch):
    for folder in ("my #runs", "a: b"):
        monkeypatch.setenv("NONET_RUNS", str(tmp_path / folder))
        run = make_run(tmp_path / folder, 1)
        assert get_init(load("quickstart", "last")) == (str(run.path), "new")


def test_settings_of_stages_that_the_scenario_no_longer_has_are_not_taken(runs, tmp_path):
    path, run = write_shop(tmp_path, "{pretrain: {}, finetune: {}}"), make_run(runs, 1)
    run.scenario.write_text(yaml.dump(to_document(load_scenario(path)[0])))
    assert list(load(write_shop(tmp_path), "last").scenario.stages) == ["pretrain"]


def test_what_the_run_before_was_given_by_hand_holds_for_what_would_be_derived(runs, tmp_path):
    path, run = write_shop(tmp_path), make_run(runs, 1)
    changes = ["stages.pretrain.epochs=60", "model.width=48"]
    run.scenario.write_text(yaml.dump(to_document(load_scenario(path, changes)[0])))
    continued = load(path, "last").scenario
    assert continued.stages["pretrain"].epochs == 60
    assert to_document(continued)["model"]["width"] == 48
    assert load(path, "last", ["stages.pretrain.epochs=2"]).scenario.stages["pretrain"].epochs == 2


def test_a_stage_that_the_run_before_did_not_have_gets_settings_of_its_own(runs, tmp_path):
    run = make_run(runs, 1)
    run.scenario.write_text(yaml.dump(to_document(load_scenario(write_shop(tmp_path))[0])))
    assert load(write_shop(tmp_path, "{nightly: {}}"), "last").scenario.stages["nightly"].epochs

"""`nonet run --continue`: which run is continued, and what is resumed or refused first."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet import yaml
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
    (run.checkpoints / "step-000010").mkdir(parents=True) if checkpoint else run.path.mkdir(parents=True)
    run.scenario.write_text(yaml.dump({**to_document(load_scenario("quickstart")[0]), **changes}))
    os.utime(run.scenario, (number, number))
    if finished:
        run.write_json("report.json", {})
    return run


def get_init(scenario_file):
    init = scenario_file.scenario.init
    return init and (init.source, init.train)


def test_the_first_run_trains_on_all_events_and_says_so(runs, capsys):
    assert get_init(api.load_continued_scenario("quickstart", "last")) is None
    assert "no run of quickstart has finished yet: training on all events" in capsys.readouterr().err


def test_the_newest_finished_run_of_the_name_is_continued(runs):
    make_run(runs, 1)
    newest = make_run(runs, 2)
    make_run(runs, 3, name="other")
    assert get_init(api.load_continued_scenario("quickstart", "last")) == (str(newest.path), "new")


def test_a_named_run_is_continued(runs):
    run = make_run(runs, 1)
    make_run(runs, 2)
    changes = ["init.replay=0.5"]
    continued = api.load_continued_scenario("quickstart", run.id, changes)
    assert get_init(continued) == (str(run.path), "new")
    assert continued.scenario.init.replay == 0.5


def test_a_run_that_has_not_finished_is_not_continued_by_name(runs):
    run = make_run(runs, 1, finished=False)
    with pytest.raises(
        ConfigError, match=f"{run.id} has not finished; continue it with: nonet resume {run.id}"
    ):
        api.load_continued_scenario("quickstart", run.id)


def test_a_second_run_at_the_same_time_is_refused(runs):
    make_run(runs, 1)
    run = make_run(runs, 2, finished=False)
    lock = lock_run(run)
    try:
        with pytest.raises(
            ConfigError, match=f"{run.id} is in progress; wait for it, or stop it: nonet stop"
        ):
            api.load_continued_scenario("quickstart", "last")
    finally:
        lock.close()


def test_an_interrupted_run_is_resumed_first_and_then_continued(runs, monkeypatch):
    make_run(runs, 1)
    interrupted = make_run(runs, 2, finished=False)
    resumed = []

    def resume(run, *, panel=None):
        resumed.append(run)
        interrupted.write_json("report.json", {})

    monkeypatch.setattr(api, "resume", resume)
    assert get_init(api.load_continued_scenario("quickstart", "last")) == (str(interrupted.path), "new")
    assert resumed == [interrupted.path]


def test_a_run_that_ended_before_its_first_checkpoint_is_passed_over(runs, monkeypatch):
    finished = make_run(runs, 1)
    make_run(runs, 2, finished=False, checkpoint=False)
    monkeypatch.setattr(api, "resume", lambda *_, **__: pytest.fail("there is nothing to resume"))
    assert get_init(api.load_continued_scenario("quickstart", "last")) == (str(finished.path), "new")


def test_what_follows_from_the_data_is_that_of_the_run_before(runs, tmp_path):
    rows = [(user, item, item) for user in range(8) for item in range(user % 4, 9)]
    users, items, times = zip(*rows, strict=True)
    log = pa.table({"user_id": users, "item_id": items, "timestamp": times})
    pq.write_table(log, tmp_path / "log.parquet")
    path = tmp_path / "shop.yaml"
    path.write_text("name: shop\nsettings: data\ndata: {interactions: log.parquet}\nstages: {pretrain: {}}\n")
    first, _ = load_scenario(path)
    document = to_document(first)
    document["model"]["width"] = 4 * document["model"]["width"]
    run = make_run(runs, 1)
    run.scenario.write_text(yaml.dump(document))
    continued = api.load_continued_scenario(path, "last").scenario
    assert continued.settings.keys() == first.settings.keys()
    changed = {"model.width"} & set(first.settings)
    assert changed
    assert to_document(continued)["model"]["width"] == document["model"]["width"]


@pytest.mark.parametrize("other", [("--resume",), ("--seeds", "1,2")])
def test_it_starts_one_new_run(runs, command, other):
    code, out, err = command("run", "quickstart", "--continue", "last", *other)
    assert (code, out, err) == (2, "", "nonet: --continue starts one new run; omit --resume and --seeds\n")

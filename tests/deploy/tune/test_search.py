"""The search without Ray, with runs that are made up; and once as a process that is killed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests_ring import make_ring, write_tables
from typer.testing import CliRunner

from nonet.controller.record import RunFolder, ValidationRecord
from nonet.deploy.cli import app
from nonet.deploy.run import api
from nonet.deploy.tune import sampler, search, tune_scenario
from nonet.deploy.tune.subject import TunedScenario
from nonet.deploy.tune.trial import NO_NUMBER, run_trial
from nonet.errors import ConfigError, WorkerFailed, WorkerLost

SPACE = "stages.pretrain.lr: {log: [1e-3, 1e-1]}\nmodel.dropout: [0.0, 0.2]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    (folder / "space.yaml").write_text(SPACE)
    return folder


class Runs:
    """Made-up runs: validation is best at lr 1e-2 and in the middle of a stage. `fails`: lr above which they fail."""

    def __init__(self, monkeypatch, fails: float = math.inf, dies_after: int | None = None):
        self.ran: list[str] = []
        self.fails, self.dies_after = fails, dies_after
        monkeypatch.setattr(api, "run", self._run)
        monkeypatch.setattr(search, "_run_jobs", self._run_all)

    def _run(self, made: Any, *, run_dir: Path, panel: Any) -> Any:
        run, pretrain = RunFolder(Path(run_dir)), made.scenario.stages["pretrain"]
        if len(self.ran) == self.dies_after:
            raise WorkerLost("the power went")
        self.ran.append(run.id)
        if pretrain.lr > self.fails:
            raise WorkerFailed("the loss is not a number")
        value = 1 - abs(math.log10(pretrain.lr) + 2) / 4 + pretrain.epochs / 100
        kept = ValidationRecord(run, "finetune")
        for step, less in ((1, 0.1), (2, 0.0), (3, 0.2)):
            kept.add(step, {"metrics": {"ndcg@10": value - less}, "nats": 3.0, "events": 60})
        run.write_json("report.json", {})
        return SimpleNamespace(state="done")

    def _run_all(self, subject, halving, ledger, folder, say) -> None:
        jobs = search._JobQueue(halving, ledger, folder, say)
        while job := jobs.get_next("job"):
            jobs.end_job("job", run_trial(subject, json.loads(job)))
        if jobs.broken:
            raise WorkerLost(jobs.broken)


def _tune(folder, run_dir, trials=12, **options) -> Any:
    return tune_scenario(
        folder / "ring.yaml", folder / "space.yaml", trials, run_dir=run_dir, say=lambda line: None, **options
    )


def _plain(found):
    return [{key: value for key, value in each.items() if key != "minutes"} for each in found["results"]]


def test_a_search_goes_on_where_it_was_cut_and_runs_nothing_twice(folder, tmp_path, monkeypatch):
    whole = Runs(monkeypatch)
    undisturbed = _tune(folder, tmp_path / "a" / "s")
    assert len(whole.ran) == 12 + 6 + 3
    for cut in (0, 5, 12, 20):
        first = Runs(monkeypatch, dies_after=cut)
        with pytest.raises(WorkerLost, match="the power went"):
            _tune(folder, tmp_path / str(cut) / "s")
        rest = Runs(monkeypatch)
        found = _tune(folder, tmp_path / str(cut) / "s")
        assert first.ran + rest.ran == whole.ran
        assert _plain(found) == _plain(undisturbed)
        assert found["best"]["number"] == undisturbed["best"]["number"]
    again = Runs(monkeypatch)
    assert _tune(folder, tmp_path / "a" / "s")["best"] == undisturbed["best"]
    assert again.ran == []


def test_the_answer_is_on_disk_and_the_winner_plans(folder, tmp_path, monkeypatch):
    Runs(monkeypatch)
    found = _tune(folder, tmp_path / "s")
    stored = json.loads((tmp_path / "s" / "tune.json").read_text())
    assert stored["best"] == found["best"]
    assert stored["results"] == found["results"]
    assert (tmp_path / "s" / "tune.svg").read_text().startswith("<svg")
    lr = api.scenario(tmp_path / "s" / "best.yaml").scenario.stages["pretrain"].lr
    assert lr == found["best"]["values"]["stages.pretrain.lr"]
    assert api.scenario(tmp_path / "s" / "best.yaml").plan()


def test_trials_that_fail_lose_after_a_second_try(folder, tmp_path, monkeypatch):
    runs = Runs(monkeypatch, fails=0.02)
    found = _tune(folder, tmp_path / "s", trials=6)
    failed = [each for each in found["results"] if each["failed"]]
    assert failed
    assert {each["failed"] for each in failed} == {"the loss is not a number"}
    assert all(runs.ran.count(f"s-{each['number']}-1") == 2 for each in failed)
    assert found["best"]["values"]["stages.pretrain.lr"] <= 0.02
    Runs(monkeypatch, fails=0.0)
    with pytest.raises(ConfigError, match="all 3 trials failed, the first one: the loss is not a number"):
        _tune(folder, tmp_path / "none", trials=3)


def test_a_validation_that_is_no_number_is_a_failure(folder, tmp_path):
    subject, run = TunedScenario.read(folder / "ring.yaml"), RunFolder(tmp_path / "run")
    for step in (1, 2):
        ValidationRecord(run, "finetune").add(
            step, {"metrics": {"ndcg@10": None}, "nats": None, "events": 60}
        )
    run.write_json("report.json", {})
    answer = run_trial(subject, {"values": {}, "share": "1", "folder": str(run.path)})
    assert (answer["score"], answer["failed"], answer["broken"]) == (None, NO_NUMBER, None)
    ValidationRecord(run, "finetune").add(3, {"metrics": {"ndcg@10": 0.5}, "nats": 2.0, "events": 60})
    ValidationRecord(run, "finetune").add(4, {"metrics": {"ndcg@10": 0.25}, "nats": 2.5, "events": 60})
    assert subject.read_score(run) == 0.5
    assert TunedScenario.read(folder / "ring.yaml", metric="nats").read_score(run) == 2.0


def test_values_that_are_no_scenario_lose_without_a_run(folder, tmp_path):
    job = {"values": {"model.width": 17}, "share": "1", "folder": str(tmp_path / "run")}
    answer = run_trial(TunedScenario.read(folder / "ring.yaml"), job)
    assert answer["score"] is None
    assert answer["broken"] is None
    assert "17" in answer["failed"]


def test_another_scenario_in_the_same_folder_and_a_foreign_folder_are_refused(folder, tmp_path, monkeypatch):
    Runs(monkeypatch)
    _tune(folder, tmp_path / "s", trials=2)
    with pytest.raises(
        ConfigError,
        match=r"another search, which differs in scenario; use the original options and data to continue",
    ):
        _tune(folder, tmp_path / "s", trials=2, changes=["model.layers=2"])
    with pytest.raises(ConfigError, match=r"differs in parallel \(there 1, here 2\)"):
        _tune(folder, tmp_path / "s", trials=2, parallel=2)
    shutil.copytree(folder, tmp_path / "other")
    write_tables(tmp_path / "other", users=50)
    with pytest.raises(ConfigError, match="another search, which differs in tables"):
        _tune(tmp_path / "other", tmp_path / "s", trials=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="is not empty and has no search"):
        _tune(folder, tmp_path / "mine")


def test_a_search_of_an_earlier_version_continues_and_says_that_its_data_are_unknown(
    folder, tmp_path, monkeypatch
):
    Runs(monkeypatch)
    _tune(folder, tmp_path / "s", trials=2)
    ledger = tmp_path / "s" / "tune.json"
    stored = json.loads(ledger.read_text())
    del stored["search"]["tables"]
    stored["search"]["files"] = {
        Path(use).name: content for use, content in stored["search"]["files"].items()
    }
    ledger.write_text(json.dumps(stored))
    lines: list[str] = []
    again = Runs(monkeypatch)
    tune_scenario(folder / "ring.yaml", folder / "space.yaml", 2, run_dir=tmp_path / "s", say=lines.append)
    assert not again.ran
    assert any("nothing shows that its data are the same" in line for line in lines)


def test_the_command_prints_the_table_or_json(folder, tmp_path, monkeypatch):
    Runs(monkeypatch)
    words = ["tune", str(folder / "ring.yaml"), "--space", str(folder / "space.yaml"), "--trials", "4"]
    words += ["--run-dir", str(tmp_path / "s")]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "best       trial" in shown.stdout
    assert shown.stderr.count("\n") >= 4 + 2
    answer = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert len(answer["results"]) == 4 + 2


def test_a_missing_package_is_one_line_with_the_command(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "find_spec", lambda name: None if name == "optuna" else name)
    with pytest.raises(ConfigError, match=r"nonet tune needs optuna: pip install 'nonet\[tune\]'"):
        _tune(folder, tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_killed_search_has_the_winner_of_an_undisturbed_one(folder, tmp_path):
    """SIGKILL to every process of it, in the middle of a trial; then the same command."""
    start = partial(_process, folder)
    assert start(tmp_path / "whole" / "s").wait() == 0
    killed = tmp_path / "killed" / "s"
    process = start(killed)
    while len(_results(killed)) < 2 or not list(killed.glob("trials/2/*/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.1)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in tree:
        if each.is_running():
            os.kill(each.pid, signal.SIGKILL)
    process.wait()
    before = _results(killed)
    assert 2 <= len(before) < 6
    assert start(killed).wait() == 0
    results = _results(killed)
    assert [
        each for each in results if each in before
    ] == before  # with their minutes: they did not run again
    whole = json.loads((tmp_path / "whole" / "s" / "tune.json").read_text())
    assert _plain({"results": results}) == _plain(whole)
    assert len(results) == 4 + 2
    best = json.loads((killed / "tune.json").read_text())["best"]
    assert {**best, "minutes": 0} == {**whole["best"], "minutes": 0}
    assert best["score"] > 0


def _process(folder: Path, run_dir: Path) -> subprocess.Popen:
    words = ["tune", str(folder / "ring.yaml"), "--space", str(folder / "space.yaml"), "--trials", "4"]
    code = "from nonet.deploy.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *words, "--run-dir", str(run_dir)])


def _results(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "tune.json"
    return json.loads(path.read_text())["results"] if path.exists() else []

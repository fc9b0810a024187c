"""A click model of several tasks, from tables to report on real Ray actors; stopped, and on two trainers."""

from __future__ import annotations

import io

import pytest
from likes_world import change_scenario, hash_files, make_likes

import nonet
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario import load_scenario
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel

pytestmark = pytest.mark.slow

TASKS = {"late": "item_id >= 1020", "loved": {"target": "rating >= 5", "weight": 0.5}}


def run(path, name, *changes):
    scenario = api.scenario(path, list(changes))
    return api.run(scenario, run_dir=path.parent / name, panel=Panel(io.StringIO(), live=False))


@pytest.fixture(scope="module")
def whole(ray_local, tmp_path_factory):
    folder = make_likes(tmp_path_factory.mktemp("tasks"))
    train = {"epochs": 4, "batch": {"tokens": 128}, "lr": 3e-3, "target": "rating >= 4", "tasks": TASKS}
    metrics = ["auc", "log_loss", "auc@late", "log_loss@loved"]
    model = {"experts": 2, "towers": [8]}
    path = change_scenario(folder, stages={"train": train}, evaluate={"metrics": metrics}, model=model)
    return path, run(path, "whole")


def test_the_report_has_the_metrics_and_the_calibration_of_each_task(whole):
    _, finished = whole
    report = finished.report
    assert report["stages"]["train"]["auc@late"] > 0.95
    assert set(report["paired"]["train-popularity"]) == set(report["stages"]["train"])
    assert report["lower_is_better"] == ["log_loss", "log_loss@loved"]
    assert set(report["calibration"]["train"]["test"]) == {"", *TASKS}
    page = (finished.folder.path / "report.html").read_text()
    assert "Calibration of probabilities" in page
    assert all(f"train · {task}" in page for task in ("target", *TASKS))


def test_a_stopped_run_goes_on_to_the_same_bits(whole):
    path, finished = whole
    scenario = load_scenario(path)[0]
    with nonet.Session(scenario, folder=path.parent, run=RunFolder(path.parent / "stopped")) as session:
        session.begin("train")
        session.trainer.train(session.stages["train"], 0, 20)
        for step in range(20):
            session.commit(step)
    resumed = api.resume(path.parent / "stopped", panel=Panel(io.StringIO(), live=False))
    assert resumed.report["detail"] == finished.report["detail"]
    hashes = hash_files(finished.folder)
    assert hash_files(resumed.folder)[max(hashes)] == hashes[max(hashes)]


def test_two_trainers_train_each_row_once(whole):
    path, finished = whole
    pair = run(path, "pair", "roles={trainer: {workers: 2}}")
    assert pair.report["rows"] == finished.report["rows"]
    one, two = (each.report["stages"]["train"]["auc"] for each in (finished, pair))
    assert two == pytest.approx(one, abs=0.05)  # dropout is drawn per rank

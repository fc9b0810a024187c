"""Tasks of which a split has one class of labels, or none: their metrics are not defined there, and every verb says so."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from likes_world import change_scenario, make_click_run, make_likes

from nonet.controller.scenario import load_scenario
from nonet.controller.setup import make_run_setup
from nonet.controller.setup.preflight import FileChecks, check
from nonet.deploy.after import (
    combine_seeds,
    compare_runs,
    evaluate_run,
    format_comparison,
    format_evaluation,
    format_seeds,
)
from nonet.deploy.report.page import render_page
from nonet.deploy.report.summaries import format_summary
from nonet.deploy.verbs.listing import describe_runs, format_runs
from nonet.random import rng
from nonet.workers.roles.click.evaluator import ClickEvaluator

USERS, EVENTS = 80, 30
# Conditions of the tasks. `paid` has no 1 among the validation events, `refunded` has none at all, `called` has no label among
# the held-out events, and `late` has none among the training events.
TASKS = {name: f"{name} == 1" for name in ("paid", "refunded", "called", "late")}
METRICS = ["auc", "log_loss", *(f"{metric}@{task}" for task in TASKS for metric in ("auc", "log_loss"))]
UNDEFINED = {
    "valid": {"auc@paid", "auc@refunded", "auc@called", "log_loss@called"},
    "test": {"auc@refunded", "auc@called", "log_loss@called"},
}
NOTES = [
    "stages.train.tasks.paid.target: every validation event has the label 0, so that auc@paid is not defined there",
    "stages.train.tasks.refunded.target: every training event has the label 0, so that a model learns nothing from it",
    "stages.train.tasks.refunded.target: every validation event has the label 0, so that auc@refunded is not defined there",
    "stages.train.tasks.refunded.target: every test event has the label 0, so that auc@refunded is not defined there",
    "stages.train.tasks.called.target: no validation event has a label, so that auc@called, log_loss@called are not defined "
    "there",
    "stages.train.tasks.called.target: no test event has a label, so that auc@called, log_loss@called are not defined there",
    "stages.train.tasks.late.target: no training event has a label, so that a model learns nothing from it",
]


def make_rare_labels(folder):
    """Write the likes with the columns of the tasks, and return the path of a scenario of these tasks."""
    make_likes(folder)
    draw, place = rng(4, "rare"), np.tile(np.arange(EVENTS), USERS)
    is_train, is_valid = place < 24, (place >= 24) & (place < 26)
    label = (draw.random(USERS * EVENTS) < 0.3).astype(np.float32)
    columns = {
        "paid": np.where(is_valid, 0, label),
        "refunded": np.zeros(len(label)),
        "called": np.where(is_train, label, np.nan),
        "late": np.where(is_train, np.nan, label),
    }
    table = pq.read_table(folder / "interactions.parquet")
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values, pa.float32(), from_pandas=True))
    pq.write_table(table, folder / "interactions.parquet")
    train = {"epochs": 1, "batch": {"tokens": 512}, "lr": 3e-3, "target": "rating >= 4", "tasks": TASKS}
    model = {"experts": 2, "towers": [8]}
    return change_scenario(folder, stages={"train": train}, evaluate={"metrics": METRICS}, model=model)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rare")
    return make_click_run(folder, scenario=make_rare_labels(folder), name="rare")


def check_scores(scores, undefined):
    """Check that exactly these metrics are None, and the others numbers."""
    assert set(scores) == set(METRICS)
    assert {metric for metric, value in scores.items() if value is None} == undefined
    assert all(np.isfinite(value) for value in scores.values() if value is not None)


def test_a_run_and_its_evaluation_give_null_for_metrics_that_are_not_defined(run):
    evaluation = json.loads(json.dumps(evaluate_run(str(run.path)), allow_nan=False))
    assert set(evaluation["subjects"]) == {"popularity", "logistic_regression", "train"}
    for scores in evaluation["subjects"].values():
        check_scores(scores, UNDEFINED["test"])
    report = run.read_json("report.json")
    assert evaluation["subjects"] == report["baselines"] | report["stages"]
    (row,) = [line for line in format_evaluation(evaluation).splitlines() if line.startswith("train")]
    assert row.split()[1:].count("-") == 3
    assert evaluate_run(str(run.path), metrics=["auc@refunded"])["subjects"]["train"] == {
        "auc@refunded": None
    }


def test_a_validation_gives_null_for_metrics_that_are_not_defined(run, tmp_path):
    scenario, _ = load_scenario(run.scenario)
    evaluator = ClickEvaluator(make_run_setup(scenario), scenario.evaluate)
    evaluator.open(run.find_artifacts(), str(tmp_path))
    (checkpoint,) = run.checkpoints.glob("step-*")
    validated = evaluator.validate("train", str(checkpoint))
    check_scores(validated["metrics"], UNDEFINED["valid"])
    assert validated["nats"] == validated["metrics"]["log_loss"]
    shutil.copytree(checkpoint, tmp_path / "again")
    evaluator.validate("train", str(tmp_path / "again"))
    compared = evaluator.compare_validated("train", checkpoint.name, "again")
    assert set(compared) == {*METRICS, "nats"} - UNDEFINED["valid"]


def test_runs_and_seeds_are_compared_without_metrics_that_are_not_defined(run, tmp_path):
    comparison = compare_runs(str(run.path), str(run.path), stage_b="popularity")
    assert set(comparison["metrics"]) == set(METRICS)
    undefined = {name for name, row in comparison["metrics"].items() if row["diff"] is None}
    assert undefined == UNDEFINED["test"]
    assert comparison["metrics"]["auc@refunded"] == dict.fromkeys(("a", "b", "diff", "low", "high"))
    (row,) = [line for line in format_comparison(comparison).splitlines() if line.startswith("auc@refunded")]
    assert row.split() == ["auc@refunded", "-", "-", "-", "-"]
    json.dumps(comparison, allow_nan=False)

    def start(seed, path):
        path.mkdir(parents=True)
        for name in ("scenario.yaml", "report.json", "results"):
            (path / name).symlink_to(run.path / name)
        return True

    pooled = combine_seeds([7, 8], tmp_path / "many", start)
    json.dumps(pooled, allow_nan=False)
    assert pooled["subjects"]["train"]["auc@called"] == {"mean": None, "sd": None, "values": [None, None]}
    assert "auc@called" not in pooled["paired"]["train-popularity"]
    assert " - " in format_seeds(pooled)
    assert "<td>–</td>" in (tmp_path / "many" / "report.html").read_text()


def test_the_report_and_the_list_of_runs_show_a_dash(run, monkeypatch):
    report = run.read_json("report.json")
    lines = format_summary({**report, "lists": {}}).splitlines()
    assert "auc@called" in next(line for line in lines if line.startswith("test "))
    assert next(line for line in lines if line.startswith("train ")).split()[1:].count("-") == 3
    page = render_page({**report, "lists": {}})
    assert "auc@called" in page
    assert "<td>–</td>" in page
    monkeypatch.setenv("NONET_RUNS", str(run.path.parent))
    (row,) = [row for row in describe_runs() if row["run"] == "rare"]
    assert row["auc@called"] is None
    assert row["auc"] == round(report["stages"]["train"]["auc"], 4)
    listed = format_runs([row])
    assert "None" not in listed
    assert "auc@paid" in listed


def test_a_report_without_any_metric_that_is_defined_says_so():
    scores = {"auc": None}
    detail = {name: {"test": {"exhaustive": {"all": scores}}} for name in ("popularity", "train")}
    report = {"stages": {"train": scores}, "baselines": {"popularity": scores}, "detail": detail, "lists": {}}
    assert "The stages have no scores, so there is nothing to compare." in format_summary(report)
    assert render_page(report).count("<td>–</td>") == 2


def test_a_plan_and_a_run_name_each_task_and_split_without_both_labels(run):
    scenario, _ = load_scenario(run.scenario)
    notes = scenario.model.spec.list_data_notes(scenario, run.read_facts()["data"])
    assert list(notes) == NOTES
    checks = FileChecks(max_table_bytes=10**9)
    check(scenario, run.path.parent, checks)
    assert [warning for warning in checks.warnings if "tasks" in warning] == NOTES


def test_only_the_metrics_that_are_asked_for_are_computed(run, monkeypatch):
    monkeypatch.setattr("nonet.models.clicks.metrics._compute_weighted_aucs", None)
    assert evaluate_run(str(run.path), metrics=["log_loss@paid"])["subjects"]["train"]["log_loss@paid"] > 0

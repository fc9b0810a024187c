"""A finished run of a click model is evaluated again, compared and combined over seeds, as other runs are."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from likes_world import make_click_run
from ring_world import Ring
from run_folders import folder_of

from nonet.deploy.after import (
    combine_seeds,
    compare_runs,
    evaluate_run,
    format_comparison,
    format_evaluation,
    format_seeds,
)
from nonet.errors import ConfigError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_click_run(tmp_path_factory.mktemp("clicks"))


def test_a_click_model_is_evaluated_again_with_the_numbers_of_its_run(run):
    answer, report = evaluate_run(str(run.path)), run.read_json("report.json")
    assert answer["subjects"] == report["baselines"] | report["stages"]
    assert answer["data"]["test"] == 320
    assert "full ranking" not in format_evaluation(answer)
    assert set(evaluate_run(str(run.path), metrics=["auc"])["subjects"]["train"]) == {"auc"}
    with pytest.raises(ConfigError, match="does not measure clicks"):
        evaluate_run(str(run.path), metrics=["recall@5"])


def test_other_events_are_scored_by_baselines_that_were_fitted_on_the_run(run, tmp_path):
    own = evaluate_run(str(run.path))
    table = pq.read_table(run.path.parent / "interactions.parquet")
    pq.write_table(table, tmp_path / "same.parquet")
    assert evaluate_run(str(run.path), data=tmp_path / "same.parquet")["subjects"] == own["subjects"]
    # Labels of training events of other data change what was liked before, but not a popularity that the run fitted.
    is_held_out = np.tile(np.arange(30) >= 24, 80)
    rating = np.where(is_held_out, table["rating"].to_numpy(), 5.0).astype(np.float32)
    pq.write_table(table.set_column(3, "rating", [rating]), tmp_path / "other.parquet")
    other = evaluate_run(str(run.path), data=tmp_path / "other.parquet")
    assert other["subjects"]["popularity"] == own["subjects"]["popularity"]
    assert other["subjects"]["train"] != own["subjects"]["train"]


def test_runs_of_click_models_are_compared_and_lower_log_loss_is_better(run):
    answer = compare_runs(str(run.path), str(run.path), stage_b="popularity")
    assert answer["metrics"]["auc"]["diff"] > 0 > answer["metrics"]["log_loss"]["diff"]
    assert answer["metrics"]["log_loss"]["high"] < 0
    assert "better in auc, log_loss than" in format_comparison(answer)
    report = run.read_json("report.json")
    assert answer["metrics"]["auc"]["a"] == report["stages"]["train"]["auc"]
    with pytest.raises(ConfigError, match="has no predictions of 'trian'"):
        compare_runs(str(run.path), str(run.path), stage_a="trian")


def test_a_click_model_is_not_compared_with_a_model_that_ranks(run, tmp_path, monkeypatch):
    ring = folder_of(Ring(tmp_path), tmp_path / "ring", pretrain=np.zeros(3))
    monkeypatch.setattr("nonet.deploy.after.compare.check_same_events", lambda a, b: None)
    with pytest.raises(ConfigError, match="clicks has predictions and ring has ranks"):
        compare_runs(str(run.path), str(ring.path), stage_b="pretrain")


def test_seeds_of_a_click_model_are_combined(run, tmp_path):
    def start(seed, path):
        path.mkdir(parents=True)
        for name in ("scenario.yaml", "report.json", "results"):
            (path / name).symlink_to(run.path / name)
        return True

    pooled = combine_seeds([7, 8], tmp_path / "many", start)
    scores, one = pooled["subjects"]["train"], run.read_json("report.json")["stages"]["train"]
    assert scores["auc"]["values"] == [one["auc"]] * 2
    assert pooled["paired"]["train-popularity"]["log_loss"]["high"] < 0
    assert pooled["lower_is_better"] == ["log_loss"]
    page = (tmp_path / "many" / "report.html").read_text()
    best = pooled["subjects"]["train"]["log_loss"]["mean"]
    assert f"<b>{best:.4f}</b>" in page
    assert "2 seeds" in format_seeds(json.loads((tmp_path / "many" / "seeds.json").read_text()))

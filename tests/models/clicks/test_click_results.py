"""Metrics of the target and of tasks, from what subjects predicted for held-out events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.models.clicks.metrics import compare_clicks, summarise_clicks
from nonet.models.clicks.results import (
    ClickResults,
    HeldOutClicks,
    check_labels,
    count_labels,
    describe_undefined_metrics,
)
from nonet.random import rng
from nonet.samples.batches.clicks import ClickRows
from nonet.samples.sequences.labels import NEVER, name_task
from nonet.samples.sequences.sequences import TEST, build_sequences

USERS, EVENTS, SEED = 40, 5, 3
METRICS = ["auc", "log_loss", "auc@loved", "log_loss@loved"]


def build(stars=None, **targets):
    draw = rng(SEED, "log")
    count = USERS * EVENTS
    values = draw.integers(1, 6, count).astype(float) if stars is None else np.full(count, stars)
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(USERS), EVENTS),
            "item_id": draw.integers(0, 9, count),
            "timestamp": np.tile(np.arange(EVENTS), USERS),
            "stars": pa.array(np.where(draw.random(count) < 0.3, np.nan, values), from_pandas=True),
            "clicked": draw.integers(0, 2, count),
        }
    )
    targets = {"train": "clicked == 1", name_task("train", "loved"): "stars >= 4"} | targets
    return build_sequences(log, None, split={"use": "leave_last_out", "test": 2}, targets=targets)


def draw_predictions(held_out, word):
    return {
        task: rng(SEED, word, task).random(len(index), np.float32)
        for task, index in held_out.index_by_task.items()
    }


def test_each_metric_is_that_of_the_events_whose_label_is_known(tmp_path):
    seq, items = build()
    clicks = ClickRows.from_target(seq, items, "train", ["item"], 3)
    held_out = HeldOutClicks(seq, "train", TEST, SEED)
    loved = held_out.index_by_task["loved"]
    assert 0 < len(loved) < len(held_out.index_by_task[""]) == 2 * USERS
    a, b = (draw_predictions(held_out, word) for word in "ab")
    found = held_out.summarise(METRICS, a)
    label = seq.targets[name_task("train", "loved")][loved]
    assert found["auc@loved"] == summarise_clicks(a["loved"], label)["auc"]
    assert found["log_loss"] == summarise_clicks(a[""], clicks.label[held_out.index_by_task[""]])["log_loss"]
    expected = compare_clicks(a["loved"], b["loved"], label, seq.user[loved], SEED)
    assert held_out.compare(METRICS, a, b)["auc@loved"] == expected["auc"]
    assert list(held_out.summarise(METRICS, {"": a[""]})) == ["auc", "log_loss"]

    for name, predictions in (("a", a), ("old", {"": b[""]})):
        np.savez(
            tmp_path / f"{name}.npz", **{f"test@{k}" if k else "test": v for k, v in predictions.items()}
        )
    results = ClickResults(seq, "train", None, SEED)
    assert results.index.tolist() == held_out.index_by_task[""].tolist()
    values, old = (results.read(tmp_path / f"{name}.npz")[None] for name in ("a", "old"))
    assert {metric: results.compute(metric, values)[0] for metric in METRICS} == found
    assert np.isnan(results.compute("auc@loved", old)[0])
    assert list(results.compare(METRICS, values, old)) == ["auc", "log_loss"]


def test_predictions_of_all_tasks_are_computed_once_for_events_that_have_any_label():
    seq, _ = build()
    held_out = HeldOutClicks(seq, "train", TEST, SEED)
    calls = []

    def predict(index):
        calls.append(index)
        return np.stack([index / 1000, 1 - index / 1000], 1)

    found = held_out.predict(predict)
    assert len(calls) == 1
    assert found["loved"].tolist() == (1 - held_out.index_by_task["loved"] / 1000).tolist()


def test_predictions_that_are_not_finite_are_refused_with_the_name_of_their_task():
    seq, _ = build()
    held_out = HeldOutClicks(seq, "train", TEST, SEED)
    predictions = draw_predictions(held_out, "a")
    predictions["loved"][:2] = np.nan
    assert held_out.summarise(["auc", "log_loss"], predictions)
    count = len(predictions["loved"])
    with pytest.raises(
        DataError, match=f"2 of {count} predicted probabilities of the task 'loved' are not finite"
    ):
        held_out.summarise(METRICS, predictions)


def test_labels_that_are_all_alike_are_described_with_their_task_and_the_metrics_that_they_do_not_define():
    seq, _ = build()
    check_labels(seq, "train")
    assert list(describe_undefined_metrics(count_labels(seq), "train", METRICS)) == []
    liked = count_labels(build(stars=5.0)[0])
    assert list(describe_undefined_metrics(liked, "train", METRICS)) == [
        "stages.train.tasks.loved.target: every training event has the label 1, so that a model learns nothing from it",
        "stages.train.tasks.loved.target: every test event has the label 1, so that auc@loved is not defined there",
    ]
    nothing = count_labels(build(**{name_task("train", "loved"): "stars > 9 and stars < 0"})[0])
    (_, text) = describe_undefined_metrics(nothing, "train", METRICS)
    assert "every test event has the label 0, so that auc@loved is not defined there" in text
    (text,) = describe_undefined_metrics(nothing, "train", ["auc", "log_loss@loved"])
    assert "training" in text, "the log loss is defined"


def test_a_target_that_no_test_event_has_a_label_of_is_refused_before_a_run():
    seq, _ = build()
    never = {"label time:train": np.where(seq.split == TEST, NEVER, seq.time)}
    with pytest.raises(DataError, match=r"stages.train.target: no test event has a label"):
        check_labels(replace(seq, columns={**seq.columns, **never}), "train")

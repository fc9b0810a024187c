"""The label is no feature: refused where a condition names it, warned of where values separate the labels."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.controller.scenario.checks import check_scenario
from nonet.controller.scenario.scenario import make_scenario
from nonet.errors import ConfigError
from nonet.models.clicks.leaks import find_separating_columns


def clicks(tables, target="clicked == 1", tasks=None, metrics=("auc",), stages=None, model=None, **data):
    scenario = make_scenario(
        {
            "name": "clicks",
            "data": {"interactions": "events.parquet", "split": {"use": "leave_last_out", "test": 1}, **data},
            "model": {"use": "deepfm", **(model or {})},
            "sparse": {"defaults": {"dim": 9}, "tables": tables},
            "stages": {
                "train": {"epochs": 1, "batch": {"tokens": 64}, "target": target, "tasks": tasks or {}},
                **(stages or {}),
            },
            "evaluate": {"metrics": list(metrics)},
        }
    )
    check_scenario(scenario)


@pytest.mark.parametrize("tables", [{"clicked": {}}, {"item": {"features": ["item", "clicked"]}}])
def test_a_feature_that_the_target_names_is_refused_in_one_line(tables):
    with pytest.raises(
        ConfigError, match=r"the feature 'clicked' is the label \(stages.train.target names it\)"
    ):
        clicks(tables)


def test_the_column_of_late_labels_is_refused_and_labels_of_earlier_events_are_not():
    labels = {"path": "bought.parquet", "within": "7d", "name": "bought"}
    with pytest.raises(ConfigError, match=r"'bought' is the label"):
        clicks({"bought": {}}, "bought == 1", labels=labels)
    clicks({"item": {"features": ["item", "liked"]}, "taste": {}, "disliked": {}})


def test_the_column_of_a_task_or_of_any_late_label_is_refused_as_a_feature():
    tasks, metrics = {"bought": "price > 3"}, ["auc", "auc@bought"]
    with pytest.raises(ConfigError, match=r"is the label \(stages.train.tasks.bought names it\)"):
        clicks({"price": {}}, tasks=tasks, metrics=metrics)
    labels = [{"path": f"{name}.parquet", "within": "7d", "name": name} for name in ("cart", "paid")]
    with pytest.raises(ConfigError, match=r"'paid' is the label \(data.labels names it\)"):
        clicks({"paid": {}}, labels=labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tasks": {"bought": "price > 3"}},
            "stages.train.tasks.bought: no metric measures it; add auc@bought",
        ),
        ({"metrics": ["auc", "auc@bougt"]}, "'auc@bougt' does not measure clicks; there are auc, log_loss"),
        ({"model": {"experts": 2}}, "model.experts: .* add stages.NAME.tasks, or remove it"),
        ({"model": {"towers": [4]}}, "model.towers: .* add stages.NAME.tasks, or remove it"),
        (
            {
                "tasks": {"bought": {"target": "price > 3", "weight": 2.0}},
                "metrics": ["auc", "log_loss@bought"],
                "stages": {"more": {"epochs": 1, "batch": {"tokens": 64}, "target": "clicked == 1"}},
            },
            "stages.more.tasks: got none, and the first stage has bought; all stages",
        ),
        (
            {"labels": [{"path": "a.parquet", "within": "7d"}, {"path": "b.parquet", "within": "7d"}]},
            "two labels have the name 'label'",
        ),
        *(
            (
                {"labels": {"path": "a.parquet", "within": "7d", "name": name}},
                rf"data.labels: a label cannot have the name '{name}'; give it another .*, such as bought",
            )
            for name in ("event", "timestamp", "count", "True", "not", "paid-for")
        ),
        (
            {
                "labels": [{"path": f"{n}.parquet", "within": "7d", "name": f"l{n}"} for n in range(7)],
                "tasks": {"all": {"target": " and ".join(f"l{n} == 1" for n in range(7)), "weight": 1.0}},
                "metrics": ["auc", "auc@all"],
            },
            "stages.train.tasks.all.target reads 7 labels of data.labels .*; a target reads at most 6",
        ),
    ],
)
def test_tasks_that_cannot_be_learned_or_measured_are_refused_in_one_line(options, message):
    with pytest.raises(ConfigError, match=message):
        clicks({"item": {}}, **options)


def test_a_condition_that_is_nested_too_deeply_is_left_to_the_check_of_its_columns():
    clicks({"item": {}}, target="not " * 5000 + "rating == 1")


def test_a_column_that_separates_the_labels_is_found_and_a_good_feature_is_not():
    draw = np.random.default_rng(0)
    label = (draw.random(2000) < 0.3).astype(float)
    columns = {
        "copy": label * 7 + 1,
        "refined": label * 10 + draw.integers(0, 5, 2000),
        "good": np.where(draw.random(2000) < 0.9, label, 1 - label),
        "unique": np.arange(2000),
        "noise": draw.integers(0, 20, 2000),
    }
    assert set(find_separating_columns(columns, label)) == {"copy", "refined"}

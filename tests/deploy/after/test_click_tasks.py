"""A click model of several tasks after its run: evaluated, compared with one of the target alone, as a reward, and exported."""

from __future__ import annotations

import numpy as np
import pytest
from likes_world import change_scenario, make_click_run, make_likes, make_rollouts, open_click_data

from nonet.deploy.after.compare import compare_runs
from nonet.deploy.after.evaluate import evaluate_run
from nonet.deploy.serving.offline import ExportedClicks, export_run
from nonet.errors import ConfigError
from nonet.models.clicks import ClickModel, summarise_clicks
from nonet.rl.rewards import load_reward
from nonet.samples.sequences import TEST, TRAIN

TASKS = {"late": "item_id >= 1020", "loved": {"target": "rating >= 5", "weight": 0.5}}
METRICS = ["auc", "log_loss", "auc@late", "log_loss@loved"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = make_likes(tmp_path_factory.mktemp("tasks"))
    plain = make_click_run(folder, scenario=folder / "likes.yaml", name="plain")
    train = {"epochs": 4, "batch": {"tokens": 128}, "lr": 3e-3, "target": "rating >= 4", "tasks": TASKS}
    path = change_scenario(
        folder, stages={"train": train}, evaluate={"metrics": METRICS}, model={"experts": 2, "towers": [8]}
    )
    return make_click_run(folder, scenario=path, name="tasks"), plain


def get_checkpoint(run):
    return sorted(run.checkpoints.glob("step-*"))[-1]


def test_each_task_is_learned_and_measured(runs):
    run, _ = runs
    clicks = open_click_data(run).label_events("train")
    predictions = ClickModel(get_checkpoint(run)).predict_events(clicks, clicks.find_rows(TEST))
    assert predictions.shape == (len(clicks.find_rows(TEST)), 3)
    late = clicks.select_task("late")
    assert summarise_clicks(predictions[:, 1], late.label[clicks.find_rows(TEST)])["auc"] > 0.95
    evaluated = evaluate_run(str(run.path))["subjects"]
    assert set(evaluated["train"]) == set(METRICS) == set(evaluated["popularity"])
    with np.load(run.results / "train.npz") as stored:
        np.testing.assert_array_equal(stored["test@late"], predictions[:, 1])


def test_a_run_is_compared_with_one_of_the_target_alone_by_the_metrics_of_both(runs):
    run, plain = runs
    for a, b in ((run, plain), (plain, run)):
        assert set(compare_runs(str(a.path), str(b.path))["metrics"]) == {"auc", "log_loss"}
    assert set(compare_runs(str(run.path), str(run.path))["metrics"]) == set(METRICS)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"target": "item_id >= 1015", "tasks": TASKS}, "target"),
        ({"target": "rating >= 4", "tasks": TASKS | {"late": "item_id >= 1021"}}, "task late"),
    ],
)
def test_runs_with_other_labels_are_not_compared(runs, tmp_path, changes, name):
    run, _ = runs
    folder = make_likes(tmp_path)
    train = {"epochs": 1, "batch": {"tokens": 128}, "lr": 3e-3} | changes
    path = change_scenario(folder, stages={"train": train}, evaluate={"metrics": METRICS})
    other = make_click_run(folder, scenario=path, name="other")
    for a, b in ((run, other), (other, run)):
        with pytest.raises(
            ConfigError, match=rf"other labels of the {name}: they differ for [1-9]\d* of"
        ) as refusal:
            compare_runs(str(a.path), str(b.path))
        assert "\n" not in str(refusal.value)


def test_a_reward_is_the_probability_of_a_task(runs):
    run, _ = runs
    clicks = open_click_data(run).label_events("train")
    first = clicks.find_rows(TEST)[::4] - 2  # the first validation row: all its history was trained on
    rows = clicks.batch(first, without_moment=np.ones(len(first), bool))
    for column, task in enumerate(("", "late", "loved")):
        reward = load_reward("ctr", ".", {"model": str(run.path), "task": task}, name="click")
        reward.setup()
        expected = reward.click_model.predict(rows)[:, column]
        rollouts = make_rollouts(clicks, reward.click_model.known.item_id, first)
        np.testing.assert_allclose(reward.score(rollouts)[:, 0], expected, rtol=1e-5, atol=1e-6)
        labelled = clicks.select_task(task)
        rollouts.item_id[:, 0] = 5  # not an item of the run
        mean_rate = labelled.label[labelled.find_rows(TRAIN)].mean()
        np.testing.assert_allclose(reward.score(rollouts)[:, 0], mean_rate, rtol=1e-6)
    wrong = load_reward("ctr", ".", {"model": str(run.path), "task": "lste"}, name="click")
    with pytest.raises(
        ConfigError, match=r"'lste' is not predicted .* its tasks are late, loved. Did you mean 'late'"
    ):
        wrong.setup()


def test_an_export_has_the_probabilities_of_tasks(runs, tmp_path):
    run, _ = runs
    export_run(str(run.path), tmp_path / "out")
    exported = ExportedClicks(tmp_path / "out")
    items = [1000, 1039, 5]
    late = exported.score(items, user=100, task="late")
    assert late[0] < 0.5 < late[1]
    assert late[2] is None
    assert exported.score(items, user=100) != late
    with pytest.raises(ConfigError, match="does not predict 'early'; tasks: late, loved"):
        exported.score(items, user=100, task="early")

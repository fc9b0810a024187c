"""Columns of items and of stores as features of a click model, compressed events and stored sequences, without Ray."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from likes_world import (
    add_columns,
    change_scenario,
    load_scorer,
    make_click_run,
    make_likes,
    make_request,
    make_requests,
    make_rollouts,
    open_click_data,
)

from nonet.controller.scenario import load_scenario
from nonet.controller.setup import make_run_setup
from nonet.deploy.after import evaluate_run
from nonet.errors import ConfigError
from nonet.models.clicks.model import ClickModel
from nonet.models.clicks.scorer import ClickRequest, convert_values
from nonet.rl.rewards.api import load_reward
from nonet.samples.sequences.sequences import TEST
from nonet.samples.tables.keys import NONE, compute_keys
from nonet.workers.roles.click.data import ClickData
from nonet.workers.roles.click.evaluator import ClickEvaluator

HOUR = 3600


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_likes(tmp_path_factory.mktemp("columns"))
    add_columns(folder)
    scenario = change_scenario(
        folder,
        data={"join": {"item": {"use": str(folder / "deals"), "columns": ["deal", "discount"]}}},
        sparse={
            "tables": {
                "item": {"features": ["item", "liked"]},
                "facts": {"features": ["brand", "price", "deal", "discount"]},
            }
        },
    )
    return make_click_run(folder, steps=20, scenario=scenario)


def test_a_row_has_columns_of_its_item_and_the_newest_joined_value_before_its_own_time(run):
    clicks = open_click_data(run).label_events("train")
    index = np.arange(60)
    bags = clicks.batch(index)
    item, hour = clicks.seq.item[index], clicks.seq.time[index] // HOUR
    brands = compute_keys("brand", np.array([NONE]))  # keys of text go by its hash
    assert len(np.unique(bags["brand"].values)) == 7
    assert brands[0] not in bags["brand"].values.tolist()
    has_price = item % 9 > 0
    assert np.diff(bags["price"].offsets).astype(bool).tolist() == has_price.tolist()
    assert bags["price"].values.tolist() == compute_keys("price", item[has_price] % 5).tolist()
    has_deal = hour > 0  # strictly older: the value of hour 0 is not there for an event of hour 0
    assert np.diff(bags["deal"].offsets).astype(bool).tolist() == has_deal.tolist()
    newest = (hour[has_deal] - 1) // 5 * 5
    assert bags["deal"].values.tolist() == compute_keys("deal", newest).tolist()
    assert bags["discount"].values.tolist() == compute_keys("discount", newest).tolist()  # rounded


def test_the_checkpoint_scores_an_item_with_its_columns_as_of_the_time_of_the_prompt(run):
    clicks = open_click_data(run).label_events("train")
    reward = load_reward("ctr", ".", {"model": str(run.path)}, name="click")
    reward.setup()
    first = clicks.find_rows(TEST)[::4] - 2  # the first validation row: all its history was trained on
    expected = reward.click_model.predict(clicks.batch(first, without_moment=np.ones(len(first), bool)))[:, 0]
    score = reward.score(make_rollouts(clicks, reward.click_model.known.item_id, first))
    np.testing.assert_allclose(score[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_a_feature_that_no_table_has_is_refused_with_the_columns_that_there_are(run):
    setup = make_run_setup(load_scenario(run.scenario)[0])
    setup.features["brnad"] = "facts"
    data = ClickData(setup, run.find_artifacts())
    with pytest.raises(ConfigError, match=r"no feature 'brnad'.*brand, price, deal.*mean 'brand'"):
        data.label_events("train")


def test_compressed_and_stored_events_train_a_click_model_and_are_evaluated(tmp_path):
    folder = make_likes(tmp_path)
    plain = make_click_run(folder, steps=20, name="plain")
    stored = change_scenario(folder, data={"sequences": {"use": f"{folder}/users"}})
    stored = make_click_run(folder, steps=20, name="stored", scenario=stored)
    assert stored.read_json("results/tokenise.json")["data"]["stored"].startswith(f"{folder}/users-")
    assert stored.read_json("report.json")["stages"] == plain.read_json("report.json")["stages"]
    compressed = change_scenario(folder, data={"events": {"compress": "2h", "by": "category"}})
    compressed = make_click_run(folder, steps=20, name="compressed", scenario=compressed)
    facts = compressed.read_json("results/tokenise.json")["data"]
    assert facts["events"] < plain.read_json("results/tokenise.json")["data"]["events"]
    assert facts["compressed"]
    assert evaluate_run(str(compressed.path))["subjects"]["train"]["auc"] > 0
    assert ClickModel(sorted(compressed.checkpoints.glob("step-*"))[-1]).known.rates[0] > 0


def test_a_scorer_of_a_checkpoint_predicts_what_the_evaluator_predicted(run):
    clicks = open_click_data(run).label_events("train")
    scorer = load_scorer(sorted(run.checkpoints.glob("step-*"))[-1])
    index = clicks.find_rows(TEST)
    answers = scorer.score(make_requests(scorer, clicks, index))
    expected = np.load(run.results / "train.npz")["test"]
    np.testing.assert_allclose([each[0] for each in answers], expected, atol=1e-6)
    assert all(np.isnan(each[1]) for each in answers)
    alone = scorer.score(make_requests(scorer, clicks, index[:1]))
    np.testing.assert_allclose(alone[0], answers[0], atol=1e-6)


def test_an_event_without_a_label_is_history_and_neither_liked_nor_disliked(run):
    scorer = load_scorer(sorted(run.checkpoints.glob("step-*"))[-1])
    histories = [[], *([{"item": 1004, "time": 7 * HOUR, "label": label}] for label in (True, False, None))]
    requests = [make_request(scorer, 100, [1002], time=9 * HOUR, history=history) for history in histories]
    contexts = scorer._make_contexts(requests)
    assert contexts.label.tolist() == [1, 0, -1]
    assert np.diff(contexts.past.offsets).tolist() == [0, 1, 1, 1]
    assert contexts.since.tolist() == [-1, 2 * HOUR, 2 * HOUR, 2 * HOUR]
    none, liked, disliked, unlabelled = (answer[0] for answer in scorer.score(requests))
    assert liked not in (disliked, unlabelled)
    assert unlabelled == none  # this model reads neither activity nor recency


def test_a_value_that_does_not_fit_its_column_is_one_line(run):
    scorer = load_scorer(sorted(run.checkpoints.glob("step-*"))[-1])
    assert make_request(scorer, 100, [1002], values={"age": 3, "rating": 5}).columns == {}
    columns = {"age": np.zeros(80, np.float32)}
    assert convert_values({"age": "3", "rating": 5}, columns) == {"age": 3.0}
    with pytest.raises(ConfigError, match=r"^age: 'old' is not a number$"):
        convert_values({"age": "old"}, columns)


def test_a_store_that_does_not_answer_leaves_numbers_and_ids_missing(run):
    scorer = load_scorer(sorted(run.checkpoints.glob("step-*"))[-1])
    present = {"deal": np.array([5]), "discount": np.array([5.25], np.float32)}
    absent = {name: np.array([NONE]) for name in present}
    together = [ClickRequest(np.array([3]), joined=joined) for joined in (present, absent)]
    alone = ClickRequest(
        np.array([3]), joined={"deal": np.array([NONE]), "discount": np.array([np.nan], np.float32)}
    )
    assert scorer.score(together)[1] == pytest.approx(scorer.score([alone])[0], abs=1e-6)


def test_the_evaluator_knows_late_labels_only_from_their_time_on(tmp_path):
    folder = make_likes(tmp_path)
    log = pq.read_table(folder / "interactions.parquet")
    late = log.filter(pa.array(log["rating"].to_numpy() >= 4))
    moments = pa.array(late["timestamp"].to_numpy() + 3 * HOUR)
    pq.write_table(late.set_column(2, "timestamp", moments), folder / "bought.parquet")
    scenario = change_scenario(
        folder,
        data={"labels": {"path": "bought.parquet", "within": "4h"}},
        stages={"train": {"epochs": 1, "batch": {"tokens": 128}, "lr": 3e-3, "target": "label == 1"}},
    )
    made = make_click_run(folder, steps=10, scenario=scenario)
    clicks = open_click_data(made).label_events("train")
    evaluator = ClickEvaluator(make_run_setup(load_scenario(made.scenario)[0]), None)  # type: ignore[arg-type]
    evaluator.open(made.find_artifacts(), str(tmp_path / "results"))
    assert (clicks.known_from > clicks.seq.time).all()
    assert evaluator._clicks.known_from.tolist() == clicks.known_from.tolist()

"""Rows of a click model: features of what was before, and of nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import ConfigError
from nonet.samples.batches.clicks import CLICK_FEATURES, ClickRows
from nonet.samples.sequences.labels import NEVER
from nonet.samples.sequences.sequences import TEST, build_sequences
from nonet.samples.sequences.split import TRAIN
from nonet.samples.tables.keys import NONE, compute_keys

HOUR = 3600


def clicks(rating=(5.0, 1.0, 4.0, 2.0, 5.0), features=CLICK_FEATURES, history=3):
    interactions = pa.table(
        {
            "user_id": [1, 1, 1, 1, 1, 2, 2, 2],
            "item_id": [10, 20, 30, 10, 20, 30, 20, 10],
            "timestamp": [0, HOUR, 2 * HOUR, 26 * HOUR, 27 * HOUR, 0, 1, 2],
            "rating": pa.array([*rating, 4.0, 1.0, 5.0], pa.float32()),
        }
    )
    items = pa.table(
        {
            "item_id": [10, 20, 30],
            "title": ["Heat (1995)", "Alien (1979)", "No year"],
            "categories": [["Crime"], ["Horror", "Sci-Fi"], []],
        }
    )
    seq, items = build_sequences(
        interactions, items, split={"use": "leave_last_out", "test": 1}, targets={"train": "rating >= 4"}
    )
    return ClickRows.from_labels(seq, items, seq.targets["train"], features, history)


def add_task(rows):
    """Return rows with a task whose labels of the second and the sixth event are not known."""
    label = np.array([0, 1, 1, 1, 0, 0, 1, 1], np.float32)
    known_from = rows.seq.time.copy()
    known_from[[1, 5]] = NEVER
    return replace(rows, tasks={"kept": (label, known_from, known_from < NEVER)})


def test_labels_of_a_task_that_are_not_known_have_no_weight():
    rows = add_task(clicks())
    index = np.array([0, 1, 3, 5])
    label, weight = rows.gather_labels(index, {"kept": 0.5})
    assert label.tolist() == [[1, 0], [0, 1], [0, 1], [1, 0]]
    assert weight.tolist() == [[1, 0.5], [1, 0], [1, 0.5], [1, 0]]
    plain, none = rows.gather_labels(index, {})
    assert (plain.tolist(), none) == ([1, 0, 0, 1], None)


def test_rows_of_a_task_are_those_with_its_label_and_have_the_features_of_the_target():
    rows = add_task(clicks())
    task = rows.select_task("kept")
    assert rows.find_rows(TRAIN).tolist() == [0, 1, 2, 3, 5, 6]
    assert task.find_rows(TRAIN).tolist() == [0, 2, 3, 6]
    assert task.label[[0, 3]].tolist() == [0, 1]
    index = np.arange(8)
    for name, bag in rows.batch(index).items():
        assert bag.values.tolist() == task.batch(index)[name].values.tolist(), name
    assert rows.select_task("") is rows


def bags(found, row):
    return {name: bag[row].tolist() for name, bag in found.items()}


def items_of(rows, *places):
    return rows.keys.item[list(places)].tolist()


def test_a_row_knows_what_was_before_it():
    rows = clicks()
    fourth, first = bags(rows.batch(np.array([3, 0])), 0), bags(rows.batch(np.array([3, 0])), 1)
    assert fourth["item"] == items_of(rows, 0)
    assert (fourth["liked"], fourth["disliked"]) == (items_of(rows, 0, 2), items_of(rows, 1))
    assert (first["liked"], first["disliked"]) == ([], [])
    second = bags(rows.batch(np.array([1])), 0)
    assert len(second["categories"]) == 2
    assert second["hour"] == compute_keys("hour", np.array([1])).tolist()
    assert fourth["hour"] == compute_keys("hour", np.array([2])).tolist()
    assert fourth["weekday"] == compute_keys("weekday", np.array([1])).tolist()
    for row, log2 in ((first, 0), (second, 13), (fourth, 18)):
        assert row["recency"] == compute_keys("recency", np.array([log2])).tolist()


def test_history_is_cut_to_the_last_events():
    rows = clicks(history=1)
    assert bags(rows.batch(np.array([3])), 0)["liked"] == items_of(rows, 2)
    assert bags(clicks(history=1).batch(np.array([3])), 0)["disliked"] == []


def test_no_row_sees_its_own_label_or_a_later_one():
    asked = np.arange(8)
    before = clicks().batch(asked)
    for changed in range(5):
        rating = [5.0, 1.0, 4.0, 2.0, 5.0]
        rating[changed] = 5.0 if rating[changed] < 4 else 1.0
        after = clicks(rating).batch(asked)
        for row in range(changed + 1):
            assert bags(after, row) == bags(before, row), (changed, row)
        assert changed == 4 or bags(after, changed + 1) != bags(before, changed + 1)


def test_the_label_is_the_condition_and_the_split_that_of_the_sequences():
    rows = clicks()
    assert rows.label.tolist() == [1, 0, 1, 0, 1, 1, 0, 1]
    assert rows.find_rows(TEST).tolist() == [4, 7]


def test_features_have_keys_of_their_own_but_for_the_items():
    rows = clicks()
    found = rows.batch(np.arange(8))
    keys = {name: set(bag.values.tolist()) for name, bag in found.items()}
    apart = [name for name in keys if name not in ("liked", "disliked")]
    assert sum(len(keys[name]) for name in apart) == len(set.union(*(keys[name] for name in apart)))
    assert keys["liked"] <= set(items_of(rows, 0, 1, 2))


def test_a_timeless_row_has_no_moment():
    found = clicks().batch(np.array([3, 3]), without_moment=np.array([True, False]))
    for name in ("hour", "weekday", "recency"):
        assert bags(found, 0)[name] == []
        assert len(bags(found, 1)[name]) == 1
    assert bags(found, 0)["activity"] == bags(found, 1)["activity"]


def test_a_numeric_column_is_a_feature_when_it_is_named():
    found = clicks(features=("item", "rating")).batch(np.arange(8))
    assert list(found) == ["item", "rating"]
    assert len(set(found["rating"].values.tolist())) == 4


def test_an_unknown_feature_is_named():
    with pytest.raises(ConfigError, match=r"no feature 'itm'.*item"):
        clicks(features=("itm",))


def test_whole_numbers_and_text_are_features_of_an_id_each():
    shops = [1000000001, 1000000002, 1000000003, None]
    interactions = pa.table(
        {
            "user_id": [1, 1, 1, 1],
            "item_id": [10, 20, 30, 40],
            "timestamp": [0, 1, 2, 3],
            "shop": shops,
            "page": ["home", "search", "home", None],
        }
    )
    seq, items = build_sequences(interactions, None, split={"test": 1}, targets={"train": "shop > 0"})
    assert seq.columns["shop"].tolist() == [*shops[:3], NONE]
    items = items.append_column("year", pa.array([0] * 4))
    rows = ClickRows.from_labels(seq, items, seq.targets["train"], ("shop", "page"), 3)
    found = rows.batch(np.arange(4))
    assert found["shop"].values.tolist() == compute_keys("shop", np.array(shops[:3])).tolist()
    assert len(set(found["shop"].values.tolist())) == 3
    assert found["page"].values[0] == found["page"].values[2] != found["page"].values[1]
    assert [len(bag[3]) for bag in found.values()] == [0, 0]

"""The baselines of a click model: the regression is converged, and its penalty is the best on validation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from nonet.models.clicks.baselines import (
    PENALTIES,
    LogisticRegression,
    _build_matrix,
    _solve,
    predict_baseline,
)
from nonet.random import rng
from nonet.samples.batches.clicks import ClickRows
from nonet.samples.batches.graphs import Graph, Graphs
from nonet.samples.sequences.sequences import TEST, TRAIN, build_sequences


@pytest.fixture(scope="module")
def clicks():
    draw = rng(4, "table")
    users, items, events = 50, 20, 12
    taste_U, quality_I = draw.standard_normal(users), draw.standard_normal(items)
    user, item = np.repeat(np.arange(users), events), draw.integers(0, items, users * events)
    likes = taste_U[user] + quality_I[item] + draw.logistic(size=len(user)) > 0
    interactions = pa.table(
        {
            "user_id": user,
            "item_id": item,
            "timestamp": np.arange(len(user)),
            "rating": np.where(likes, 5.0, 1.0).astype(np.float32),
        }
    )
    catalogue = pa.table({"item_id": np.arange(items), "title": ["t"] * items, "categories": [["a"]] * items})
    split = {"use": "leave_last_out", "test": 2, "valid": 2}
    seq, catalogue = build_sequences(interactions, catalogue, split=split, targets={"s": "rating >= 4"})
    return ClickRows.from_labels(seq, catalogue, seq.targets["s"], ("user", "item", "liked"), 5)


def test_the_regression_stands_where_its_gradient_is_zero(clicks):
    rows = clicks.find_rows(TRAIN)
    found = LogisticRegression.fit(clicks)
    matrix = _build_matrix(clicks.batch(rows), found.keys).to_dense()
    weight = found.weight.clone().requires_grad_()
    bias = torch.tensor(found.bias, dtype=torch.float64, requires_grad=True)
    label = torch.from_numpy(clicks.label[rows]).double()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(matrix @ weight + bias, label)
    (loss + 0.5 * found.penalty / len(rows) * weight @ weight).backward()
    assert float(weight.grad.abs().max()) < 1e-5
    assert float(bias.grad.abs()) < 1e-5


def test_its_penalty_is_the_best_of_all_on_validation(clicks):
    found = LogisticRegression.fit(clicks)
    valid = clicks.batch(np.flatnonzero(clicks.seq.split == 2))
    label = torch.from_numpy(clicks.label[clicks.seq.split == 2]).double()
    rows = clicks.find_rows(TRAIN)
    train = _build_matrix(clicks.batch(rows), found.keys)
    want = torch.from_numpy(clicks.label[rows]).double()
    losses = {}
    for penalty in PENALTIES:
        solved = _solve(train, want, penalty, torch.zeros(train.shape[1] + 1, dtype=torch.float64))
        logits = _build_matrix(valid, found.keys) @ solved[:-1] + solved[-1]
        losses[penalty] = float(torch.nn.functional.binary_cross_entropy_with_logits(logits, label))
    assert found.penalty == min(losses, key=lambda penalty: losses[penalty])


def test_a_key_that_was_never_trained_on_counts_nothing(clicks):
    found = LogisticRegression.fit(clicks)
    bags = clicks.batch(clicks.find_rows(TEST)[:1])
    bags["user"].values[:] = 12345
    without = dict(bags)
    without["user"] = type(bags["user"])(torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert found.predict(bags) == found.predict(without)


def test_popularity_is_the_smoothed_like_rate_of_the_training_rows(clicks):
    rows, test = clicks.find_rows(TRAIN), clicks.find_rows(TEST)
    label, item = clicks.label[rows], clicks.seq.item[rows]
    chance = predict_baseline("popularity", clicks, test, clicks)
    for at, found in zip(test[:10], chance[:10], strict=True):
        mine = label[item == clicks.seq.item[at]]
        assert found == pytest.approx((mine.sum() + 5 * label.mean()) / (len(mine) + 5))


def test_neighbours_are_rated_by_their_smoothed_like_rates_on_average(clicks):
    options = {"fans": Graph(edges="item-user", k=3), "near": Graph(edges="item-item", k=2, newest=5)}
    seq, n_items = clicks.seq, len(clicks.items.year)
    graphs = Graphs.build(options, seq, n_items, {}, 7)
    clicks = replace(clicks, seq=graphs.attach_to(seq))
    train, test = clicks.find_rows(TRAIN), clicks.find_rows(TEST)
    mean, label = clicks.label[train].mean(), clicks.label[train]

    def rate(node, index):
        of_node = label[node[train] == index]
        return (of_node.sum() + 5 * mean) / (len(of_node) + 5)

    found = predict_baseline("neighbours", clicks, test, clicks)
    drawn = graphs.find_neighbours(options, seq.user[test], seq.item[test], seq.time[test])
    for row in range(0, len(test), 7):
        rates = [rate(seq.user, user) for user in drawn["fans"].drawn[row].tolist()]
        rates += [rate(seq.item, item) for item in drawn["near"].drawn[row].tolist()]
        assert len(rates) == 5
        assert found[row] == pytest.approx(np.mean(rates))
    first = np.array([int(np.argmin(seq.time))])  # before all edges
    assert predict_baseline("neighbours", clicks, first, clicks) == pytest.approx(mean)

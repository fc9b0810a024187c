"""Edges as of a time, and draws from them."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.random import draw_numbers
from nonet.samples.batches.graphs.adjacency import WEIGHT_1, Adjacency, Candidates, Edges

NODES, TARGETS, LAST = 40, 25, 60


def random_edges(n=1500, seed=0):
    draw = np.random.default_rng(seed)
    return Edges(
        draw.integers(0, NODES - 1, n),  # the last node has no edges
        draw.integers(0, TARGETS, n),
        draw.integers(0, LAST, n),
        draw.integers(1, WEIGHT_1 + 1, n),
    )


def build(edges, n_nodes):
    return Adjacency.build(lambda: [edges], n_nodes)


def asked(n=400, seed=1):
    draw = np.random.default_rng(seed)
    return draw.integers(-1, NODES, n), draw.integers(-5, LAST + 5, n)


def drawn_at(adjacency, node, time, *, newest=16, k=10, half_life=None, numbers=None):
    numbers = draw_numbers(7, ("x",), node, time) if numbers is None else numbers
    candidates = Candidates.gather(adjacency, *adjacency.find_known(node, time), newest)
    return candidates.draw(k, half_life, time, numbers)


def test_the_known_edges_of_a_node_are_those_before_the_time():
    edges = random_edges()
    adjacency = build(edges, NODES)
    node, time = asked()
    begin, end = adjacency.find_known(node, time)
    for row in range(len(node)):
        expected = edges.select((edges.source == node[row]) & (edges.time < time[row]))
        found = slice(begin[row], end[row])
        assert sorted(adjacency.target[found]) == sorted(expected.target)
        assert sorted(adjacency.weight[found]) == sorted(expected.weight)
        assert adjacency.time[found].tolist() == sorted(expected.time)


def test_no_edges_and_no_nodes_are_known_to_nobody():
    nothing = Edges(*(np.empty(0, np.int64) for _ in range(4)))
    node, time = np.array([-1, 0]), np.array([5, 5])
    for adjacency in (build(nothing, 3), build(nothing, 0)):
        begin, end = adjacency.find_known(node[: 1 if adjacency.n_nodes == 0 else 2], time[:1])
        assert not (end - begin).any()
        assert len(drawn_at(build(nothing, 3), node, time).values) == 0


def test_a_neighbour_is_drawn_as_often_as_its_share_of_the_decayed_weights():
    time, weight = np.array([0, 10, 20, 30]), np.array([WEIGHT_1, WEIGHT_1, WEIGHT_1 // 2, WEIGHT_1 // 4])
    adjacency = build(Edges(np.zeros(4, np.int64), np.arange(4), time, weight), 1)
    rows, k = 20_000, 5
    node, now = np.zeros(rows, np.int64), np.full(rows, 40)
    numbers = draw_numbers(3, ("shares",), np.arange(rows), now)
    for half_life, decayed in ((None, weight), (10, weight * 0.5 ** ((40 - time) / 10))):
        drawn = drawn_at(adjacency, node, now, k=k, half_life=half_life, numbers=numbers)
        share = np.bincount(drawn.values, minlength=4) / (rows * k)
        assert share == pytest.approx(
            decayed / decayed.sum(), abs=0.004
        )  # standard error of a share: below 0.002


def test_a_neighbour_with_a_whole_share_of_the_draws_is_always_drawn():
    adjacency = build(
        Edges(
            np.zeros(3, np.int64),
            np.arange(3),
            np.array([1, 2, 3]),
            np.array([WEIGHT_1 // 2, 9, WEIGHT_1 // 2]),
        ),
        1,
    )
    rows = 500
    drawn = drawn_at(
        adjacency,
        np.zeros(rows, np.int64),
        np.full(rows, 9),
        k=4,
        numbers=draw_numbers(1, (), np.arange(rows), np.zeros(rows)),
    )
    by_row = drawn.values.reshape(rows, 4)
    assert ((by_row == 0).sum(1) >= 1).all()
    assert ((by_row == 2).sum(1) >= 1).all()


def test_neighbours_are_drawn_from_the_newest_edges_alone():
    adjacency = build(random_edges(), NODES)
    node, time = asked()
    drawn = drawn_at(adjacency, node, time, newest=3)
    begin, end = adjacency.find_known(node, time)
    for row in range(len(node)):
        allowed = set(adjacency.target[max(begin[row], end[row] - 3) : end[row]].tolist())
        found = drawn[row].tolist()
        assert len(found) == (10 if allowed else 0)
        assert set(found) <= allowed


def test_an_edge_of_any_age_can_be_drawn():
    adjacency = build(Edges(*(np.array([v]) for v in (0, 6, 0, 1))), 1)
    drawn = drawn_at(adjacency, np.array([0]), np.array([2**40]), half_life=1, k=2)
    assert drawn.values.tolist() == [6, 6]


def test_the_order_in_which_edges_are_given_changes_nothing():
    edges = random_edges()
    order = np.random.default_rng(5).permutation(len(edges))
    one, other = (build(each, NODES) for each in (edges, edges.select(order)))
    for name in ("offsets", "target", "time", "weight"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def test_added_edges_are_drawn_as_if_they_had_been_there():
    edges = random_edges()
    is_added = np.arange(len(edges)) % 3 == 0
    whole, part = build(edges, NODES), build(edges.select(~is_added), NODES)
    added = edges.select(is_added)
    node, time = asked()
    row, edge = np.nonzero((added.source == node[:, None]) & (added.time < time[:, None]))
    for newest in (4, 64):
        candidates = Candidates.gather(part, *part.find_known(node, time), newest).add(
            row, added.select(edge), newest
        )
        expected = Candidates.gather(whole, *whole.find_known(node, time), newest)
        for name in ("target", "time", "weight", "offsets"):
            assert np.array_equal(getattr(candidates, name), getattr(expected, name))


def test_edges_in_parts_are_sorted_as_one(monkeypatch):
    edges = random_edges()
    whole = build(edges, NODES)
    monkeypatch.setattr("nonet.samples.batches.graphs.adjacency._SORTED_EDGES", 70)
    parts = [edges.select(index) for index in np.array_split(np.arange(len(edges)), 7)]
    in_parts = Adjacency.build(lambda: parts, NODES)
    for name in ("offsets", "target", "time", "weight"):
        assert np.array_equal(getattr(in_parts, name), getattr(whole, name))

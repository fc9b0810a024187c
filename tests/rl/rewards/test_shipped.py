"""The shipped rewards, against MiniOneRec's formulas worked out by hand."""

from __future__ import annotations

from math import log2
from pathlib import Path

import numpy as np
import pytest

from nonet.errors import ConfigError, DataError
from nonet.rl.rewards.api import load_reward
from nonet.rl.rewards.remote import _parse_scores
from nonet.rl.rewards.shipped import hit, novelty, rank
from nonet.types import Jagged

TARGET = Jagged(np.array([30, 7, 8]), np.array([0, 1, 1, 3]))
ITEMS = np.array([[10, 20, 30], [1, 2, 3], [8, 9, 7]])
ALL = np.ones((3, 3), bool)


def test_hit_is_one_for_any_target_of_the_user():
    scores = hit(ITEMS, TARGET, ALL)
    assert scores.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 1]]
    assert scores.dtype == np.float32


def test_rank_blames_confident_misses_and_only_in_groups_with_a_hit():
    gain = [1 / log2(2), 1 / log2(3), 1 / log2(4)]
    total = sum(gain)
    expected = [[-gain[0] / total, -gain[1] / total, 0], [0, 0, 0], [0, -gain[1] / total, 0]]
    assert rank(ITEMS, TARGET, ALL).tolist() == [pytest.approx(row) for row in expected]


def test_positions_of_a_group_without_a_hit_would_sum_to_minus_one():
    items = np.arange(16)[None]
    scores = rank(items, Jagged(np.array([15]), np.array([0, 1])), np.ones((1, 16), bool))
    gain = 1 / np.log2(np.arange(16) + 2)
    assert scores.sum() == pytest.approx(-1 + gain[15] / gain.sum())


def test_missing_beams_are_neither_hits_nor_part_of_the_ranking():
    items = np.array([[5, -1, -1]])
    valid = np.array([[True, False, False]])
    assert hit(items, Jagged(np.array([-1]), np.array([0, 1])), valid).tolist() == [[0, 0, 0]]
    two = rank(
        np.array([[4, 5, -1]]), Jagged(np.array([5]), np.array([0, 1])), np.array([[True, True, False]])
    )
    assert two[0].tolist() == pytest.approx([-1 / (1 + 1 / log2(3)), 0, 0])


def test_text_item_ids_are_compared_as_they_are():
    target = Jagged(np.array(["b", "c"]), np.array([0, 1, 2]))
    assert hit(np.array([["a", "b"], ["b", ""]]), target, np.ones((2, 2), bool)).tolist() == [[0, 1], [0, 0]]


def test_novelty_file_halves_every_half_life():
    scenarios = Path(__file__).parents[3] / "deploy" / "scenarios"
    novelty = load_reward("rewards/novelty.py", scenarios, {"half_life": 10})
    assert list(novelty.columns) == ["events"]
    assert novelty.function(np.array([[0, 10, 20]]), half_life=10).tolist() == [[1.0, 0.5, 0.25]]


@pytest.mark.parametrize("half_life", [0, -1, float("nan")])
def test_novelty_refuses_a_half_life_that_is_not_above_zero(half_life):
    with pytest.raises(ConfigError, match=r"half_life is .*; it is a number of events above 0"):
        novelty(np.array([[0, 10]]), half_life=half_life)


@pytest.mark.parametrize(
    "body", [b'{"scores": [["1","2"]]}', b'[[1, "a"]]', b'{"scores": "1"}', b'[[1], {"a": 2}]']
)
def test_scores_over_http_that_are_no_numbers_are_refused(body):
    with pytest.raises(DataError, match="`scores` that are not a list"):
        _parse_scores("http://judge", body)


def test_scores_over_http_may_be_numbers_booleans_and_null():
    found = _parse_scores("http://judge", b'{"scores": [[1, 2.5], [true, null]]}')
    np.testing.assert_array_equal(found, [[1.0, 2.5], [1.0, np.nan]])

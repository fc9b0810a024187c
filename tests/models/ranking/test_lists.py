"""What lists are like: coverage, Gini, novelty, diversity, calibration, by hand."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from nonet.models.ranking.kinds import ItemCategories
from nonet.models.ranking.lists import ListQuality
from nonet.types import Jagged

NAMES = [["a"], ["a"], ["b"], ["a", "b"], [], ["c"]]


def _jagged(*rows) -> Jagged:
    offsets = np.cumsum([0, *map(len, rows)])
    return Jagged(np.array([i for row in rows for i in row], np.int64), offsets)


def _quality(lists, histories, k=2, names=NAMES, occurs=(8, 4, 2, 1, 0, 1)):
    quality = ListQuality(
        np.array(occurs), k, ItemCategories.from_column(pa.array(names, pa.list_(pa.string())))
    )
    quality.add(np.array(lists), _jagged(*histories))
    return quality.summarise()


def test_coverage_and_gini_count_what_anybody_was_shown():
    same = _quality([[0, 1], [0, 1], [0, 1]], [[0], [0], [0]])
    assert same["coverage@2"] == pytest.approx(2 / 6)
    assert same["gini@2"] == pytest.approx(1 - 2 / 6)
    spread = _quality([[0, 1], [2, 3], [4, 5]], [[0], [0], [0]])
    assert spread["coverage@2"] == 1.0
    assert spread["gini@2"] == pytest.approx(0.0)


def test_novelty_is_bits_of_how_rare_items_are():
    summary = _quality([[0, 4]], [[0]])
    assert summary["novelty@2"] == pytest.approx((-math.log2(9 / 22) - math.log2(1 / 22)) / 2)


def test_diversity_is_one_minus_jaccard_of_categories():
    assert _quality([[0, 1]], [[0]])["diversity@2"] == pytest.approx(0.0)
    assert _quality([[0, 2]], [[0]])["diversity@2"] == pytest.approx(1.0)
    assert _quality([[0, 3]], [[0]])["diversity@2"] == pytest.approx(0.5)
    assert "diversity@2" not in _quality([[0, 4]], [[0]])  # one of the pair has no category


def test_calibration_is_zero_where_a_list_is_like_its_history():
    assert _quality([[0, 2]], [[1, 2]])["calibration@2"] == pytest.approx(0.0, abs=1e-6)  # shares are float32
    assert _quality([[5, 5]], [[0, 1]])["calibration@2"] == pytest.approx(math.log(1 / 0.01))


def test_places_without_an_item_and_lists_beyond_k_do_not_count():
    short = _quality([[0, -1, 3]], [[0]])
    assert short["coverage@2"] == pytest.approx(1 / 6)
    assert short["novelty@2"] == pytest.approx(-math.log2(9 / 22))


def test_without_categories_only_the_rest_is_told():
    summary = _quality([[0, 1]], [[0]], names=[[]] * 6)
    assert set(summary) == {"coverage@2", "gini@2", "novelty@2"}

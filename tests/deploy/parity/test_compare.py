"""What `nonet parity` compares, on arrays whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.deploy.parity.compare import (
    compute_errors,
    compute_kl_divergence,
    compute_overlap,
    compute_total_error,
    get_limits,
)
from nonet.deploy.parity.device_parity import parse_limits
from nonet.errors import ConfigError


def test_an_error_is_relative_to_the_norm_and_keeps_the_order_of_execution():
    a = {"first": np.ones(4, np.float32), "second": np.full(4, 2, np.float32)}
    b = {"second": np.full(4, 2.2, np.float32), "first": np.ones(4, np.float32)}
    first, second = compute_errors(a, b)
    assert (first.name, first.same, first.relative) == ("first", True, 0.0)
    assert (second.name, second.same) == ("second", False)
    assert second.relative == pytest.approx(0.1, rel=1e-6)
    assert second.largest == pytest.approx(0.2, rel=1e-6)


def test_a_module_that_one_side_lacks_or_shapes_otherwise_is_infinitely_far():
    a, b = {"x": np.ones(2), "y": np.ones(2)}, {"x": np.ones(3), "z": np.ones(2)}
    assert [(e.name, e.relative) for e in compute_errors(a, b)] == [(name, np.inf) for name in "xyz"]


def test_gradients_are_held_to_their_limit_as_one_vector():
    a = {"bias": np.array([1e-3]), "weight": np.array([3.0, 4.0])}
    off = {"bias": np.array([2e-3]), "weight": np.array([3.0, 4.0])}
    assert compute_errors(a, off)[0].relative == pytest.approx(1.0)
    assert compute_total_error(a, off) == pytest.approx(1e-3 / 5, rel=1e-6)
    assert compute_total_error(a, a) == 0.0
    assert compute_total_error(a, {"bias": a["bias"]}) == np.inf


def test_divergence_is_the_kl_of_the_two_distributions():
    p, q = np.array([[0.7, 0.2, 0.1], [0.5, 0.5, 0.0]]), np.array([[0.5, 0.3, 0.2], [0.5, 0.5, 0.0]])
    with np.errstate(divide="ignore"):
        found = compute_kl_divergence(np.log(p), np.log(q))
    assert found[0] == pytest.approx((p[0] * np.log(p[0] / q[0])).sum())
    assert found[1] == 0.0


def test_overlap_counts_shared_items_whatever_their_order():
    a = np.array([[5.0, 4, 3, 2], [1, 2, 3, 4]])
    b = np.array([[4.0, 5, 2, 3], [4, 3, 2, 1]])
    assert compute_overlap(a, b, 2) == 0.5
    assert compute_overlap(a, a, 2) == 1.0


def test_scores_that_are_not_a_number_on_either_side_are_beyond_all_limits():
    numbers = np.log(np.full((1, 20), 0.05))
    for broken in (np.full((1, 20), np.nan), np.where(np.arange(20) == 3, np.nan, numbers)):
        for a, b in ((broken, numbers), (numbers, broken), (broken, broken)):
            assert np.isnan(compute_kl_divergence(a, b)).all()
            assert np.isnan(compute_overlap(a, b, 10))


def test_ties_up_to_rounding_are_no_difference_and_a_side_that_knows_nothing_is_one():
    equal = np.full((1, 100), np.log(0.01))
    noise = equal + np.linspace(0, 1e-9, 100)
    assert compute_overlap(equal, noise, 10) == compute_overlap(noise, equal, 10) == 1.0
    distinct = -np.linspace(4.0, 6.0, 100)[None, ::-1]
    assert compute_overlap(equal, distinct, 10) == compute_overlap(distinct, equal, 10) == 0.0


def test_the_limits_of_a_pair_are_those_of_its_lower_precision_and_can_be_set():
    assert get_limits(["fp32", "bf16"]) == get_limits(["bf16", "bf16"])
    assert get_limits(["fp32", "fp32"])["module"] < get_limits(["fp32", "fp16"])["module"]
    assert get_limits(["fp32", "fp32"], {"kl": 0.5})["kl"] == 0.5
    with pytest.raises(
        ConfigError, match="--limit 'speed' is not one of module, gradient, kl, overlap, metric"
    ):
        get_limits(["fp32", "fp32"], {"speed": 1.0})
    assert parse_limits(["kl=1e-3"]) == {"kl": 1e-3}
    with pytest.raises(ConfigError, match="must be NAME=NUMBER"):
        parse_limits(["kl"])

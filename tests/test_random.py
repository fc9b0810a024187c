"""Counter-based draws."""

import numpy as np
import pytest

from nonet.random import draw_first_integers, rng


@pytest.mark.parametrize("high", [1, 2, 50, 400, 2**31 + 5, 4_000_000_000])
def test_draws_of_many_generators_at_once_are_those_of_each(high):
    numbers = np.random.default_rng(0).integers(0, 1 << 40, 500)
    each = [rng(7, "pretrain", "window", 3, number).integers(0, high) for number in numbers.tolist()]
    assert draw_first_integers(7, ("pretrain", "window", 3), numbers, high).tolist() == each


def test_no_numbers_draw_nothing():
    assert draw_first_integers(7, ("a",), np.zeros(0, np.int64), 9).tolist() == []

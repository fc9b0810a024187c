"""Counter-based draws."""

import numpy as np
import pytest

from nonet.random import draw_first_integers, draw_numbers, hash_words, rng


@pytest.mark.parametrize("high", [1, 2, 50, 400, 2**31 + 5, 4_000_000_000])
def test_draws_of_many_generators_at_once_are_those_of_each(high):
    numbers = np.random.default_rng(0).integers(0, 1 << 40, 500)
    each = [rng(7, "pretrain", "window", 3, number).integers(0, high) for number in numbers.tolist()]
    assert draw_first_integers(7, ("pretrain", "window", 3), numbers, high).tolist() == each


def test_no_numbers_draw_nothing():
    assert draw_first_integers(7, ("a",), np.zeros(0, np.int64), 9).tolist() == []


def test_numbers_of_pairs_are_those_of_numpys_philox_at_these_counters():
    draw = np.random.default_rng(0)
    first, second = draw.integers(-(1 << 62), 1 << 62, (2, 50))
    key = hash_words(7, "neighbours", "a")
    found = draw_numbers(7, ("neighbours", "a"), first, second)
    for row in range(50):
        # NumPy increments the counter before it draws.
        counter = np.array([(int(first[row]) - 1) % 2**64, int(second[row]) % 2**64, 0, 0], np.uint64)
        generator = np.random.Philox(key=np.array([key, 0], np.uint64), counter=counter)
        assert int(generator.random_raw()) == int(found[row])

"""Masks as data: their intervals, row by row."""

import pytest
import torch

from nonet.attention.mask import causal, full, intervals
from nonet.errors import ConfigError


def rows_of(mask, n_q, n_k):
    start, stop = mask.intervals(torch.tensor([n_q]), torch.tensor([n_k]), n_q, torch.tensor([0]))
    return [list(range(s, e)) for s, e in zip(start[0, :, 0].tolist(), stop[0, :, 0].tolist(), strict=True)]


def test_causal_rows_end_at_their_own_key():
    assert rows_of(causal(), 3, 3) == [[0], [0, 1], [0, 1, 2]]


def test_causal_window_rows_hold_the_newest_keys():
    assert rows_of(causal(window=2), 4, 4) == [[0], [0, 1], [1, 2], [2, 3]]


def test_the_newest_query_stands_at_the_newest_key():
    assert rows_of(causal(), 2, 4) == [[0, 1, 2], [0, 1, 2, 3]]


def test_full_rows_hold_every_key():
    assert rows_of(full(), 2, 3) == [[0, 1, 2], [0, 1, 2]]


def test_equal_masks_are_equal_and_frozen():
    assert causal(window=2) == causal(window=2) != causal()
    with pytest.raises(AttributeError):
        causal().window = 3


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1 key"):
        causal(window=0)


def test_more_than_four_intervals_a_row_are_refused():
    zeros = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ConfigError, match="5 intervals a row"):
        intervals(zeros, zeros)
    with pytest.raises(ConfigError, match="must both be"):
        intervals(zeros, zeros[:, :2])

"""The oracle of the kernels against numbers that are worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from nonet.attention.masks.mask import UniMask
from nonet.bench.attention.dense_reference import attend_reference


def attended(mask, scores, values, **options):
    """One sequence, one head of width 1: scores are q * k with every q 1, so keys are the scores."""
    count = len(scores)
    q, k, v = (
        torch.tensor(x, dtype=torch.float64).view(count, 1, 1) for x in ([1.0] * count, scores, values)
    )
    out, lse = attend_reference(q, k, v, mask.build_table(torch.tensor([0, count])), scale=1.0, **options)
    return out.flatten().tolist(), lse.flatten().tolist()


def test_weights_are_the_softmax_of_what_is_seen():
    out, lse = attended(UniMask.causal(), [0.0, math.log(3), 0.0], [10.0, 20.0, 30.0])
    assert out == pytest.approx([10.0, (10 + 3 * 20) / 4, (10 + 3 * 20 + 30) / 5])
    assert lse == pytest.approx([0.0, math.log(4), math.log(5)])


def test_a_row_that_sees_nothing_answers_zero():
    start, stop = torch.tensor([[0], [0], [0]]), torch.tensor([[1], [0], [3]])
    out, lse = attended(UniMask.intervals(start, stop), [0.0, 0.0, 0.0], [10.0, 20.0, 30.0])
    assert out == pytest.approx([10.0, 0.0, 20.0])
    assert lse == pytest.approx([0.0, -math.inf, math.log(3)])


def test_silu_weights_are_divided_by_the_length_the_model_is_built_for():
    out, _ = attended(UniMask.full(), [1.0, 1.0], [10.0, 30.0], activation="silu", scaling_length=4.0)
    assert out == pytest.approx([40 / (1 + math.exp(-1)) / 4] * 2)

"""The embedding modules on sparse worlds of several processes."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def ranks(forked):
    return forked("collection_scenarios.py", 3)


def test_two_shards_apart_give_the_bits_of_one_process(ranks):
    assert ranks[0]["apart"] == ranks[0]["single"]


def test_two_fused_trainers_learn_what_one_does(ranks):
    single, fused = ranks[0]["single"], [ranks[rank]["fused"] for rank in (0, 1)]
    assert fused[0]["read"] == fused[1]["read"]
    # A key's gradients are summed on each rank first: another order of float32 additions, over 6 steps.
    assert fused[0]["close"] == pytest.approx(single["close"], rel=1e-5, abs=1e-4)
    steps = [first + second for first, second in zip(fused[0]["seen"], fused[1]["seen"], strict=True)]
    assert steps == pytest.approx(single["seen"], rel=1e-5, abs=1e-4)

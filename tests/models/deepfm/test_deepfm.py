"""DeepFM: its three parts add up."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from nonet.errors import ConfigError
from nonet.models.deepfm.deepfm import DeepFM
from nonet.random import rng

DIMS = {"user": 5, "item": 5, "hour": 5}


def pooled(rows=7):
    draw = rng(1, "rows")
    return {name: torch.from_numpy(draw.standard_normal((rows, 5), np.float32)) for name in DIMS}


def test_first_order_pairs_and_mlp_add_up():
    model, rows = DeepFM(DIMS, hidden=(6,), seed=3).eval(), pooled()
    first = sum(value[:, 0] for value in rows.values())
    pairs = sum((rows[a][:, 1:] * rows[b][:, 1:]).sum(1) for a, b in combinations(DIMS, 2))
    deep = model.mlp(torch.cat([rows[name][:, 1:] for name in DIMS], 1))[:, 0]
    # Square of sum minus sum of squares cancels: a few units of float32 rounding at values near 10.
    torch.testing.assert_close(model(rows), model.bias + first + pairs + deep, rtol=1e-5, atol=1e-5)


def test_the_seed_alone_decides_where_it_starts():
    one, same, other = (DeepFM(DIMS, seed=seed).eval()(pooled()) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_tables_of_different_widths_are_refused():
    with pytest.raises(ConfigError, match="one dim"):
        DeepFM({"user": 4, "item": 8})
    with pytest.raises(ConfigError, match="at least 2"):
        DeepFM({"user": 1})


def test_hidden_matrices_leave_the_last_layer_out():
    assert [tuple(m.shape) for m in DeepFM(DIMS, hidden=(6, 4)).hidden_matrices()] == [(6, 12), (4, 6)]

"""Pairs of preferred and other beams."""

from __future__ import annotations

import torch

from nonet.rl.pairs import compute_preference_loss


def test_a_tie_does_not_count_as_preferred():
    logp_UW = torch.tensor([[0.5, 0.5]])
    found = compute_preference_loss(torch.tensor([0.5]), logp_UW, torch.tensor([[False, True]]), 1.0)
    assert float(found.more["preferred"]) == 0

"""The policy loss against numbers worked out by hand."""

from __future__ import annotations

from math import exp, log, sqrt

import pytest
import torch

from nonet.errors import ConfigError
from nonet.random import rng
from nonet.rl.loss import compute_policy_loss


def beams(ratios, **more):
    """One user, beams [W] of L levels with these ratios to an old log-probability of -1."""
    old = torch.full((1, len(ratios), len(ratios[0])), -1.0, dtype=torch.float64)
    logp = (old + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    return logp, old


ALL2 = torch.ones(1, 2, dtype=torch.bool)


def test_token_loss_clips_gains_and_not_losses():
    logp, old = beams([[1.5, 0.5], [1.5, 0.5]])
    result = compute_policy_loss(logp, old, torch.tensor([[2.0, -1.0]]), ALL2, clip=[0.2, 0.28])
    # A = 2: 2 * (min(1.5, 1.28) + min(0.5, 0.8)) = 3.56;  A = -1: min(-1.5, -1.28) + min(-0.5, -0.8) = -2.3
    assert result.loss.item() == pytest.approx(-(3.56 - 2.3), abs=1e-12)
    assert (int(result.count), int(result.clipped)) == (4, 2)
    assert result.ratio.item() == pytest.approx(4.0)
    result.loss.backward()
    # d(-ratio * A) = -ratio * A where not clipped, else 0
    assert logp.grad.tolist() == [[pytest.approx([0.0, -1.0]), pytest.approx([1.5, 0.0])]]


def test_a_scalar_clip_is_symmetric_and_none_does_not_clip():
    logp, old = beams([[1.5, 0.5]])
    advantage, valid = torch.tensor([[2.0]]), torch.ones(1, 1, dtype=torch.bool)
    assert compute_policy_loss(logp, old, advantage, valid, clip=0.2).loss.item() == pytest.approx(
        -2 * (1.2 + 0.5)
    )
    assert compute_policy_loss(logp, old, advantage, valid, clip=None).loss.item() == pytest.approx(
        -2 * (1.5 + 0.5)
    )
    negative = compute_policy_loss(logp, old, -advantage, valid, clip=0.2)
    assert negative.loss.item() == pytest.approx(2 * (1.5 + 0.8))


def test_kl_is_the_k3_estimate_of_each_token():
    logp, old = beams([[1.0, 1.0], [1.0, 1.0]])
    ref = old + torch.tensor([[[log(2), 0.0], [-log(4), 0.0]]], dtype=torch.float64)
    result = compute_policy_loss(logp, old, torch.zeros(1, 2), ALL2, ref_UWL=ref, kl=0.1)
    k3 = (2 - log(2) - 1) + (0.25 + log(4) - 1)
    assert result.kl.item() == pytest.approx(k3)
    assert result.loss.item() == pytest.approx(0.1 * k3)
    result.loss.backward()
    # d k3 / d logp = 1 - exp(ref - logp)
    assert logp.grad[0, :, 0].tolist() == pytest.approx([0.1 * (1 - 2), 0.1 * (1 - 0.25)])
    watched = compute_policy_loss(logp, old, torch.zeros(1, 2), ALL2, ref_UWL=ref, kl=0.0)
    assert (watched.loss.item(), watched.kl.item()) == (0.0, pytest.approx(k3))


def test_sequence_loss_has_one_ratio_a_beam():
    logp, old = beams([[1.5, 0.5], [4.0, 1.0]])
    ref = old.clone()
    result = compute_policy_loss(
        logp, old, torch.tensor([[1.0, -1.0]]), ALL2, ref_UWL=ref, clip=0.2, kl=0.5, level="sequence"
    )
    # geometric means sqrt(0.75) (not clipped for A = 1) and 2 (not clipped for A = -1)
    k3 = [(1 / r - 1 + log(r)) for r in (1.5, 0.5, 4.0, 1.0)]
    gain = sqrt(0.75) - 2.0
    assert result.loss.item() == pytest.approx(-gain + 0.5 * (k3[0] + k3[1] + k3[2] + k3[3]) / 2)
    assert (int(result.count), int(result.clipped)) == (2, 0)
    assert result.kl.item() == pytest.approx(sum(k3) / 2)


def test_one_update_a_rollout_is_the_plain_policy_gradient():
    logp = torch.tensor([[[-1.0, -2.0], [-0.5, -0.1]]], requires_grad=True)
    advantage = torch.tensor([[1.5, -0.5]])
    result = compute_policy_loss(logp, logp.detach(), advantage, ALL2, clip=0.2)
    assert result.loss.item() == pytest.approx(-2 * (1.5 - 0.5))
    result.loss.backward()
    assert logp.grad.tolist() == [[[-1.5, -1.5], [0.5, 0.5]]]


def test_invalid_beams_count_for_nothing_even_when_they_are_nan():
    logp = torch.tensor([[[-1.0, -1.0], [torch.nan, torch.nan]]], requires_grad=True)
    old = torch.tensor([[[-1.0, -1.0], [0.0, torch.nan]]])
    valid = torch.tensor([[True, False]])
    advantage = torch.tensor([[1.0, torch.nan]])
    result = compute_policy_loss(logp, old, advantage, valid, ref_UWL=old, kl=0.1)
    assert (result.loss.item(), int(result.count), result.kl.item()) == (-2.0, 2, 0.0)
    result.loss.backward()
    assert logp.grad.tolist() == [[[-1.0, -1.0], [0.0, 0.0]]]


def test_sums_and_counts_over_micro_batches_equal_the_whole_batch():
    g = rng(4, "loss")
    logp, old, ref = (torch.from_numpy(-g.random((6, 4, 3))) for _ in range(3))
    advantage, valid = torch.from_numpy(g.standard_normal((6, 4))), torch.from_numpy(g.random((6, 4)) < 0.7)
    for level in ("token", "sequence"):
        parts = [
            compute_policy_loss(logp[s], old[s], advantage[s], valid[s], ref_UWL=ref[s], kl=0.1, level=level)
            for s in (slice(0, 1), slice(1, 4), slice(4, 6))
        ]
        whole = compute_policy_loss(logp, old, advantage, valid, ref_UWL=ref, kl=0.1, level=level)
        for name in ("loss", "count", "kl", "clipped", "ratio"):
            assert float(sum(getattr(part, name) for part in parts)) == pytest.approx(
                float(getattr(whole, name))
            )
        assert int(whole.count) == int(valid.sum()) * (3 if level == "token" else 1)


def test_a_far_reference_does_not_overflow():
    logp, old = torch.tensor([[[-200.0]]], requires_grad=True), torch.tensor([[[-100.0]]])
    valid = torch.ones(1, 1, dtype=torch.bool)
    ref = torch.zeros(1, 1, 1)
    result = compute_policy_loss(logp, old, torch.ones(1, 1), valid, ref_UWL=ref, kl=1.0)
    assert result.kl.item() == pytest.approx(exp(20) - 21, rel=1e-6)
    result.loss.backward()
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_far_old_policy_does_not_overflow(advantage):
    logp, old = torch.tensor([[[-1.0]]], requires_grad=True), torch.tensor([[[-200.0]]])
    result = compute_policy_loss(logp, old, torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool))
    expected = -1.2 if advantage > 0 else exp(20)
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    result.loss.backward()
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl": 0.1}, "there is no reference model"),
        ({"clip": [0.0, 0.2]}, r"algorithm.clip is \[0.0, 0.2\]"),
        ({"clip": -0.1}, "algorithm.clip is -0.1"),
        ({"level": "word"}, "'word'; it can be 'token', 'sequence' or 'item'"),
    ],
)
def test_wrong_options_are_named(options, message):
    logp, old = beams([[1.0], [1.0]])
    with pytest.raises(ConfigError, match=message):
        compute_policy_loss(logp, old, torch.zeros(1, 2), ALL2, **options)

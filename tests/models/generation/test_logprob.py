"""Constrained log-probabilities: they sum to one, equal the rollout's, and carry the right gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nonet.errors import DataError
from nonet.models.generation.beams import search_beams
from nonet.models.generation.logprob import (
    SortedLeaves,
    compute_path_log_probs,
    legal_log_softmax,
    log_prob,
    log_prob_from,
)
from nonet.models.generation.trie import Trie

CODES = (6, 5, 4, 3)


def test_probabilities_of_all_legal_leaves_sum_to_one(make_model, make_cache, make_sids):
    for seed in range(5):
        sids = make_sids(CODES, 120, seed=seed)
        chosen = np.arange(seed, 120, seed + 1)
        trie = Trie.build(sids, CODES, items=chosen)
        every = torch.from_numpy(sids[chosen]).expand(7, -1, -1)
        logp = log_prob_from(make_model(CODES, seed=seed), make_cache(7, seed=seed), every, trie)
        assert logp.sum(-1).exp().sum(1).tolist() == pytest.approx([1.0] * 7, abs=1e-12)


def test_log_prob_equals_brute_force(make_model, make_cache, make_sids, brute_force):
    sids = make_sids(CODES, 80)
    model, cache = make_model(CODES), make_cache(3)
    logp = log_prob_from(model, cache, torch.from_numpy(sids[None].repeat(3, 0)), Trie.build(sids, CODES))
    oracle = brute_force(model, cache, sids, range(80))
    for user in range(3):
        for item in range(0, 80, 7):
            expected = oracle.log_prob(user, tuple(sids[item].tolist()))
            assert logp[user, item].tolist() == pytest.approx(expected, abs=1e-12)


def test_log_prob_of_a_beam_is_the_beam_s_own(make_model, make_cache, make_sids):
    codes = (64, 64, 64, 4)
    trie = Trie.build(make_sids(codes, 3000), codes)
    model = make_model(codes, width=32, dtype=torch.float32)
    cache = make_cache(64, width=32, dtype=torch.float32)
    beams = search_beams(model, cache, trie, 16)
    again = log_prob(model, None, {"user": cache.state}, beams.sid, trie).detach()
    assert beams.logp.dtype == again.dtype == torch.float32
    relative = (again - beams.logp).abs() / beams.logp.abs().clamp_min(1.0)
    assert relative.max() <= 1e-6


def test_a_missing_beam_reads_zero_and_carries_no_gradient(make_model, make_cache, make_sids):
    sids = make_sids(CODES, 40)
    model, cache = make_model(CODES), make_cache(2)
    some = torch.from_numpy(np.stack([sids[:3], sids[3:6]])).long()
    some[1, 1:] = -1
    logp = log_prob_from(model, cache, some, Trie.build(sids, CODES))
    assert (logp[1, 1:] == 0).all()
    logp[1, 1:].sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())
    log_prob_from(model, cache, some, Trie.build(sids, CODES)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_rank_without_prompts_has_a_loss_to_differentiate(make_model, make_cache, make_sids):
    trie, model, cache = Trie.build(make_sids(CODES, 40), CODES), make_model(CODES), make_cache(0)
    none = SortedLeaves.of(trie, torch.zeros(0, 3, dtype=torch.int64))
    compute_path_log_probs(model, cache, trie, none).sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())
    with torch.no_grad():
        assert compute_path_log_probs(model, cache, trie, none).shape == (0, 3, len(CODES))


def test_gradient_equals_finite_differences(make_model, make_cache, make_sids):
    sids = make_sids(CODES, 60)
    trie, model, cache = Trie.build(sids, CODES), make_model(CODES), make_cache(2)
    chosen = torch.from_numpy(sids[None, :4].repeat(2, 0))
    log_prob_from(model, cache, chosen, trie).sum().backward()
    bias = model.head[1].bias
    for code in range(CODES[1]):
        values = []
        for shift in (1e-6, -2e-6, 1e-6):  # up, down, back
            with torch.no_grad():
                bias[code] += shift
                values.append(float(log_prob_from(model, cache, chosen, trie).sum()))
        assert float(bias.grad[code]) == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-6)


def test_a_sid_outside_the_catalogue_is_refused_by_name(make_model, make_cache, make_sids):
    sids = make_sids(CODES, 40)
    trie = Trie.build(sids, CODES, items=np.arange(1, 40))
    chosen = torch.from_numpy(np.stack([sids[1:3], sids[[2, 0]]]))
    sid = tuple(int(c) for c in sids[0])
    with pytest.raises(DataError) as error:
        log_prob_from(make_model(CODES), make_cache(2), chosen, trie)
    assert f"SID {sid} (prompt 1, beam 1) is not in catalogue {trie.version}; 1 beams are not" in str(
        error.value
    )


def test_illegal_codes_get_no_probability_and_half_precision_is_computed_in_float32():
    logits = torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.bfloat16)
    logp = legal_log_softmax(logits, torch.tensor([[True, True, False]]))
    assert logp.dtype == torch.float32
    assert logp[0].tolist() == pytest.approx([-0.3132617, -1.3132617, -np.inf])

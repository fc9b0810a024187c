"""Exact figures of a policy over all items, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nonet.bench.rl.exact import compute_expected_reward
from nonet.models.generation import MEMORY_WEIGHTS, Trie, Votes, attach
from nonet.models.generation.logprob import log_prob_from
from nonet.random import rng

CODES, ITEMS, USERS = (5, 4, 3), 40, 6


@pytest.fixture
def world(make_sids, make_model, make_cache):
    sids = make_sids(CODES, ITEMS)
    model = make_model(CODES)
    return model, make_cache(USERS), Trie.build(sids, CODES), torch.from_numpy(sids).long()


def test_the_expected_reward_and_its_gradient_are_those_of_every_item_by_itself(world):
    model, cache, trie, sids = world
    draw = rng(1, "rewards")
    reward = torch.from_numpy(draw.standard_normal((USERS, ITEMS)))
    allowed = torch.from_numpy(draw.random((USERS, ITEMS)) < 0.7)
    logp = log_prob_from(model, cache, sids.expand(USERS, -1, -1), trie).sum(-1)
    chance = torch.where(allowed, logp.exp(), 0.0)
    brute = (chance * reward).sum(1) / chance.sum(1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(brute.sum(), parameters, allow_unused=True)
    exact = compute_expected_reward(model, cache, trie, None, reward, allowed)
    got = torch.autograd.grad(exact.sum(), parameters, allow_unused=True)
    assert exact.detach().numpy() == pytest.approx(brute.detach().numpy(), abs=1e-9)
    whole = [torch.cat([g.reshape(-1) for g in grads if g is not None]) for grads in (wanted, got)]
    assert float((whole[1] - whole[0]).norm() / whole[0].norm()) <= 1e-6
    assert float(whole[0].norm()) > 1e-3


def test_what_is_expected_of_a_constant_is_the_constant_whatever_is_voted_or_allowed(world):
    model, cache, trie, _ = world
    attach(model)
    getattr(model, MEMORY_WEIGHTS).copy_(torch.tensor([0.3, 0.5, 1.0]))
    leaf = np.sort(rng(2, "votes").permutation(trie.n_leaves)[:7])
    votes = Votes(torch.from_numpy(leaf).repeat(USERS, 1), torch.full((USERS, 7), 1 / 7))
    allowed = torch.ones(USERS, ITEMS, dtype=torch.bool)
    allowed[0], allowed[1, 3:] = False, False
    found = compute_expected_reward(model, cache, trie, votes, torch.full((USERS, ITEMS), 2.5), allowed)
    assert found.tolist() == pytest.approx([0.0, *[2.5] * (USERS - 1)], abs=1e-5)

"""A model and its memory are one distribution, the same in beams, exhaustive scores and log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nonet.models.generation.beams import search_beams
from nonet.models.generation.exhaustive import mix_votes, score_items, select_top_items
from nonet.models.generation.fitting import HeldOutVotes, fit, fit_signals
from nonet.models.generation.logprob import SortedLeaves, compute_path_log_probs, find_leaves, log_prob_from
from nonet.models.generation.memory import (
    MEMORY_WEIGHTS,
    attach,
    get_signal_weights,
    remember,
    set_signal_weights,
)
from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import Votes
from nonet.random import rng
from nonet.types import Jagged
from nonet.workers.weight_files import _match_optional_weights

CODES = (6, 5, 4, 3)
USERS, ITEMS = 9, 150


@pytest.fixture
def trie(make_sids) -> Trie:
    return Trie.build(make_sids(CODES, ITEMS), CODES)


@pytest.fixture
def remembering(make_model):
    """Make a model with a memory of weights (l, b, c)."""

    def make(weights=(0.3, 0.5, 1.0), **options):
        model = make_model(CODES, **options)
        attach(model)
        getattr(model, MEMORY_WEIGHTS).copy_(torch.tensor(weights))
        return model

    return make


def _votes(trie: Trie, users: int = USERS, width: int = 12) -> Votes:
    """Random ones; the first user has none, the second fewer than others."""
    draw = rng(3, "votes")
    leaf = np.sort(np.stack([draw.choice(trie.n_leaves, width, replace=False) for _ in range(users)]), 1)
    weight = draw.random((users, width)) + 0.01
    leaf[0], weight[0] = -1, 0
    leaf[1, 5:], weight[1, 5:] = -1, 0
    total = np.maximum(weight.sum(1, keepdims=True), 1e-12)
    return Votes(torch.from_numpy(leaf), torch.from_numpy((weight / total).astype(np.float32)))


def _expected(logp_UI: torch.Tensor, votes: Votes, trie: Trie, l, b, c) -> np.ndarray:  # noqa: E741
    """Evaluate the formula item by item."""
    p = logp_UI.exp().detach().numpy()
    out = p.copy()
    for user in range(len(p)):
        there = votes.leaf[user] >= 0
        if not there.any():
            continue
        items = trie.item_of_leaf[votes.leaf[user][there].numpy()]
        q = p[user, items] ** b * votes.weight[user][there].numpy().astype(np.float64) ** c
        out[user] *= 1 - l
        out[user, items] += l * q / q.sum()
    return np.log(out)


@pytest.mark.parametrize("weights", [(0.3, 0.5, 1.0), (0.2, 0.0, 1.0), (0.6, 1.0, 0.5), (0.0, 0.5, 1.0)])
def test_scores_are_the_formula_and_sum_to_one(remembering, make_cache, trie, weights):
    model, cache, votes = remembering(weights), make_cache(USERS), _votes(trie)
    plain = score_items(model, cache, trie)
    scores = mix_votes(model, trie, plain, votes)
    weights = [float(x) for x in np.float32(weights)]
    assert scores.numpy() == pytest.approx(_expected(plain, votes, trie, *weights), abs=1e-6)
    assert scores.exp().sum(1).tolist() == pytest.approx([1.0] * USERS, abs=1e-6)
    assert torch.equal(scores[0], plain[0])  # nobody votes: the model alone


def test_levels_sum_to_the_score_of_the_item_and_each_is_a_distribution(remembering, make_cache, trie):
    model, cache, votes = remembering(), make_cache(USERS), _votes(trie)
    every = torch.arange(trie.n_leaves).expand(USERS, -1)
    memory, _, logp_UIL = remember(model, cache, trie, votes, every)
    mixed = memory.mix_levels(trie, every, logp_UIL)
    item = torch.from_numpy(trie.item_of_leaf)
    scores = mix_votes(model, trie, score_items(model, cache, trie), votes)[:, item]
    assert torch.allclose(mixed.sum(-1), scores, atol=1e-6, rtol=0)
    for level in range(trie.levels):
        first = trie.get_first_leaf(level)[:-1]
        child_first = trie.get_first_leaf(level + 1)[:-1]
        for node in range(0, trie.n_nodes[level], 7):
            children = np.arange(trie.first_child[level][node], trie.first_child[level][node + 1])
            leaves = child_first[children]
            assert leaves[0] == first[node]
            assert mixed[:, leaves, level].exp().sum(1).tolist() == pytest.approx([1.0] * USERS, abs=1e-6)


def test_paths_are_scored_as_log_prob_scores_them_each_node_once(remembering, make_cache, trie, make_sids):
    model, cache = remembering(), make_cache(USERS)
    draw = rng(4, "leaves")
    leaf = torch.from_numpy(
        draw.integers(-1, trie.n_leaves, (USERS, 20))
    )  # twice the same, none, out of order
    codes = trie.decode_prefixes(trie.levels, leaf.clamp_min(0).flatten()).unflatten(0, leaf.shape)
    expected = log_prob_from(model, cache, codes.masked_fill(leaf.unsqueeze(-1) < 0, -1), trie)
    model.steps = 0
    logp = compute_path_log_probs(model, cache, trie, SortedLeaves.of(trie, leaf))
    assert torch.allclose(logp, expected, atol=1e-12, rtol=0)
    assert model.steps <= USERS * sum(int((np.diff(first) > 1).sum()) for first in trie.first_child)
    assert torch.equal(find_leaves(codes.masked_fill(leaf.unsqueeze(-1) < 0, -1), trie), leaf)


@pytest.mark.parametrize("width", [1, 5, 130])
def test_merged_beams_are_the_best_of_all_items(remembering, make_cache, trie, jagged, width):
    """Where the model's own beams are: a wide model beam makes them so."""
    model, cache, votes = remembering(spread=12.0), make_cache(USERS), _votes(trie)
    hidden = [[int(i) for i in rng(9, u).choice(ITEMS, 20, replace=False)] for u in range(USERS)]
    leaf = votes.leaf.clone()
    for user, items in enumerate(hidden):  # who votes never votes for what is hidden
        leaf[user][torch.isin(leaf[user], torch.from_numpy(trie.leaf_of_item[items]))] = -1
    weight = votes.weight.masked_fill(leaf < 0, 0.0)
    order = leaf.masked_fill(leaf < 0, 1 << 30).argsort(1)
    votes = Votes(leaf.gather(1, order), weight.gather(1, order))
    forbidden = jagged(hidden)
    scores = mix_votes(model, trie, score_items(model, cache, trie), votes)
    best = select_top_items(scores, width, forbidden)
    beams = search_beams(model, cache, trie, width, forbidden=forbidden, votes=votes)
    alone = search_beams(model, cache, trie, width, forbidden=forbidden)
    exact = alone.item == select_top_items(score_items(model, cache, trie), width, forbidden)
    users = exact.all(1)
    assert int(users.sum()) >= 3
    assert torch.equal(beams.item[users], best[users])
    assert torch.allclose(
        beams.logp.sum(-1)[users].double(), scores.gather(1, best)[users].double(), atol=1e-6, rtol=0
    )


def test_gradients_go_through_the_model_and_through_what_it_remembers(remembering, make_cache, trie):
    model, cache, votes = remembering(), make_cache(USERS), _votes(trie)
    leaf = votes.leaf[2:3, :1].expand(USERS, 1)

    def loss() -> torch.Tensor:
        memory, _, logp = remember(model, cache, trie, votes, leaf)
        return memory.mix_levels(trie, leaf, logp).sum()

    parameters = [p for p in model.parameters() if p.requires_grad]
    gradient = torch.autograd.grad(loss(), parameters, allow_unused=True)
    at = next(i for i, g in enumerate(gradient) if g is not None and float(g.abs().max()) > 1e-3)
    place = int(gradient[at].abs().argmax())
    step = 1e-5
    with torch.no_grad():
        flat = parameters[at].view(-1)
        flat[place] += step
        above = float(loss())
        flat[place] -= 2 * step
        below = float(loss())
    assert (above - below) / (2 * step) == pytest.approx(float(gradient[at].view(-1)[place]), rel=1e-4)


@pytest.mark.parametrize("g", [(0.0, 0.0), (1.5, 0.4)])
def test_scores_with_signals_are_the_formula_and_sum_to_one(remembering, make_cache, trie, g):
    model, cache, votes = remembering((0.3, 0.5, 1.0)), make_cache(USERS), _votes(trie)
    attach(model, signals=("title", "kinds"))
    getattr(model, MEMORY_WEIGHTS).copy_(torch.tensor((0.3, 0.5, 1.0)))
    set_signal_weights(model, g)
    similarity = torch.from_numpy(rng(8, "similarity").random((*votes.leaf.shape, 2)).astype(np.float32))
    plain = score_items(model, cache, trie)
    with_signals = replace(votes, similarity=similarity)
    scores = mix_votes(model, trie, plain, with_signals)
    # exp(g s) is a factor of the votes, to the power c = 1.
    factor = votes.weight * (similarity * torch.tensor(g)).sum(-1).exp()
    same = Votes(votes.leaf, factor / factor.sum(1, keepdim=True).clamp_min(1e-12))
    assert scores.numpy() == pytest.approx(_expected(plain, same, trie, 0.3, 0.5, 1.0), abs=1e-5)
    assert scores.exp().sum(1).numpy() == pytest.approx(1.0, abs=1e-6)
    found = search_beams(model, cache, trie, ITEMS, votes=with_signals)
    best = select_top_items(scores, 10, Jagged(np.empty(0, np.int64), np.zeros(USERS + 1, np.int64)))
    assert found.item[:, :10].tolist() == best.tolist()


def test_weights_of_signals_follow_their_names(make_model):
    first, second = make_model(CODES), make_model(CODES)
    attach(first, signals=("title", "kinds"))
    attach(second, signals=("kinds", "brand", "title"))
    set_signal_weights(first, (1.0, 6.0))
    weights = _match_optional_weights(dict(second.state_dict()), dict(first.state_dict()))
    second.load_state_dict(weights)
    assert get_signal_weights(second) == [6.0, 0.5, 1.0]


def test_the_fit_finds_the_weights_of_signals_that_made_the_events():
    draw = rng(7, "fit")
    users, items = 4000, 30
    logp = np.log(draw.dirichlet(np.full(items, 0.3), users))
    votes = draw.dirichlet(np.full(12, 0.5), users)
    similarity = draw.random((users, 12, 2)) * 2
    g = (1.3, 0.7)
    q = np.exp(0.5 * logp[:, :12]) * votes * np.exp(similarity @ np.array(g))
    chance = 0.4 * np.exp(logp)
    chance[:, :12] += 0.6 * q / q.sum(1, keepdims=True)
    target = np.array([draw.choice(items, p=row / row.sum()) for row in chance])
    place = np.where(target < 12, target, -1)
    held = HeldOutVotes(
        logp[np.arange(users), target], logp[:, :12], votes, place, np.zeros_like(votes), similarity
    )

    def likelihood(candidates, weights):
        return held.weigh_signals(weights).compute_likelihood(candidates)

    start = fit(lambda candidates: likelihood(candidates, (0.0, 0.0)))
    found, weights = fit_signals(likelihood, start, 2)
    assert likelihood([found], weights)[0] >= likelihood([(0.6, 0.5, 1.0)], g)[0] - 1.0
    assert weights == pytest.approx(g, abs=0.25)
    halves = [
        HeldOutVotes(
            held.target[s], held.leaves[s], held.votes[s], held.place[s], held.nearest[s], similarity[s]
        )
        for s in (slice(0, 999), slice(999, None))
    ]
    joined = HeldOutVotes.joined(halves).weigh_signals(weights)
    assert joined.compute_likelihood([found])[0] == likelihood([found], weights)[0]


def test_the_fit_finds_the_weights_that_made_the_events():
    draw = rng(6, "fit")
    users, items = 4000, 30
    logp = np.log(draw.dirichlet(np.full(items, 0.3), users))
    votes = draw.dirichlet(np.full(12, 0.5), users)
    l, b, c = 0.4, 0.5, 1.0  # noqa: E741
    q = np.exp(b * logp[:, :12]) * votes**c
    chance = (1 - l) * np.exp(logp)
    chance[:, :12] += l * q / q.sum(1, keepdims=True)
    target = np.array([draw.choice(items, p=row / row.sum()) for row in chance])
    place = np.where(target < 12, target, -1)
    held = HeldOutVotes(logp[np.arange(users), target], logp[:, :12], votes, place, np.zeros_like(votes))
    found = fit(held.compute_likelihood)
    assert held.compute_likelihood([found])[0] >= held.compute_likelihood([(l, b, c)])[0]
    assert found[0] == pytest.approx(l, abs=0.06)
    halves = [
        HeldOutVotes(held.target[s], held.leaves[s], held.votes[s], held.place[s], held.nearest[s])
        for s in (slice(0, 999), slice(999, None))
    ]
    summed = fit(lambda candidates: sum(half.compute_likelihood(candidates) for half in halves))
    assert summed == found
    joined = HeldOutVotes.joined(halves)
    assert joined.compute_likelihood([found])[0] == held.compute_likelihood([found])[0]

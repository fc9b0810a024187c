"""The items nearest to a user's state vote beside transitions, and all of it stays one distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from nonet.models.generation.beams import search_beams
from nonet.models.generation.exhaustive import mix_votes, score_items, select_top_items
from nonet.models.generation.memory import MEMORY_WEIGHTS, attach, remember
from nonet.models.generation.nearest import ItemRows, NearestItems, compute_nearest_loss, query
from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import Votes, merge_votes, mix_vote_shares
from nonet.random import rng
from nonet.types import Jagged, SampleBatch

CODES = (6, 5, 4)
USERS, ITEMS, WIDTH, ROW = 7, 90, 10, 5


@pytest.fixture
def trie(make_sids) -> Trie:
    return Trie.build(make_sids(CODES, ITEMS), CODES)


@pytest.fixture
def model(make_model):
    model = make_model(CODES, spread=8.0)
    model.width = 8
    attach(model, 3, ROW)
    getattr(model, MEMORY_WEIGHTS).copy_(torch.tensor([0.4, 0.5, 1.0, 0.3]))
    return model.double()


@pytest.fixture
def hidden() -> Jagged:
    each = [np.sort(rng(9, u).choice(ITEMS, u, replace=False)) for u in range(USERS)]
    return Jagged(np.concatenate(each), np.cumsum([0, *map(len, each)]))


@pytest.fixture
def votes(trie, hidden) -> Votes:
    """Transitions vote for a few leaves that are not hidden, but for the first user; all items but ten have rows."""
    leaf, weight = np.full((USERS, 6), -1, np.int64), np.zeros((USERS, 6), np.float32)
    for user in range(1, USERS):
        allowed = np.setdiff1d(trie.leaf_of_item, trie.leaf_of_item[hidden[user]])
        leaf[user] = np.sort(rng(2, user).choice(allowed, 6, replace=False))
        weight[user] = rng(2, user, "weight").dirichlet(np.ones(6))
    rows = ItemRows(torch.arange(ITEMS - 10), torch.from_numpy(rng(4).standard_normal((ITEMS - 10, ROW))))
    nearest = NearestItems.of(rows, np.asarray(trie.leaf_of_item), hidden, WIDTH)
    return Votes(torch.from_numpy(leaf), torch.from_numpy(weight), nearest)


def test_the_nearest_items_are_those_of_the_largest_product_that_are_not_hidden(
    model, make_cache, votes, trie, hidden
):
    state = make_cache(USERS).state
    leaf, vote = votes.nearest.compute_votes(model, state)
    logits = (query(model, state) @ votes.nearest.rows.row.T).detach()
    for user in range(USERS):
        mine = logits[user].clone()
        barred = trie.leaf_of_item[hidden[user]]
        mine[barred[barred < len(mine)]] = -torch.inf
        best, at = mine.sort(descending=True)
        assert leaf[user].tolist() == at[:WIDTH].tolist()
        assert vote[user].tolist() == pytest.approx(best[:WIDTH].softmax(0).tolist())


def test_a_leaf_that_both_vote_for_is_there_once(model, make_cache, votes):
    near, vote = votes.nearest.compute_votes(model, make_cache(USERS).state)
    near[1, 0] = votes.leaf[1, 2]  # now both have it
    near[1, 1:][near[1, 1:] == near[1, 0]] = -1
    leaf, transitions, nearest = merge_votes(votes, near, vote)
    for user in range(USERS):
        there = leaf[user] >= 0
        assert len(set(leaf[user][there].tolist())) == int(there.sum())
        said = dict(
            zip(
                leaf[user].tolist(),
                zip(transitions[user].tolist(), nearest[user].tolist(), strict=True),
                strict=True,
            )
        )
        expected = {int(x): [0.0, 0.0] for x in [*votes.leaf[user], *near[user]] if x >= 0}
        for each, (source, weights) in enumerate(((votes.leaf, votes.weight), (near, vote))):
            for x, w in zip(source[user].tolist(), weights[user].tolist(), strict=True):
                if x >= 0:
                    expected[x][each] += w
        assert {x: said[x] for x in expected} == {x: pytest.approx(tuple(w)) for x, w in expected.items()}
    mixed = mix_vote_shares(transitions, nearest, 0.3)
    assert mixed.sum(1)[2:].tolist() == pytest.approx([1.0] * (USERS - 2))
    assert torch.equal(mixed[0], nearest[0])  # transitions say nothing of the first user


def test_scores_sum_to_one_and_levels_sum_to_scores(model, make_cache, votes, trie):
    cache = make_cache(USERS)
    plain = score_items(model, cache, trie)
    scores = mix_votes(model, trie, plain, votes, cache.state)
    assert scores.exp().sum(1).tolist() == pytest.approx([1.0] * USERS, abs=1e-6)
    assert not torch.allclose(scores[0], plain[0], atol=1e-3)  # the nearest vote where transitions do not
    every = torch.arange(trie.n_leaves).expand(USERS, -1)
    memory, _, logp = remember(model, cache, trie, votes, every)
    item = torch.from_numpy(np.asarray(trie.item_of_leaf))
    assert torch.allclose(memory.mix_levels(trie, every, logp).sum(-1), scores[:, item], atol=1e-6, rtol=0)


def test_beams_are_the_best_of_all_items_and_none_is_hidden(model, make_cache, votes, trie, hidden):
    cache = make_cache(USERS)
    scores = mix_votes(model, trie, score_items(model, cache, trie), votes, cache.state)
    beams = search_beams(model, cache, trie, 60, forbidden=hidden, votes=votes)
    assert torch.equal(beams.item[:, :12], select_top_items(scores, 12, hidden))
    for user in range(USERS):
        assert not set(hidden[user].tolist()) & set(beams.item[user].tolist())


def test_gradients_reach_the_matrix_of_the_voter(model, make_cache, votes, trie):
    cache = make_cache(USERS)
    leaf = votes.nearest.compute_votes(model, cache.state)[0][:, :2]

    def loss() -> torch.Tensor:
        memory, _, logp = remember(model, cache, trie, votes, leaf)
        return memory.mix_levels(trie, leaf, logp).sum()

    weight = model.nearest.weight
    (gradient,) = torch.autograd.grad(loss(), [weight])
    place, step = int(gradient.abs().argmax()), 1e-5
    with torch.no_grad():
        flat = weight.view(-1)
        flat[place] += step
        up = loss()
        flat[place] -= 2 * step
        down = loss()
    assert float(gradient.view(-1)[place]) == pytest.approx(float(up - down) / (2 * step), rel=1e-4)


def _batch(keys: torch.Tensor) -> SampleBatch:
    offsets = torch.tensor([0, len(keys)])
    mask = torch.ones(len(keys), dtype=torch.bool)
    return SampleBatch(
        None, None, None, None, {"item": Jagged(keys, offsets)}, Jagged(mask, offsets), None, []
    )  # type: ignore[arg-type]


@torch.no_grad()
def test_the_loss_is_the_softmax_over_all_items_where_all_are_drawn_and_near_it_else(model):
    rows = torch.from_numpy(rng(5).standard_normal((ITEMS, ROW)))
    keys = torch.from_numpy(rng(6).integers(0, ITEMS, 40))
    state = torch.from_numpy(rng(7).standard_normal((40, 8)))
    exact = functional.cross_entropy(query(model, state) @ rows.T, keys, reduction="sum")
    every = torch.arange(ITEMS)
    loss = compute_nearest_loss(model, _batch(keys), state, rows[keys], every, rows, ITEMS)
    assert float(loss) == pytest.approx(float(exact), rel=1e-9)
    drawn = [
        float(compute_nearest_loss(model, _batch(keys), state, rows[keys], some, rows[some], ITEMS))
        for some in (torch.from_numpy(np.sort(rng(8, i).choice(ITEMS, 45, replace=False))) for i in range(60))
    ]
    assert np.mean(drawn) == pytest.approx(float(exact), rel=0.01)

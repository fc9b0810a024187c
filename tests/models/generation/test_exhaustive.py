"""Exhaustive scores are the constrained log-probabilities, and ranks are counted without favours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nonet.errors import DataError
from nonet.models.generation import exhaustive
from nonet.models.generation.exhaustive import score_items, select_top_items
from nonet.models.generation.logprob import log_prob_from
from nonet.models.generation.trie import Trie
from nonet.models.ranking.metrics import MISSED, make_tie_order, rank_of_target_np
from nonet.models.sid_decoder import SidDecoder, depth
from nonet.random import rng

CODES = (6, 5, 4, 3)


def test_scores_equal_log_prob_of_every_item(make_model, make_cache, make_sids):
    sids = make_sids(CODES, 150)
    model, cache, trie = make_model(CODES), make_cache(9), Trie.build(sids, CODES)
    every = torch.from_numpy(sids).expand(9, -1, -1)
    expected = log_prob_from(model, cache, every, trie).sum(-1).detach()
    assert torch.allclose(score_items(model, cache, trie), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("budget", [1, 3000, 20_000, 1 << 20])
def test_scores_do_not_depend_on_the_memory_budget(make_model, make_cache, make_sids, budget):
    sids = make_sids(CODES, 150)
    model, cache = make_model(CODES), make_cache(9)
    trie = Trie.build(sids, CODES, items=np.arange(0, 150, 3))
    whole = score_items(model, cache, trie)
    assert torch.allclose(score_items(model, cache, trie, budget_bytes=budget), whole, atol=1e-12, rtol=0)


def test_items_outside_the_catalogue_score_minus_infinity(make_model, make_cache, make_sids):
    trie = Trie.build(make_sids(CODES, 50), CODES, items=np.array([4, 9, 33]))
    scores = score_items(make_model(CODES), make_cache(5), trie)
    assert scores.shape == (5, 50)
    assert scores.isfinite().nonzero()[:, 1].unique().tolist() == [4, 9, 33]
    assert scores.exp().sum(1).tolist() == pytest.approx([1.0] * 5, abs=1e-12)


def test_each_node_with_a_choice_is_stepped_once_a_user(make_model, make_cache, make_sids):
    trie = Trie.build(make_sids(CODES, 150), CODES)
    model = make_model(CODES)
    score_items(model, make_cache(9), trie)
    assert model.steps == 9 * sum(int((np.diff(first) > 1).sum()) for first in trie.first_child)


def test_a_catalogue_of_one_item_has_probability_one(make_model, make_cache):
    trie = Trie.build(np.array([[2, 1]]), (3, 3))
    assert score_items(make_model((3, 3)), make_cache(2), trie).tolist() == [[0.0], [0.0]]


def test_top_items_equal_a_sort(jagged):
    for case in range(100):
        g = rng(5, "rank", case)
        users, items = int(g.integers(1, 5)), int(g.integers(2, 30))
        scores = g.integers(0, 8, (users, items)).astype(np.float32)  # many ties
        scores[:, g.random(items) < 0.2] = -np.inf
        seen = [g.integers(0, items, int(g.integers(0, items))).tolist() for _ in range(users)]
        tops = select_top_items(torch.from_numpy(scores), 7, jagged(seen))
        for user in range(users):
            order = sorted(range(items), key=lambda item, row=scores[user]: (-row[item], item))
            left = [item for item in order if item not in seen[user] and scores[user, item] > -np.inf][:7]
            assert tops[user].tolist() == left + [-1] * (7 - len(left))


def test_the_best_items_by_a_tie_order_are_those_that_rank_first(jagged):
    g = rng(5, "lists and ranks")
    scores = g.integers(0, 3, (30, 20)).astype(np.float32)  # many ties
    tie = make_tie_order(g.integers(0, 4, 20), seed=1)
    masked = jagged([g.integers(0, 20, 6).tolist() for _ in range(30)])
    tops = select_top_items(torch.from_numpy(scores), 20, masked, tie).numpy()
    for item in range(20):
        ranks = rank_of_target_np(scores, np.full(30, item), masked, tie)
        for user, place in enumerate(ranks.tolist()):
            assert item not in tops[user] if place == MISSED else tops[user, place] == item


def test_top_items_leave_the_scores_as_they_are_and_want_a_row_a_user(jagged):
    scores = torch.tensor([[0.1, 0.2, 0.3]])
    select_top_items(scores, 2, jagged([[2]]))
    assert scores.tolist() == [pytest.approx([0.1, 0.2, 0.3])]
    with pytest.raises(DataError, match="2 rows for 1 users"):
        select_top_items(torch.zeros(1, 3), 2, jagged([[], []]))


@pytest.fixture
def decoder():
    """Make a decoder whose every weight is drawn, hashed rows too, and a cache of its prompts."""

    def make(codes, prompts=9, depth="mlp", cls=SidDecoder):
        with torch.random.fork_rng():
            torch.manual_seed(4)
            model = cls.build({"width": 16, "layers": 0, "heads": 2, "depth": depth}, codes, {}, 0)
            for weight in model.parameters():
                torch.nn.init.normal_(weight, std=0.4)
            model = model.double().eval()
            length = torch.randint(1, 6, (prompts,))
            state = torch.randn(int(length.sum()), 16, dtype=torch.float64)
        with torch.no_grad():
            return model, model.depth.cache(state, torch.nn.functional.pad(length.cumsum(0), (1, 0)))

    return make


@pytest.mark.parametrize("tile", [1, 7, 1024])
@pytest.mark.parametrize("budget", [1, 3000, 1 << 20])
def test_the_decoders_own_way_equals_its_steps(decoder, make_sids, monkeypatch, tile, budget):
    monkeypatch.setattr(depth, "_TILE", tile)
    sids = make_sids(CODES, 150)
    (model, cache), trie = decoder(CODES), Trie.build(sids, CODES, items=np.arange(0, 150, 2))
    every = torch.from_numpy(sids[::2]).expand(9, -1, -1)
    expected = log_prob_from(model, cache, every, trie).sum(-1).detach()
    scores = score_items(model, cache, trie, budget_bytes=budget)
    assert torch.allclose(scores[:, ::2], expected, atol=1e-10, rtol=0)
    assert scores[:, 1::2].isneginf().all()


def test_more_prompts_than_are_scored_at_once_are_scored_alike(decoder, make_sids, monkeypatch):
    (model, cache), trie = decoder(CODES), Trie.build(make_sids(CODES, 150), CODES)
    whole = score_items(model, cache, trie)
    monkeypatch.setattr(exhaustive, "_MAX_PROMPTS", 4)
    assert torch.allclose(score_items(model, cache, trie), whole, atol=1e-12, rtol=0)


class Louder(SidDecoder):
    """Overrides `step` alone."""

    def step(self, cache, codes, level):
        return 2 * super().step(cache, codes, level)


@pytest.mark.parametrize(("depth", "cls"), [("mlp", Louder), ("attention", SidDecoder)])
def test_a_decoder_without_a_way_of_its_own_is_asked_by_steps(decoder, make_sids, depth, cls):
    sids = make_sids(CODES, 60)
    (model, cache), trie = decoder(CODES, depth=depth, cls=cls), Trie.build(sids, CODES)
    expected = log_prob_from(model, cache, torch.from_numpy(sids).expand(9, -1, -1), trie).sum(-1).detach()
    assert torch.allclose(score_items(model, cache, trie), expected, atol=1e-12, rtol=0)

"""A beam never leaves the catalogue, and is the beam that brute force finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nonet.errors import ConfigError, DataError
from nonet.models.generation.beams import search_beams
from nonet.models.generation.exhaustive import score_items, select_top_items
from nonet.models.generation.trie import Trie
from nonet.random import rng


def random_case(case, make_model, make_cache, make_sids):
    """Make a small random catalogue (some codes unused, some items left out), a model and prompts."""
    g = rng(11, "beam", case)
    codes = tuple(int(k) for k in g.integers(1, 6, int(g.integers(1, 5))))
    items = int(g.integers(1, min(40, int(np.prod(codes))) + 1))
    sids = make_sids(codes, items, seed=case)
    chosen = np.flatnonzero(g.random(items) < 0.8)
    chosen = chosen if len(chosen) else np.arange(items)
    users = int(g.integers(1, 4))
    return g, codes, sids, chosen, make_model(codes, seed=case), make_cache(users, seed=case)


def check_against_brute_force(beams, oracle, width, forbidden):
    for user, banned in enumerate(forbidden):
        expected = oracle.beams(user, width, banned)
        found = len(expected)
        assert beams.valid[user].tolist() == [True] * found + [False] * (width - found)
        assert beams.item[user].tolist() == [item for item, _, _ in expected] + [-1] * (width - found)
        assert [tuple(sid) for sid in beams.sid[user, :found].tolist()] == [sid for _, sid, _ in expected]
        for beam, (_, sid, _) in enumerate(expected):  # float64 on both sides: only the order of sums differs
            assert beams.logp[user, beam].tolist() == pytest.approx(oracle.log_prob(user, sid), abs=1e-12)
        assert (beams.sid[user, found:] == -1).all()
        assert (beams.logp[user, found:] == 0).all()


def test_constrained_beam_equals_brute_force(make_model, make_cache, make_sids, brute_force):
    for case in range(60):
        g, codes, sids, chosen, model, cache = random_case(case, make_model, make_cache, make_sids)
        width = int(g.integers(1, 12))
        beams = search_beams(model, cache, Trie.build(sids, codes, chosen), width)
        oracle = brute_force(model, cache, sids, chosen)
        check_against_brute_force(beams, oracle, width, [set()] * len(cache.state))


def test_beam_with_forbidden_items_equals_brute_force(make_model, make_cache, make_sids, brute_force, jagged):
    for case in range(60):
        g, codes, sids, chosen, model, cache = random_case(case, make_model, make_cache, make_sids)
        width = int(g.integers(1, 12))
        seen = [g.integers(0, len(sids), int(g.integers(0, len(sids) + 3))).tolist() for _ in cache.state]
        trie = Trie.build(sids, codes, chosen)
        beams = search_beams(model, cache, trie, width, forbidden=jagged(seen))
        oracle = brute_force(model, cache, sids, chosen)
        check_against_brute_force(beams, oracle, width, [set(row) for row in seen])


def test_width_items_come_back_while_that_many_are_allowed(make_model, make_cache, make_sids, jagged):
    codes, width = (6, 6, 6), 5
    sids = make_sids(codes, 80)
    model, cache = make_model(codes, spread=30.0), make_cache(40)
    trie = Trie.build(sids, codes)
    best = select_top_items(score_items(model, cache, trie), 75, jagged([[]] * 40))
    beams = search_beams(model, cache, trie, width, forbidden=jagged(best.tolist()))  # all but the 5 worst
    assert beams.valid.all()
    for user in range(40):
        assert set(beams.item[user].tolist()) == set(range(80)) - set(best[user].tolist())


def test_beam_of_full_width_equals_exhaustive_order(make_model, make_cache, make_sids, jagged):
    codes = (7, 6, 5, 3)
    sids = make_sids(codes, 150)
    model, cache = make_model(codes), make_cache(20)
    trie = Trie.build(sids, codes)
    beams = search_beams(model, cache, trie, 150)
    scores = score_items(model, cache, trie)
    assert beams.valid.all()
    assert beams.item.tolist() == select_top_items(scores, 150, jagged([[]] * 20)).tolist()
    assert torch.allclose(beams.logp.sum(-1), scores.gather(1, beams.item), atol=1e-12, rtol=0)


def test_no_beam_is_illegal_or_twice_in_a_group(make_model, make_cache, make_sids, jagged):
    codes = (16, 16, 16, 4)
    sids = make_sids(codes, 900)
    model, cache = make_model(codes, dtype=torch.float32), make_cache(50, dtype=torch.float32)
    seen = rng(3, "seen").integers(0, 900, (50, 30))
    beams = search_beams(model, cache, Trie.build(sids, codes), 32, forbidden=jagged(seen.tolist()))
    assert beams.valid.all()
    assert beams.sid.tolist() == sids[beams.item.numpy()].tolist()
    for user in range(50):
        assert len(set(beams.item[user].tolist())) == 32
        assert not set(beams.item[user].tolist()) & set(seen[user].tolist())
    total = beams.logp.sum(-1)
    assert (total[:, :-1] >= total[:, 1:] - 1e-5).all()  # float32 sums in another order than the search's


def test_ties_go_to_the_lower_flat_index(make_model, make_cache, make_sids):
    codes = (4, 4, 4)
    sids = make_sids(codes, 64)  # the whole code space: every item has probability 1 / 64
    model = make_model(codes, spread=0.0)
    for head in model.head:
        head.bias.data.zero_()
    beams = search_beams(model, make_cache(3), Trie.build(sids, codes), 10)
    flat = [np.ravel_multi_index(sid, codes) for sid in beams.sid[0].tolist()]
    assert flat == list(range(10))
    assert beams.item[0].tolist() == beams.item[1].tolist() == beams.item[2].tolist()


def test_forbidden_items_leave_the_probabilities_of_the_others_alone(
    make_model, make_cache, make_sids, jagged
):
    codes = (5, 5, 5)
    sids = make_sids(codes, 60)
    model, cache, trie = make_model(codes), make_cache(4), Trie.build(sids, codes)
    free = search_beams(model, cache, trie, 60)
    some = search_beams(model, cache, trie, 60, forbidden=jagged([[1, 2, 3]] * 4))
    for user in range(4):
        kept = dict(zip(free.item[user].tolist(), free.logp[user].tolist(), strict=True))
        assert some.valid[user].sum() == 57
        for item, logp in zip(some.item[user, :57].tolist(), some.logp[user, :57].tolist(), strict=True):
            assert logp == kept[item]


def test_an_item_outside_a_restricted_catalogue_never_appears(make_model, make_cache, make_sids, jagged):
    codes = (5, 5, 5)
    sids = make_sids(codes, 60)
    trie = Trie.build(sids, codes, items=np.arange(10, 30))
    beams = search_beams(make_model(codes), make_cache(6), trie, 25, forbidden=jagged([[12, 40]] * 6))
    assert beams.valid.sum(1).tolist() == [19] * 6
    assert set(beams.item[beams.valid].tolist()) == set(range(10, 30)) - {12}


def test_a_catalogue_that_is_all_forbidden_gives_no_beam(make_model, make_cache, make_sids, jagged):
    codes = (3, 3)
    trie = Trie.build(make_sids(codes, 7), codes)
    beams = search_beams(make_model(codes), make_cache(2), trie, 4, forbidden=jagged([list(range(7)), [0]]))
    assert beams.valid.tolist() == [[False] * 4, [True] * 4]
    assert beams.item[0].tolist() == [-1] * 4


def test_no_prompts_give_no_beams_and_no_scores(make_model, make_cache, make_sids, jagged):
    codes = (3, 3)
    trie, model, cache = Trie.build(make_sids(codes, 7), codes), make_model(codes), make_cache(0)
    beams = search_beams(model, cache, trie, 4, forbidden=jagged([]))
    assert (beams.item.shape, beams.sid.shape) == ((0, 4), (0, 4, 2))
    assert score_items(model, cache, trie).shape == (0, 7)


def test_the_search_steps_each_level_once_over_its_live_beams(make_model, make_cache, make_sids):
    codes = (8, 8, 8)
    model, cache = make_model(codes), make_cache(10)
    search_beams(model, cache, Trie.build(make_sids(codes, 200), codes), 4)
    assert model.steps == 10 * (1 + 4 + 4)


def test_wrong_arguments_and_a_diverged_model_are_named(make_model, make_cache, make_sids, jagged):
    codes = (3, 3)
    trie, model, cache = Trie.build(make_sids(codes, 7), codes), make_model(codes), make_cache(2)
    with pytest.raises(ConfigError, match="beam width is 0"):
        search_beams(model, cache, trie, 0)
    with pytest.raises(ConfigError, match="1 rows for 2 prompts"):
        search_beams(model, cache, trie, 2, forbidden=jagged([[1]]))
    model.head[0].bias.data[0] = torch.nan
    with pytest.raises(DataError, match="NaN for 2 of 2 prompts"):
        search_beams(model, cache, trie, 2)

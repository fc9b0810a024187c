"""Filters of many questions: the lists of leaving items out by name, whatever they are merged with, in bounded memory."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from served_run import TrainedRun

from nonet.deploy.opened import (
    CatalogueItems,
    Refused,
    RequestFeatures,
    UserHistories,
)
from nonet.deploy.serving.service import FallbackRecommender
from nonet.models.generation import SubCatalogue, Trie
from nonet.models.inference import FilterCache, InferenceEngine, ItemFilter
from nonet.models.inference import filters as filters_module
from nonet.suggest import find_close_matches

WHERES = ["title != 'item a0'", "title >= 'item p'", "title < 'item c'", "events > 17", "title == 'item d3'"]


@pytest.fixture(scope="module", params=[True, False], ids=["memory", "model alone"])
def world(request, tmp_path_factory):
    served = TrainedRun(tmp_path_factory.mktemp("served"), memory=request.param)
    served.commit(6)
    run = served.open()
    engine = InferenceEngine(run.load_recommender(run.publish_newest()), 1)
    features = RequestFeatures(
        run.corpus, UserHistories(run.corpus, None), run.setup.history, run.scenario.evaluate.width
    )
    return engine, features


def asked(features, where, user="103", k=8):
    return features.make_list_question(user, None, k, where=where).question


def by_name(features, where, user="103", k=8):
    """Ask the same question, with the items that the filter excludes hidden by name."""
    question = asked(features, where, user, k)
    hidden = np.union1d(question.hidden, features.items.find_excluded(where))
    return replace(question, within=None, hidden=hidden)


@pytest.mark.parametrize("where", WHERES)
def test_a_filter_gives_the_list_of_hiding_what_it_leaves_out(world, where):
    engine, features = world
    filtered, named = engine.answer([asked(features, where)]), engine.answer([by_name(features, where)])
    np.testing.assert_array_equal(filtered[0].item, named[0].item)
    np.testing.assert_allclose(filtered[0].score, named[0].score, atol=1e-6)
    allowed = features.items.make_filter(where).allowed
    assert allowed[filtered[0].item].all()


def test_questions_with_other_filters_and_without_one_merge(world):
    engine, features = world
    users = ["103", "105", "999", "110", "111", "103"]
    questions = [asked(features, where, user) for where, user in zip([*WHERES, None], users, strict=True)]
    together = engine.answer(questions)
    for question, answer in zip(questions, together, strict=True):
        alone = engine.answer([question])[0]
        np.testing.assert_array_equal(answer.item, alone.item)
        np.testing.assert_allclose(answer.score, alone.score, atol=1e-5)


def test_a_fall_back_keeps_to_the_filter(world):
    _, features = world
    fallback = FallbackRecommender(_corpus(world), features.items)
    for where in WHERES:
        answer, _ = fallback.answer(asked(features, where))
        assert features.items.make_filter(where).allowed[answer.item].all()
        expected = min(
            8,
            int(
                features.items.make_filter(where)
                .allowed[~np.isin(np.arange(40), asked(features, where).hidden)]
                .sum()
            ),
        )
        assert len(answer.item) == expected


def _corpus(world):
    return world[0]._recommender.corpus


def test_filters_count_in_the_queue_s_cost_and_hidden_items_do(world):
    _, features = world
    plain, filtered = asked(features, None), asked(features, WHERES[0])
    assert InferenceEngine.estimate_cost(filtered) > InferenceEngine.estimate_cost(plain)
    many = replace(plain, hidden=np.arange(500_000))
    assert InferenceEngine.estimate_cost(many) > InferenceEngine.estimate_cost(plain) + 5_000
    large = replace(plain, within=ItemFilter("x", "c", np.ones(1_000_000, bool)))
    assert (
        InferenceEngine.estimate_cost(plain) + 50
        < InferenceEngine.estimate_cost(large)
        < InferenceEngine.estimate_cost(plain) + 500
    )


def test_masks_are_bounded_in_bytes_and_shared_by_condition(world):
    engine, features = world
    one = FilterCache(engine._recommender.corpus.trie)
    questions = [asked(features, WHERES[0], user) for user in ("103", "104", "105")]
    within = one.make_batch([question.within for question in questions])
    assert len(within._bits.filters) == 1
    size = one.nbytes
    small = FilterCache(engine._recommender.corpus.trie, most_bytes=2 * size)
    for number in range(20):
        small.make_batch([ItemFilter(f"filter {number}", "c", np.arange(40) % 20 == number)])
        assert small.nbytes <= 3 * size
    assert one.make_batch([None, None]) is None


@pytest.mark.parametrize("count", [3, 70])
@pytest.mark.parametrize("few", [0, 64])
def test_bits_of_all_filters_say_what_a_mask_of_each_says(monkeypatch, count, few):
    """Leaves, nodes of every level, and whether forbidden leaves are all that a filter allows below a node."""
    monkeypatch.setattr(filters_module, "_FEW_LEAVES", few)
    draw = np.random.default_rng(count)
    flat = draw.choice(8**3, 200, replace=False)
    trie = Trie.build(np.stack([flat // 64, flat // 8 % 8, flat % 8], 1), (8, 8, 8))
    shares = draw.choice([0.0, 0.02, 0.3, 1.0], count)
    allowed_CI = draw.random((count, 200)) < shares[:, None]
    filters = [ItemFilter(f"{number:02d}", "c", mask) for number, mask in enumerate(allowed_CI)]
    which = draw.permutation(np.append(np.arange(count), [0, 1]))
    bits = FilterCache(trie).make_batch([filters[number] for number in which])
    masks = SubCatalogue(trie, allowed_CI, which)
    assert bits is not None
    for level in range(1, trie.levels + 1):
        every = torch.arange(trie.n_nodes[level]).expand(len(which), -1)
        node = every[:, :, None]
        assert torch.equal(bits.mask_dead_nodes(level, node), masks.mask_dead_nodes(level, node))
        user = torch.arange(len(which))[:, None].expand_as(every).flatten()
        for number in (0, 1, 5, 200):
            counts = torch.full_like(user, number)
            wanted = masks.mask_complete(level, user, every.flatten(), counts, len(which))
            found = bits.mask_complete(level, user, every.flatten(), counts, len(which))
            possible = masks._count_excluded(level, "cpu")[torch.from_numpy(which)[user], every.flatten()]
            left = trie.count_leaves(level, every.flatten()) - possible.long() >= number
            assert torch.equal(found & left, wanted)  # more forbidden ones than there are do not occur
    leaf = torch.arange(trie.n_leaves).expand(len(which), -1)
    assert torch.equal(bits.mask_excluded(leaf), masks.mask_excluded(leaf))
    for mine, theirs in zip(
        bits.list_excluded_items(len(which)), masks.list_excluded_items(len(which)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_filters_of_features_are_bounded_in_bytes(world, monkeypatch):
    monkeypatch.setattr("nonet.deploy.opened.items._MAX_FILTER_BYTES", 100)
    items = CatalogueItems(_corpus(world))
    for number in range(20):
        items.make_filter(f"events > {number}")
        assert sum(kept.allowed.nbytes for kept in items._filters.values()) <= 100
    with pytest.raises(Refused, match="where"):
        items.make_filter("colour == 1")


def test_filters_of_features_are_bounded_in_number(world, monkeypatch):
    monkeypatch.setattr("nonet.deploy.opened.items._MAX_FILTERS", 3)
    items = CatalogueItems(_corpus(world))
    for number in range(5):
        items.make_filter(f"events > {number}")
    assert list(items._filters) == ["events > 2", "events > 3", "events > 4"]


def test_a_misspelt_title_is_compared_with_similar_ones_only(world, monkeypatch):
    items, compared = CatalogueItems(_corpus(world)), []
    titles = [f"film number {number}" for number in range(len(items) - 1)] + ["The Blade Runner"]
    monkeypatch.setattr(items, "get_titles", lambda indices: [titles[index] for index in indices])
    monkeypatch.setattr("nonet.deploy.opened.items._MAX_SIMILAR", 3)
    monkeypatch.setattr(
        "nonet.deploy.opened.items.find_close_matches",
        lambda word, known, **options: compared.extend(known) or find_close_matches(word, known, **options),
    )
    with pytest.raises(Refused, match="close: The Blade Runner"):
        items.find_title("Blad Runer")
    assert compared[0] == "the blade runner"
    assert len(compared) <= 3
    with pytest.raises(Refused, match=r"no item is called 'ßßß' in this run$"):
        items.find_title("ßßß")


def test_a_filter_travels_as_bits_and_fits_catalogues_of_other_sizes():
    allowed = np.random.default_rng(0).random(1_000_003) < 0.5
    content = pickle.dumps(ItemFilter("price < 5", "c", allowed))
    assert len(content) < 130_000
    again = pickle.loads(content)
    np.testing.assert_array_equal(again.allowed, allowed)
    assert again.key == ("c", "price < 5")
    np.testing.assert_array_equal(again.make_mask(10), allowed[:10])
    assert not again.make_mask(1_000_010)[1_000_003:].any()

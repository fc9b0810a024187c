"""The attribute counter: its scores are its formula, and its exponents are those that validation prefers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.models.baselines import _attribute_counter as module
from nonet.models.baselines._attribute_counter import AttributeCounter, _Cells, _Ranking
from nonet.models.baselines.kinds.attribute_counter import SPEC, AttributeCounterOptions
from nonet.models.baselines.kinds.popularity import Popularity
from nonet.models.baselines.kinds.transition_counter import TransitionCounter
from nonet.random import rng
from nonet.samples.batches import gather_masked_items, list_prompts, locate_events
from nonet.samples.sequences import TEST, TRAIN, VALID, Sequences, build_sequences

ITEMS, KINDS = 120, 6


def make_log(follows_kinds: bool, users: int = 400, events: int = 9) -> Sequences:
    """Users who go from item to item; with `follows_kinds` every second item is of the user's own kind."""
    draw = rng(3, "log")
    rows = []
    for user in range(users):
        own, seen = draw.integers(0, KINDS), []
        for time in range(events):
            allowed = np.arange(ITEMS)
            if follows_kinds and draw.random() > 0.5:
                allowed = np.flatnonzero(allowed % KINDS == own)
            seen.append(int(draw.choice(np.setdiff1d(allowed, seen))))
            rows.append((user, seen[-1], time + 1))
    user, item, time = (np.array(values) for values in zip(*rows, strict=True))
    log = pa.table({"user_id": user, "item_id": item, "timestamp": time})
    return build_sequences(log, None, split={"test": 1, "valid": 1})[0]


def make_items(seq: Sequences, names: str = "kinds") -> pa.Table:
    """The items, with a list of one kind each, and a number that is no word."""
    count = int(seq.item.max()) + 1
    kinds = [[f"kind {item % KINDS}"] for item in range(count)]
    return pa.table({"item_id": range(count), names: kinds, "year": [1.0] * count})


def rank(baseline, seq: Sequences) -> float:
    """Mean reciprocal rank of the test events."""
    users, positions = list_prompts(seq, TEST)
    scores = baseline.scores(seq, users, positions)
    target = seq.item[locate_events(seq, users, positions)]
    masked = gather_masked_items(seq, users, positions)
    scores[np.repeat(np.arange(len(users)), np.diff(masked.offsets)), masked.values] = -np.inf
    own = scores[np.arange(len(users)), target]
    return float((1 / (scores >= own[:, None]).sum(1)).mean())


def fit(seq: Sequences, **options) -> AttributeCounter:
    return AttributeCounter(ITEMS, seed=1, item_table=lambda: make_items(seq), **options).fit(seq)


def test_attributes_count_where_users_follow_them_and_not_where_they_do_not():
    following, random = make_log(follows_kinds=True), make_log(follows_kinds=False)
    fitted = fit(following)
    assert fitted.trained["g kinds"] >= 1.2
    assert rank(fitted, following) > 1.3 * rank(TransitionCounter(ITEMS).fit(following), following)
    assert fit(random).trained["g kinds"] <= 0.3
    assert set(fitted.trained) == {"reverse", "decay", "g kinds"}


def test_scores_are_votes_and_similarities_with_the_fitted_exponents():
    seq = make_log(follows_kinds=True)
    fitted = fit(seq)
    reverse, decay, g = (fitted.trained[name] for name in ("reverse", "decay", "g kinds"))
    counts, occurs = np.zeros((ITEMS, ITEMS)), np.zeros(ITEMS)
    for user in range(len(seq)):
        items = seq.item[seq.offsets[user] : seq.offsets[user + 1]]
        items = items[seq.split[seq.offsets[user] : seq.offsets[user + 1]] == TRAIN]
        np.add.at(occurs, items, 1)
        for first in range(len(items)):
            for second in range(first + 1, min(first + 7, len(items))):
                counts[items[first], items[second]] += 1 / (second - first)
                counts[items[second], items[first]] += reverse / (second - first)
    users, positions = list_prompts(seq, TEST)
    votes = fitted.votes(seq, users[:20], positions[:20])
    for row in range(20):
        history = seq.item[seq.offsets[users[row]] :][: positions[row]][::-1][:10]
        weight = (np.arange(len(history)) + 1.0) ** -decay
        expected = (weight[:, None] * counts[history] / np.sqrt(occurs[history])[:, None]).sum(0)
        similarity = (weight[:, None] * (history[:, None] % KINDS == np.arange(ITEMS) % KINDS)).sum(0)
        said = np.zeros(ITEMS)
        said[votes.item[votes.prompt == row]] = votes.weight[votes.prompt == row]
        assert ((said > 0) == (expected > 0)).all()
        score = expected * np.exp(g * similarity)
        assert said == pytest.approx(score / score.max(), rel=1e-4, abs=1e-20)


def test_a_target_ranks_below_its_equals():
    prompt = np.array([0, 0, 0, 1])
    ranking = _Ranking(_Cells(prompt, np.arange(4), np.zeros(4), np.zeros((4, 0))), np.array([1, -1]))
    assert ranking.compute_ndcg([]) == pytest.approx(
        1 / np.log2(4) / 2
    )  # third of three, and a target without votes


def test_held_out_events_that_are_not_validation_change_nothing():
    seq = make_log(follows_kinds=True)
    other = seq.item.copy()
    other[seq.split == TEST] = 0
    changed = fit(Sequences(**{**seq.__dict__, "item": other}))
    users, positions = np.array([0, 1]), np.array([5, 5])
    assert changed.trained == fit(seq).trained
    np.testing.assert_array_equal(
        changed.scores(seq, users, positions), fit(seq).scores(seq, users, positions)
    )


def test_without_validation_events_or_words_the_usual_exponents_stay():
    seq = make_log(follows_kinds=True)
    split = np.where(seq.split == VALID, TRAIN, seq.split)
    unvalidated = Sequences(**{**seq.__dict__, "split": split})
    assert fit(unvalidated).trained == {"reverse": 0.3, "decay": 0.7, "g kinds": 1.2}
    bare = AttributeCounter(
        ITEMS, seed=1, item_table=lambda: make_items(seq).select(["item_id", "year"])
    ).fit(seq)
    assert set(bare.trained) == {"reverse", "decay"}
    assert rank(bare, seq) > 0


def test_columns_may_be_chosen_and_must_be_words():
    seq = make_log(follows_kinds=True)
    assert set(fit(seq, columns=[]).trained) == {"reverse", "decay"}
    options = AttributeCounterOptions(columns=["year"]).model_dump()
    with pytest.raises(DataError, match=r"attribute_counter: columns: 'year' is double"):
        SPEC.check_items(make_items(seq), options)
    SPEC.check_items(make_items(seq), AttributeCounterOptions().model_dump())


@pytest.mark.parametrize("names", [["kinds"], []])
def test_prompts_without_any_votes_are_ranked_by_popularity(names):
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(40), 3),
            "item_id": np.arange(120) % 90,
            "timestamp": np.arange(120) + 1,
        }
    )
    seq = build_sequences(log, None, split={"test": 1, "valid": 1})[0]
    items = make_items(seq).select(["item_id", *names])
    fitted = AttributeCounter(len(items), seed=1, item_table=lambda: items).fit(seq)
    users, positions = list_prompts(seq, TEST)
    popularity = Popularity(len(items)).fit(seq).popularity
    for scores in fitted.scores(seq, users, positions):
        assert (np.argsort(-scores, kind="stable") == np.argsort(-popularity, kind="stable")).all()


def test_only_the_items_with_most_votes_are_compared(monkeypatch):
    seq = make_log(follows_kinds=True)
    users, positions = list_prompts(seq, TEST)
    whole = fit(seq)
    every = whole.votes(seq, users, positions)
    monkeypatch.setattr(module, "_MAX_CANDIDATES", 5)
    few = whole.votes(seq, users, positions)
    assert np.bincount(few.prompt).max() == 5
    counter, chosen = whole._counter, users[:9]
    prompt, item, vote = counter.count_votes(seq, chosen, positions[:9])
    for row in range(9):
        best = item[prompt == row][np.argsort(-vote[prompt == row], kind="stable")][:5]
        assert sorted(few.item[few.prompt == row]) == sorted(best)
    assert len(every.item) > len(few.item)

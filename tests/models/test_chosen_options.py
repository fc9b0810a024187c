"""Baselines choose their options by validation events, with little memory and without what the options do not share."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from test_attribute_counter import ITEMS, make_log

from nonet.errors import DataError
from nonet.models.baselines import _histories as histories
from nonet.models.baselines import check_scores
from nonet.models.baselines._ease import Ease, _solve
from nonet.models.baselines._histories import (
    ChosenByValidation,
    compute_ndcg,
    draw_validation_events,
    list_user_items,
)
from nonet.models.baselines._implicit import _WEIGHTINGS
from nonet.models.baselines.kinds import SparseVotes, make_baseline
from nonet.models.baselines.kinds import transition_counter as counters
from nonet.samples.batches import list_prompts, locate_events
from nonet.samples.sequences import TEST, TRAIN, VALID, Sequences, build_sequences

SEQ = make_log(follows_kinds=True)
UNVALIDATED = replace(SEQ, split=np.where(SEQ.split == VALID, TRAIN, SEQ.split).astype(np.int8))
OPTIONS = {
    "recent_popularity": {"_recent_popularity._SHARES": (0.1, 1.0, 0.3)},
    "item_knn": {"_implicit._WEIGHTINGS": ("tf-idf", "bm25", "cosine")},
    "v_sknn": {"_v_sknn._NEIGHBOURS": (1, 50, 3), "_v_sknn._IDFS": (True, False)},
    "ease": {"_ease._L2": (0.5, 3000.0, 90.0)},
    "ials": {"_implicit._ALS_TRIALS": ((1.0, 30.0), (400.0, 0.01), (10.0, 0.1))},
}


def fit(name: str, seq: Sequences = SEQ, seed: int = 1, **options: Any):
    return make_baseline({"use": name, **options}, ITEMS, seed=seed, history=8).fit(seq)


def compute_scores(fitted: Any, seq: Sequences = SEQ) -> np.ndarray:
    """The scores of the first 40 test events."""
    users, positions = list_prompts(seq, TEST)
    return np.array(fitted.scores(seq, users[:40], positions[:40]))


class Chosen(ChosenByValidation):
    """Ranks the target of each event at a place that is its option."""

    name = "chosen"

    def fit_in_parts(self, seq, splits=(TRAIN,)):
        self.fitted = []
        self.trained["option"], self.trained["model"] = yield from self._choose(
            self.options, self._set, seq, splits
        )

    def _set(self, option):
        self.place = option
        self.fitted.append(option)
        return f"model {option}"

    def scores(self, seq, users, positions):
        scores = np.tile(np.arange(self._n_items, dtype=np.float32), (len(users), 1))
        target = seq.item[locate_events(seq, users, positions)]
        scores[np.arange(len(users)), target] = self._n_items - 0.5 - 10 * self.place
        return scores


def test_the_best_option_is_chosen_the_first_of_equal_ones_and_the_first_without_events():
    chosen = Chosen(ITEMS, 1)
    for options, best in (([2, 1.01, 1, 3], 1.01), ([3, 0, 2], 0)):
        chosen.options = options
        assert len(list(chosen.fit_in_parts(SEQ))) == len(options)
        assert chosen.fitted == options
        assert chosen.trained == {"option": best, "model": f"model {best}"}
    assert chosen.fit(UNVALIDATED).fitted == [3]
    assert chosen.trained["option"] == 3


@pytest.mark.parametrize("name", OPTIONS)
def test_a_baseline_has_the_option_that_ranks_validation_best_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    events = draw_validation_events(SEQ, (TRAIN,), 1, name)

    def set_options(choice: tuple[Any, ...] | None) -> None:
        for place, (constant, values) in enumerate(OPTIONS[name].items()):
            options = values if choice is None else (choice[place],)
            if constant.endswith("_WEIGHTINGS"):
                options = {option: weightings[option] for option in options}
            monkeypatch.setattr(f"nonet.models.baselines.{constant}", options)

    weightings = dict(_WEIGHTINGS)
    choices = [()]
    for values in OPTIONS[name].values():
        choices = [(*choice, value) for choice in choices for value in values]
    ndcg, alone = [], []
    for choice in choices:
        set_options(choice)
        alone.append(fit(name))
        ndcg.append(compute_ndcg(lambda *of: np.array(alone[-1].scores(SEQ, *of)), SEQ, *events, ITEMS))
    best = int(np.argmax(ndcg))
    assert best < len(choices) - 1  # a later one is tried, which must not remain
    assert max(ndcg) > min(ndcg)
    set_options(None)
    fitted = fit(name)
    assert fitted.trained == alone[best].trained
    np.testing.assert_array_equal(compute_scores(fitted), compute_scores(alone[best]))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_ranked_by_votes_and_by_one_order_of_equal_items(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    orders = []
    monkeypatch.setattr(histories, "_MAX_PROMPTS", 30)
    make = histories.make_tie_order
    monkeypatch.setattr(histories, "make_tie_order", lambda *of, **by: orders.append(1) or make(*of, **by))
    histories._draw_tie_order.cache_clear()
    baseline = make_baseline({"use": name}, ITEMS, seed=1, history=8)
    if hasattr(baseline, "votes"):
        monkeypatch.setattr(type(baseline), "scores", lambda *_: pytest.fail("scores of all items"))
    assert len(list(baseline.fit_in_parts(SEQ))) > 2
    assert len(orders) <= 1


@pytest.mark.parametrize("name", ["item_knn", "v_sknn", "transition_counter"])
def test_votes_are_ranked_as_the_scores_that_they_are(name: str):
    fitted = fit(name, UNVALIDATED)
    users, positions = list_prompts(SEQ, TEST)
    by_votes, by_scores = (
        compute_ndcg(lambda *of, way=way: getattr(fitted, way)(SEQ, *of), SEQ, users, positions, ITEMS)
        for way in ("votes", "scores")
    )
    assert by_votes == by_scores > 0


def test_another_seed_draws_other_validation_events(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(histories, "_MAX_EVENTS", 50)
    drawn = [draw_validation_events(SEQ, (TRAIN,), seed, "ease")[0] for seed in (1, 1, 2)]
    assert len(drawn[0]) == 50
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    assert not np.array_equal(drawn[0], draw_validation_events(SEQ, (TRAIN,), 1, "ials")[0])


@pytest.mark.parametrize("name", ["item_knn", "v_sknn", "transition_counter"])
def test_votes_are_summed_in_chunks_of_bounded_size(name: str, monkeypatch: pytest.MonkeyPatch):
    fitted = fit(name, UNVALIDATED)
    users, positions = list_prompts(SEQ, TEST)
    whole, sizes = fitted.votes(SEQ, users, positions), []
    expand = counters.expand_ranges

    def record(starts, stops):
        sizes.append((stops - starts).sum())
        return expand(starts, stops)

    monkeypatch.setattr(counters, "expand_ranges", record)
    monkeypatch.setattr(counters, "_CHUNK_VOTES", 5000)
    parts = fitted.votes(SEQ, users, positions)
    assert len(sizes) > 2
    assert max(sizes) <= 5000
    for part, column in zip(
        (parts.prompt, parts.item, parts.weight), (whole.prompt, whole.item, whole.weight), strict=True
    ):
        np.testing.assert_array_equal(part, column)
    key = whole.prompt * ITEMS + whole.item
    assert (np.diff(key) > 0).all()


def test_votes_that_are_nan_name_the_baseline_in_one_line():
    votes = SparseVotes(np.zeros(3), np.array([0, 1]), np.array([2, 2]), np.array([1.0, np.nan]))
    with pytest.raises(DataError, match=r"^baseline 'near': scores of 1 of 2 prompts are NaN.* row 1;.*$"):
        check_scores("near", votes, 2, 3)
    with pytest.raises(DataError, match="scores of 2 of 2 prompts"):
        check_scores("near", replace(votes, prior=np.array([0, np.nan, 0])), 2, 3)
    chosen = Chosen(ITEMS, 1)
    chosen.options = [np.nan]
    with pytest.raises(DataError, match=r"^baseline 'chosen': scores of \d+ of \d+ prompts are NaN"):
        chosen.fit(SEQ)


def test_ease_has_two_matrices_and_solves_in_one_of_them():
    n_items, draw = 1200, np.random.default_rng(0)
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(300), 8),
            "item_id": draw.permutation(np.arange(2400) % n_items),
            "timestamp": np.arange(2400),
        }
    )
    seq = build_sequences(log, None, split={"test": 1, "valid": 1})[0]
    matrix_bytes = n_items**2 * 4
    list_user_items(seq, n_items, (TRAIN,))
    tracemalloc.start()
    try:
        Ease(n_items, seed=1).fit(seq)
        assert tracemalloc.get_traced_memory()[1] < 2.9 * matrix_bytes
    finally:
        tracemalloc.stop()
    gram, weights = np.eye(n_items, dtype=np.float32), np.empty((n_items, n_items), np.float32)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        _solve(gram, 2.0, weights)
    allocated = [event.self_cpu_memory_usage for event in profile.key_averages()]
    assert sum(size for size in allocated if size > 0) < matrix_bytes / 10
    assert (gram == np.eye(n_items)).all()

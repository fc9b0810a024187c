"""Baselines by neighbours and factors equal slow versions of their formulas, and choose their options by validation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from test_attribute_counter import ITEMS, make_items, make_log, rank

from nonet.errors import ConfigError, DataError
from nonet.models.baselines._ease import Ease, _count_pairs
from nonet.models.baselines._histories import (
    compute_ndcg,
    draw_validation_events,
    list_prompt_items,
    list_user_items,
)
from nonet.models.baselines._recent_popularity import RecentPopularity
from nonet.models.baselines._v_sknn import VSknn
from nonet.models.baselines.kinds import base, make_baseline
from nonet.models.baselines.kinds import ease as ease_keys
from nonet.models.baselines.kinds.base import BASELINES
from nonet.models.baselines.kinds.popularity import Popularity
from nonet.samples.batches import list_prompts
from nonet.samples.sequences import TEST, TRAIN, VALID, Sequences, build_sequences

SEQ = make_log(follows_kinds=True)
ALL = ("recent_popularity", "item_knn", "v_sknn", "ease", "ials")


def make_matrix(seq: Sequences) -> np.ndarray:
    """Where a user has an item in the training events [U, I]."""
    matrix = np.zeros((len(seq), ITEMS))
    for user in range(len(seq)):
        own = slice(seq.offsets[user], seq.offsets[user + 1])
        matrix[user, seq.item[own][seq.split[own] == TRAIN]] = 1
    return matrix


def with_item(seq: Sequences, split: int, item: int) -> Sequences:
    """The same sequences with one item in all events of a split."""
    return replace(seq, item=np.where(seq.split == split, item, seq.item).astype(seq.item.dtype))


def test_pairs_are_those_of_users_in_any_chunks(monkeypatch: pytest.MonkeyPatch):
    matrix = make_matrix(SEQ)
    offsets, items = list_user_items(SEQ, ITEMS, (TRAIN,))
    for pairs in (1, 50, 1 << 22):
        monkeypatch.setattr("nonet.models.baselines._ease._CHUNK_PAIRS", pairs)
        monkeypatch.setattr("nonet.models.baselines._ease._PART_PAIRS", 3 * pairs)
        gram = np.zeros((ITEMS, ITEMS), np.float32)
        n_parts = len(list(_count_pairs(gram, offsets, items)))
        np.testing.assert_array_equal(gram, matrix.T @ matrix)
        assert n_parts == (1 if pairs == 1 << 22 else ITEMS)
    nothing = np.zeros((4, 4), np.float32)
    assert len(list(_count_pairs(nothing, np.zeros(3, np.int64), np.empty(0, np.int64)))) == 1
    assert not nothing.any()


def test_ease_is_the_closed_form():
    fitted = Ease(ITEMS, seed=1, l2=30.0).fit(SEQ)
    matrix = make_matrix(SEQ)
    inverse = np.linalg.inv(matrix.T @ matrix + 30.0 * np.eye(ITEMS))
    weights = np.eye(ITEMS) - inverse / np.diag(inverse)
    users, positions = list_prompts(SEQ, TEST)
    seen = np.zeros((len(users), ITEMS))
    for row, (user, position) in enumerate(zip(users, positions, strict=True)):
        seen[row, SEQ.item[SEQ.offsets[user] :][:position]] = 1
    np.testing.assert_allclose(fitted.scores(SEQ, users, positions), seen @ weights, atol=1e-4)


@pytest.mark.parametrize("seconds", [480, 5])  # of which each has many events
@pytest.mark.parametrize("idf", [False, True])
@pytest.mark.parametrize("most_recent", [7, 1000])
def test_v_sknn_votes_as_its_formula_says(
    monkeypatch: pytest.MonkeyPatch, idf: bool, most_recent: int, seconds: int
):
    monkeypatch.setattr("nonet.models.baselines._v_sknn._IDFS", (idf,))
    monkeypatch.setattr("nonet.models.baselines._v_sknn._MAX_SESSIONS", most_recent)
    monkeypatch.setattr("nonet.models.baselines._v_sknn._CHUNK_PAIRS", 30_000)
    draw = np.random.default_rng(5)
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(60), 8),
            "item_id": draw.integers(0, ITEMS // 4, 480),
            "timestamp": draw.permutation(480) % seconds + 1,
        }
    )
    seq = build_sequences(log, None, split={"test": 1, "valid": 1}, repeats="allow")[0]
    fitted = VSknn(ITEMS, seed=1, neighbours=4, last=5).fit(seq)
    own = [slice(seq.offsets[user], seq.offsets[user + 1]) for user in range(len(seq))]
    sessions = [set(seq.item[part][seq.split[part] == TRAIN].tolist()) for part in own]
    newest = [seq.time[part][seq.split[part] == TRAIN].max() for part in own]
    n_with = np.array([max(1, sum(item in session for session in sessions)) for item in range(ITEMS)])
    users, positions = list_prompts(seq, TEST)
    users, positions = users[:10], positions[:10]
    actual = fitted.scores(seq, users, positions)
    for row, (user, position) in enumerate(zip(users, positions, strict=True)):
        history = seq.item[seq.offsets[user] :][:position][::-1][:5].tolist()
        age = {item: place for place, item in reversed(list(enumerate(history)))}
        near = [
            (other, sum(len(history) - age[item] for item in shared) / (len(history) * len(age)), shared)
            for other in range(len(seq))
            if other != user and (shared := sessions[other] & age.keys())
        ]
        near = sorted(near, key=lambda entry: -newest[entry[0]])[:most_recent]
        near = sorted(near, key=lambda entry: -entry[1])[:4]
        expected = np.zeros(ITEMS)
        for other, similarity, shared in near:
            for item in sessions[other]:
                expected[item] += similarity / (1 + min(age[shared_item] for shared_item in shared))
        expected *= np.log(len(seq) / n_with) if idf else 1
        np.testing.assert_allclose(actual[row], expected, atol=1e-5)


def fit_v_sknn(seq: Sequences, n_items: int = ITEMS) -> VSknn:
    return VSknn(n_items, seed=1, neighbours=5).fit(seq)


@pytest.mark.parametrize("ids", ["as they are", "as text"])
def test_v_sknn_leaves_out_the_session_of_the_same_user_in_other_sequences(ids: str):
    fitted, first = fit_v_sknn(SEQ), 30
    users, positions = list_prompts(SEQ, TEST)
    users, positions = users[users >= first], positions[users >= first]
    other = SEQ.slice_users(first, len(SEQ))
    if ids == "as text":
        other = replace(other, user_id=np.array([str(user) for user in other.user_id], object))
    expected = fitted.scores(SEQ, users, positions)
    np.testing.assert_array_equal(fitted.scores(other, users - first, positions), expected)
    new = replace(other, user_id=other.user_id[::-1].copy())
    assert (fitted.scores(new, users - first, positions) != expected).any()


def test_v_sknn_compares_as_many_other_sessions_as_its_limit_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nonet.models.baselines._v_sknn._MAX_SESSIONS", 3)
    user = [0] * 4 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3
    item = [0, 1, 2, 3, 0, 4, 5, 0, 6, 7, 0, 8, 9, 0, 10, 11, 0, 12, 13]
    time = [100, 101, 102, 103, 10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42, 50, 51, 52]
    log = pa.table({"user_id": user, "item_id": item, "timestamp": time})
    seq = build_sequences(log, None, split={"test": 1, "valid": 1})[0]
    sessions = fit_v_sknn(seq, 14)._find_neighbours(seq, np.array([0]), np.array([3]))[1]
    assert sorted(sessions.tolist()) == [3, 4, 5]


def test_v_sknn_takes_the_most_recent_sessions_of_times_before_1970(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nonet.models.baselines._v_sknn._MAX_SESSIONS", 7)
    draw = np.random.default_rng(3)
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(80), 6),
            "item_id": draw.integers(0, ITEMS // 4, 480),
            "timestamp": draw.permutation(480) + 1,
        }
    )
    seq = build_sequences(log, None, split={"test": 1, "valid": 1}, repeats="allow")[0]
    before = replace(seq, time=seq.time - 10**6)
    users, positions = list_prompts(seq, TEST)
    expected = fit_v_sknn(seq).scores(seq, users, positions)
    np.testing.assert_array_equal(fit_v_sknn(before).scores(before, users, positions), expected)


def test_v_sknn_weighs_items_by_the_sessions_that_have_training_events():
    early = np.repeat(np.arange(10), 3) * 10 + np.tile([0, 1, 2], 10)
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(100), 3),
            "item_id": np.tile([0, 1, 2], 100),
            "timestamp": np.r_[early, 1000 + np.arange(270)],
        }
    )
    seq = build_sequences(log, None, split={"use": "time", "test": "1970-01-01T00:19:10Z", "valid": "150s"})[
        0
    ]
    assert np.isin(TRAIN, seq.split[seq.user >= 10]) == np.False_
    np.testing.assert_array_equal(fit_v_sknn(seq, 3)._idf, np.zeros(3))


def test_item_knn_keeps_the_most_similar_items_beside_the_item_itself():
    seq = replace(SEQ, split=np.where(SEQ.split == VALID, TRAIN, SEQ.split).astype(np.int8))
    similarity = (
        make_baseline({"use": "item_knn", "neighbours": 4}, ITEMS, seed=1, history=8).fit(seq)._similarity
    )
    matrix = make_matrix(seq)
    norm = np.linalg.norm(matrix, axis=0)
    expected = np.sort(matrix.T @ matrix / norm / norm[:, None], 1)[:, -5:]
    np.testing.assert_allclose(np.sort(similarity.toarray(), 1)[:, -5:], expected, atol=1e-6)
    assert (np.diff(similarity.indptr) == 5).all()


@pytest.mark.parametrize("name", ["item_knn", "v_sknn"])
def test_items_without_votes_are_ranked_by_popularity_below_all_others(name: str):
    fitted = make_baseline({"use": name, "neighbours": 2}, ITEMS, seed=1, history=8).fit(SEQ)
    votes, popularity = fitted.votes(SEQ, np.array([0]), np.array([5])), Popularity(ITEMS).fit(SEQ).popularity
    np.testing.assert_allclose(votes.prior / votes.prior.max(), popularity / popularity.max())
    assert 0 < votes.prior.max() < votes.weight[votes.weight > 0].min()
    nothing = fitted.scores(SEQ, np.array([0]), np.array([0]))[0]
    assert nothing.argmax() in np.flatnonzero(popularity == popularity.max())


def test_item_knn_ranks_catalogues_of_which_users_have_all_items_but_one():
    draw, n_items = np.random.default_rng(0), 6
    items = [[*draw.permutation(n_items)[: n_items - 1], 0, 1] for _ in range(30)]
    log = pa.table(
        {"user_id": np.repeat(np.arange(30), 7), "item_id": np.ravel(items), "timestamp": np.arange(210)}
    )
    seq = build_sequences(log, None, split={"test": 1, "valid": 1}, repeats="allow")[0]
    fitted = make_baseline({"use": "item_knn"}, n_items, seed=1, history=8).fit(seq)
    users, positions = list_prompts(seq, TEST)
    assert np.isfinite(fitted.scores(seq, users, positions)).all()
    assert np.isfinite(fitted._similarity.data).all()


def test_the_first_vectors_of_ials_are_drawn_from_the_seed():
    first, again, other = (
        make_baseline({"use": "ials"}, ITEMS, seed=seed, history=8).fit(SEQ)._model.item_factors
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_prompt_lists_each_item_once_with_the_age_of_its_newest_event():
    log = pa.table({"user_id": [1] * 6, "item_id": [3, 1, 3, 2, 1, 0], "timestamp": [1, 2, 3, 4, 5, 6]})
    seq = build_sequences(log, None, split={"test": 1, "valid": 1}, repeats="allow")[0]
    users, positions = np.array([0, 0]), np.array([5, 0])
    assert [column.tolist() for column in list_prompt_items(seq, users, positions, 4)] == [
        [0, 0, 0],
        [1, 2, 3],
        [0, 1, 2],
    ]
    assert [column.tolist() for column in list_prompt_items(seq, users, positions, 4, last=2)] == [
        [0, 0],
        [1, 2],
        [0, 1],
    ]


def test_recent_popularity_takes_the_window_that_validation_prefers():
    early, late = np.repeat([0, 1, 2], 40), np.repeat(3, 36)
    item = np.concatenate([early, late, [0, 1, 3]])
    log = pa.table(
        {"user_id": np.r_[np.arange(156), 200, 200, 200], "item_id": item, "timestamp": np.arange(159) + 1}
    )
    seq = build_sequences(log, None, split={"test": 1, "valid": 1})[0]
    seq = replace(seq, split=np.where(seq.time == 159, VALID, TRAIN).astype(np.int8))
    fitted = RecentPopularity(6, seed=1).fit(seq)
    assert fitted.trained["share"] < 0.3
    assert fitted.scores(seq, np.zeros(1, int), np.zeros(1, int))[0].argsort()[-1] == 3
    whole = RecentPopularity(6, seed=1, share=1.0).fit(seq)
    popularity = Popularity(6).fit(seq).popularity
    np.testing.assert_allclose(whole.votes(seq, np.zeros(1), np.zeros(1)).prior, popularity, atol=1e-5)


def test_any_share_of_the_events_is_a_window_and_all_of_them_reach_back_to_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
):
    newest = RecentPopularity(ITEMS, seed=1, share=1e-17).fit(SEQ)
    assert newest.trained["since"] == SEQ.time[SEQ.split == TRAIN].max()
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(300), 8),
            "item_id": np.arange(2400) % 7,
            "timestamp": np.arange(2400)[::-1],
        }
    )
    seq = build_sequences(log, None, split={"test": 1, "valid": 1}, repeats="allow")[0]
    monkeypatch.setattr("nonet.models.baselines._recent_popularity._MAX_TIMES", 100)
    fitted = RecentPopularity(7, seed=1, share=1.0).fit(seq)
    assert fitted.trained["since"] == seq.time[seq.split == TRAIN].min()
    np.testing.assert_array_equal(np.round(fitted._popularity), Popularity(7).fit(seq).popularity)


def test_items_of_equal_recent_popularity_are_ranked_by_that_of_all_time():
    item = [0, 1, 1, 2, 2, 2, 0, 1, 2, 0]
    log = pa.table({"user_id": [0] * 10, "item_id": item, "timestamp": np.arange(10) + 1})
    seq = build_sequences(log, None, split={"test": 1, "valid": 0}, repeats="allow")[0]
    fitted = RecentPopularity(3, seed=1, share=0.34).fit(seq)
    assert fitted.scores(seq, np.zeros(1, int), np.zeros(1, int))[0].argsort().tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ALL)
def test_they_are_made_by_name_and_learn_from_training_events_alone(name: str):
    def fit(seq: Sequences):
        return make_baseline({"use": name}, ITEMS, seed=1, history=8).fit(seq)

    fitted, users, positions = fit(SEQ), np.array([0, 1, 2]), np.array([5, 5, 0])
    scores = np.array(fitted.scores(SEQ, users, positions))
    assert scores.shape == (3, ITEMS)
    assert np.isfinite(scores).all()
    changed = fit(with_item(SEQ, TEST, 0))
    assert changed.trained == fitted.trained != {}
    np.testing.assert_array_equal(np.array(changed.scores(SEQ, users, positions)), scores)
    if name != "recent_popularity":
        assert rank(fitted, SEQ) > 1.1 * rank(
            type("P", (), {"scores": lambda _, *a: np.array(Popularity(ITEMS).fit(SEQ).scores(*a))})(), SEQ
        )


@pytest.mark.parametrize("name", ALL)
def test_without_validation_events_their_usual_options_stay(name: str):
    seq = replace(SEQ, split=np.where(SEQ.split == VALID, TRAIN, SEQ.split).astype(np.int8))
    fitted = make_baseline({"use": name}, ITEMS, seed=1, history=8).fit(seq)
    assert np.isfinite(np.array(fitted.scores(seq, np.array([0]), np.array([3])))).all()
    users, positions = draw_validation_events(SEQ, (TRAIN, VALID), 1, name)
    assert compute_ndcg(lambda *_: np.zeros((0, ITEMS)), SEQ, users, positions, ITEMS) == 0.0


def test_a_catalogue_too_large_for_ease_and_a_missing_library_are_told(monkeypatch: pytest.MonkeyPatch):
    items = make_items(SEQ)
    monkeypatch.setattr(ease_keys, "MAX_ITEMS", 100)
    with pytest.raises(DataError, match=r"ease: 120 items, and it allows at most 100"):
        BASELINES.get("ease").check_items(items, {"use": "ease"})
    BASELINES.get("ials").check_items(items, {"use": "ials"})
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ials needs implicit: pip install 'nonet\[baselines\]'"):
        BASELINES.get("ials").check_items(items, {"use": "ials"})

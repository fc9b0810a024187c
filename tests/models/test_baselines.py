import collections
import cProfile

import numpy as np
import pyarrow as pa
import pytest

from nonet.models.baselines.kinds.popularity import Popularity
from nonet.models.baselines.kinds.transition_counter import TransitionCounter
from nonet.models.ranking.metrics import make_tie_order, rank_of_target_np, summarise
from nonet.samples.batches.prompt_rows import gather_masked_items, list_prompts
from nonet.samples.sequences.sequences import RL, TEST, TRAIN, VALID, Sequences, build_sequences


def _sequences(seed: int = 0, users: int = 40, items: int = 25, events: int = 800) -> Sequences:
    """Users that walk a noisy circle of items, so that transitions tell more than popularity."""
    rng = np.random.default_rng(seed)
    user = np.sort(rng.integers(0, users, events))
    item = np.where(rng.random(events) < 0.7, np.arange(events) % items, rng.integers(0, items, events))
    log = pa.table({"user_id": user, "item_id": item, "timestamp": np.arange(events)})
    return build_sequences(log, None, split={"test": 2, "valid": 1, "rl": 2})[0]


def _prototype(seq: Sequences, items: int, splits, user: int, position: int) -> np.ndarray:
    """Compute the counter as first written: loops, dictionaries, float64."""
    pop = np.zeros(items)
    trans: dict = collections.defaultdict(collections.Counter)
    for u in range(len(seq)):
        part = slice(seq.offsets[u], seq.offsets[u + 1])
        train = seq.item[part][np.isin(seq.split[part], splits)].tolist()
        for x in train:
            pop[x] += 1
        for i in range(len(train)):
            for j in range(i + 1, min(i + 4, len(train))):
                trans[train[i]][train[j]] += 1 / (j - i)
    z = pop / pop.max() * 1e-3
    history = seq.item[seq.offsets[user] : seq.offsets[user] + position].tolist()
    for d, x in enumerate(history[::-1][:5]):
        for y, c in trans.get(x, {}).items():
            z[y] += c * (0.6**d) / max(pop[x], 1) ** 0.5
    return z


@pytest.mark.parametrize("splits", [(TRAIN,), (TRAIN, RL, VALID)])
def test_counter_scores_as_the_prototype_does(splits):
    seq = _sequences()
    counter = TransitionCounter(25).fit(seq, splits)
    users, positions = list_prompts(seq, TEST)
    users, positions = np.append(users, [0, 0]), np.append(positions, [0, 2])  # no history, and a short one
    scores = counter.scores(seq, users, positions)
    assert scores.dtype == np.float32
    for i in range(len(users)):
        wanted = _prototype(seq, 25, splits, users[i], positions[i])
        np.testing.assert_allclose(scores[i], wanted, rtol=2e-6, atol=1e-9)  # float32 of a float64 sum


def test_popularity_counts_training_events_only_by_default():
    seq = _sequences()
    users, positions = list_prompts(seq, TEST)
    for splits in ((TRAIN,), (TRAIN, RL)):
        wanted = np.bincount(seq.item[np.isin(seq.split, splits)], minlength=25)
        scores = Popularity(25).fit(seq, splits).scores(seq, users, positions)
        assert scores.shape == (len(users), 25)
        np.testing.assert_array_equal(scores[-1], wanted)
    default = Popularity(25).fit(seq).popularity
    np.testing.assert_array_equal(default, Popularity(25).fit(seq, (TRAIN,)).popularity)


@pytest.mark.parametrize("kind", [Popularity, TransitionCounter])
def test_held_out_events_do_not_change_a_fit(kind):
    seq = _sequences()
    other = seq.item.copy()
    other[seq.split != TRAIN] = 0
    users, positions = np.array([0, 1]), np.array([5, 5])
    changed = Sequences(**{**seq.__dict__, "item": other})
    assert (other != seq.item).any()
    fitted = kind(25).fit(changed)
    np.testing.assert_array_equal(
        kind(25).fit(seq).scores(seq, users, positions), fitted.scores(seq, users, positions)
    )


def test_counter_answers_by_popularity_where_nobody_votes():
    seq = _sequences()
    scores = TransitionCounter(25).fit(seq).scores(seq, np.array([0]), np.array([0]))[0]
    popular = Popularity(25).fit(seq).scores(seq, np.array([0]), np.array([0]))[0]
    np.testing.assert_array_equal(np.argsort(scores, kind="stable"), np.argsort(popular, kind="stable"))


def test_scores_do_not_depend_on_which_prompts_are_asked_together():
    seq = _sequences()
    users, positions = list_prompts(seq, TEST)
    counter = TransitionCounter(25).fit(seq)
    whole = counter.scores(seq, users, positions)
    for chunk in (1, 7):
        parts = [
            counter.scores(seq, users[i : i + chunk], positions[i : i + chunk])
            for i in range(0, len(users), chunk)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_counter_beats_popularity_where_order_matters():
    seq = _sequences(users=100, items=200, events=4000)
    users, positions = list_prompts(seq, TEST)
    target, found = seq.item[seq.offsets[users] + positions], []
    for kind in (TransitionCounter, Popularity):
        fitted = kind(200).fit(seq)
        scores, hidden = fitted.scores(seq, users, positions), gather_masked_items(seq, users, positions)
        ranks = rank_of_target_np(scores, target, hidden, make_tie_order(fitted.popularity, 0))
        found.append(summarise(ranks, ["recall@5"])["recall@5"])
    assert found[0] > 2 * found[1]


def test_counter_fits_and_scores_movielens_sized_data_without_a_call_an_event():
    rng = np.random.default_rng(0)
    users, items, events = 671, 3496, 90_000
    log = pa.table(
        {
            "user_id": rng.integers(0, users, events),
            "item_id": np.concatenate(
                [np.arange(items), (rng.random(events - items) ** 3 * items).astype(int)]
            ),
            "timestamp": rng.integers(0, 10**9, events),
        }
    )
    seq, _ = build_sequences(log, None, split={"test": 5, "valid": 1, "rl": 5})
    at, positions = list_prompts(seq, TEST)
    counter, calls = TransitionCounter(items), []
    for work in (lambda: counter.fit(seq), lambda: counter.scores(seq, at, positions)):
        profile = cProfile.Profile()
        profile.enable()
        work()
        profile.disable()
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[0] < events / 100
    assert calls[1] < 50 * len(at)

"""Shipped rewards that know the run's items or a whole list, against figures worked out by hand. No Ray."""

from __future__ import annotations

from math import log2
from types import SimpleNamespace

import numpy as np
import pytest

from nonet.rl.rewards.known import locate_ids
from nonet.rl.rewards.shipped import Cooccurrence, Diversity, Prefix, TextSimilarity, ndcg, novelty
from nonet.samples.sequences import Transitions
from nonet.types import Jagged, Rollouts

ITEMS = np.array([10, 20, 30, 40])
SIDS = np.array([[0, 1, 0], [0, 1, 1], [0, 2, 0], [3, 0, 0]], np.int32)


def rollouts(item, target, history, **columns):
    item = np.array(item)
    valid = item >= 0
    users = len(item)
    ids = np.where(valid, ITEMS[np.maximum(item, 0)], -1)
    return Rollouts(
        uid=np.array([str(n) for n in range(users)]),
        user_id=np.arange(users),
        item_id=ids,
        item=item,
        sid=SIDS[np.maximum(item, 0)],
        logp=np.zeros((*item.shape, 3), np.float32),
        valid=valid,
        target=Jagged(np.concatenate(target), np.cumsum([0, *map(len, target)])),
        history=Jagged(np.concatenate(history), np.cumsum([0, *map(len, history)])),
        scene=np.zeros(users, np.int64),
        weights_version=1,
        catalogue_version="",
        step=0,
        columns={name: np.array(values) for name, values in columns.items()},
    )


def opened(reward, **more):
    run = SimpleNamespace(sid=SIDS, index=lambda ids: locate_ids(ITEMS, ids), **more)
    reward.open(run)
    return reward


def test_prefix_is_the_share_of_leading_levels_shared_with_the_nearest_target():
    beams = rollouts([[0, 1, 2, 3]], [[10]], [[20]])
    assert opened(Prefix()).score(beams).tolist() == [pytest.approx([1, 2 / 3, 1 / 3, 0])]
    two = rollouts([[0, 1, 2, 3]], [[20, 40]], [[10]])
    assert opened(Prefix()).score(two).tolist() == [pytest.approx([2 / 3, 1, 1 / 3, 1])]


def test_ndcg_of_a_list_is_the_sum_of_what_its_beams_get():
    item = np.array([[10, 20, 30], [20, 30, 40]])
    target = Jagged(np.array([20, 20, 40]), np.array([0, 1, 3]))
    scores = ndcg(item, target, np.ones((2, 3), bool))
    ideal = 1 + 1 / log2(3)
    assert scores[0].tolist() == pytest.approx([0, 1 / log2(3), 0])
    assert scores[1].sum() == pytest.approx((1 + 1 / log2(4)) / ideal)


def test_novelty_halves_with_the_half_life():
    assert novelty(np.array([[0, 30, 60]])).tolist() == [[1.0, 0.5, 0.25]]


def test_diversity_is_one_less_the_mean_overlap_with_the_other_beams():
    beams = rollouts([[0, 1, 2, -1]], [[10]], [[20]], categories=[["a|b", "a", "c", "a"]])
    # a|b with a: 1/2, with c: 0; a with c: 0; the missing beam counts nowhere
    assert Diversity().score(beams)[0, :3].tolist() == pytest.approx([0.75, 0.75, 1.0])


def test_cooccurrence_is_the_mean_share_of_recent_events_that_led_to_the_item():
    pairs = Transitions(
        row=np.array([0, 2, 3, 3, 3]),
        item=np.array([1, 2, 3], np.int32),
        count=np.array([2.0, 1.0, 4.0], np.float32),
        occurs=np.array([4.0, 8.0, 1.0, 1.0], np.float32),
    )
    reward = opened(Cooccurrence(last=2), transitions=pairs)
    beams = rollouts([[1, 2, 3]], [[10]], [[40, 10, 20]])  # the last two: 20 and 10
    assert reward.score(beams).tolist() == [pytest.approx([(2 / 4) / 2, (1 / 4) / 2, (4 / 8) / 2])]


def test_text_similarity_is_one_for_the_same_rare_words_and_nothing_without_common_ones():
    texts = np.array(["red shoe", "red shoe", "blue hat", "green cup"])
    reward = opened(TextSimilarity(last=1), column=lambda name: texts)
    scores = reward.score(rollouts([[1, 2, -1]], [[10]], [[10]]))
    assert scores[0].tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)

"""A prompt that a reward fails on costs its own row and its time: raising, hanging, NaN, a wrong shape. No Ray."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from nonet.errors import DataError
from nonet.rl.rewards.api import FunctionReward, Reward
from nonet.rl.rewards.attempts import Attempts
from nonet.types import Jagged


def attempts(function, timeout_s=5.0):
    return Attempts(lambda: FunctionReward(function, {}), "own", timeout_s)


def one(rollouts, row):
    """The rollouts of one prompt."""
    cut = {name: getattr(rollouts, name) for name in rollouts.__slots__}
    for name, value in cut.items():
        if isinstance(value, np.ndarray):
            cut[name] = value[row : row + 1]
        if isinstance(value, Jagged):
            cut[name] = Jagged(value[row], np.array([0, len(value[row])]))
    return type(rollouts)(**cut)


def test_nan_of_one_user_leaves_the_others_their_scores(make_rollouts):
    def nan(user_id, item):
        return np.where((user_id == 502)[:, None], np.nan, item * 1.0)

    scores, troubles = attempts(nan).score(make_rollouts(3))
    assert np.isnan(scores[1]).all()
    assert np.array_equal(scores[[0, 2]], [[10, 11], [14, 15]])
    assert [(each.row, each.uid, each.user) for each in troubles] == [(1, "rl/0/1", "502")]
    assert "returned nan for user 502, item 12" in troubles[0].why


def test_one_by_one_finds_who_raises_and_scores_the_rest(make_rollouts):
    def picky(user_id, item):
        if (user_id == 502).any():
            raise ValueError("not this one")
        return item

    rollouts, tried = make_rollouts(3), attempts(picky)
    scores, troubles = tried.score(rollouts)
    assert np.isnan(scores).all()
    assert len(troubles) == 3
    parts, left = tried.one_by_one([one(rollouts, row) for row in range(3)])
    assert [each.row for each in left] == [1]
    assert "not this one" in left[0].why
    assert np.array_equal(np.concatenate(parts)[[0, 2]], [[10, 11], [14, 15]])


def test_a_call_that_hangs_costs_its_time_and_the_reward_is_made_anew(make_rollouts):
    release, made = threading.Event(), []

    class Hangs(Reward):
        def __init__(self):
            made.append(self)

        def score(self, r):
            if len(made) == 1:
                release.wait(30)
            return np.ones(r.valid.shape)

    tried = Attempts(Hangs, "slow", 0.2)
    began = time.monotonic()
    scores, troubles = tried.score(make_rollouts(2))
    assert time.monotonic() - began < 20, "it does not wait for the reward"
    assert np.isnan(scores).all()
    assert "has not answered within 0.2" in troubles[0].why
    scores, troubles = tried.score(make_rollouts(2))
    assert not troubles
    assert (scores == 1).all()
    assert len(made) == 2
    release.set()


def test_a_wrong_shape_is_shown_with_what_came_back(make_rollouts):
    def flat(item):
        return item[:, 0]

    _, troubles = attempts(flat).score(make_rollouts(3))
    assert "returned numpy.ndarray of shape [3] int64" in troubles[0].why
    assert "wanted numbers of shape [3, 2]" in troubles[0].why


def test_an_async_function_is_waited_for(make_rollouts):
    import asyncio

    async def later(item):
        await asyncio.sleep(0)
        return item * 2.0

    scores, troubles = attempts(later).score(make_rollouts(1))
    assert not troubles
    assert scores.tolist() == [[20, 22]]


def test_an_error_in_setup_still_raises():
    class Broken(Reward):
        def __init__(self):
            raise DataError("no model")

    with pytest.raises(DataError, match="no model"):
        Attempts(Broken, "own", 1.0)
